"""Counts how many small wrong changes the fast tests notice. Run by hand, from the root
of the tree:

    python -m tests.mutation                      # all changes, each against the test files that it names
    python -m tests.mutation library              # those of `changes_library.py`; others likewise
    python -m tests.mutation library r2 interval  # of these, the ones whose file or words contain "r2" or "interval"
    python -m tests.mutation --whole              # each against the whole fast suite (hours)

Every change is made alone, in a temporary copy of the tree: the working tree is only
read. pytest runs until the first failure. The tests must pass without any change, which
is checked first (`--trust` leaves that out). The table says of each change whether it
was noticed and by which test, and lists the changes whose old text is no longer there;
the exit code is 0 where all were noticed. The libraries are imported once, and every
run is a fork.
"""

import argparse
import importlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback

from tests import environment  # noqa: F401 (before JAX is imported)
from tests.mutation import Change

ROOT = pathlib.Path(__file__).parents[2]
LISTS = (
    "library",
    "scripts",
    "methods",
    "blind",
    "more",
    "fresh",
    "third",
    "neighbours",
    "zoo",
    "foreign",
    "decode",
    "lens",
    "drafts",
    "exits",
)
LIBRARIES = (
    "flax.nnx jax matplotlib.pyplot optax orbax.checkpoint pytest sklearn.linear_model torch "
    "transformers"
)
SECONDS = 900  # of one run; a change that makes the tests hang is noticed


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "words", nargs="*", help=f"a list ({', '.join(LISTS)}), then words of files or descriptions"
    )
    parser.add_argument(
        "--whole", action="store_true", help="run the whole fast suite for every change"
    )
    parser.add_argument(
        "--trust", action="store_true", help="do not run the tests without a change first"
    )
    given = parser.parse_args()
    lists = [name for name in LISTS if name in given.words] or LISTS
    words = [word.lower() for word in given.words if word not in LISTS]
    changes = [
        change
        for change in _read(lists)
        if not words or any(word in _text(change) for word in words)
    ]
    for name in LIBRARIES.split():
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="jmat-mutation-") as folder:
        copy = _copy(pathlib.Path(folder).resolve())
        if not given.trust and not given.whole:
            files = sorted({file for change in changes for file in change.tests.split()})
            if failure := _run(copy, files):
                print(f"Without any change: {failure}. Mend that first.")
                return 1
        results = [_try(copy, change, given.whole) for change in changes]
    return _summarise(changes, results)


def _read(lists: list[str] | tuple[str, ...]) -> list[Change]:
    changes: list[Change] = []
    for name in lists:
        if (ROOT / "tests" / "mutation" / f"changes_{name}.py").exists():
            changes += importlib.import_module(f"tests.mutation.changes_{name}").CHANGES
    named = sorted({file for change in changes for file in change.tests.split()})
    if missing := [file for file in named if not (ROOT / "tests" / file).exists()]:
        sys.exit(f"There is no {', '.join(missing)} in tests/; the lists of changes name it.")
    return changes


def _text(change: Change) -> str:
    return f"{change.file} {change.words}".lower()


def _copy(folder: pathlib.Path) -> pathlib.Path:
    """The files of the working tree that git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def _try(copy: pathlib.Path, change: Change, whole: bool) -> str | None:
    """The test that notices, "" where none does, None where the old text is not there
    exactly once.
    """
    path, began = copy / change.file, time.monotonic()
    before = path.read_text("utf-8") if path.is_file() else ""
    if before.count(change.old) != 1:
        result = None
    else:
        path.write_text(before.replace(change.old, change.new), "utf-8")
        result = _run(copy, [] if whole else change.tests.split())
        path.write_text(before, "utf-8")
    print(
        f"{time.monotonic() - began:5.0f} s  {_verdict(result):12} {change.file}: {change.words}",
        flush=True,
    )
    return result


def _run(copy: pathlib.Path, files: list[str]) -> str:
    """The first test that fails in the copy, as pytest names it; "" where all pass."""
    report = copy / "mutation-report.txt"
    child = os.fork()
    if not child:
        try:
            os._exit(_pytest(copy, report, files))
        except BaseException:
            traceback.print_exc()
            os._exit(99)
    deadline = time.monotonic() + SECONDS
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "the tests did not end"
        time.sleep(0.1)
    if status == 0:
        return ""
    text = report.read_text("utf-8", "replace")
    failed = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", text, re.MULTILINE)
    return (
        failed[1]
        if failed
        else f"pytest ended with {os.waitstatus_to_exitcode(status)}: {text[-1500:]}"
    )


def _pytest(copy: pathlib.Path, report: pathlib.Path, files: list[str]) -> int:
    """Runs pytest on the copy, in this process; returns its exit code."""
    import pytest

    os.setpgid(0, 0)
    output = os.open(report, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1), os.dup2(output, 2)
    os.chdir(copy)
    for name in [
        name for name in sys.modules if name.split(".")[0] in ("tests", "jmat", "experiments")
    ]:
        del sys.modules[name]
    sys.path[:] = [
        str(copy),
        *(path for path in sys.path if pathlib.Path(path or ".").resolve() != ROOT),
    ]
    os.environ["PYTHONPATH"] = str(copy)
    # A file that changes twice in a second, to the same size, would be taken for its compiled self.
    sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = True, "1"
    chosen = [f"tests/{file}" for file in files] or ["tests"]
    imported_before = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    code = pytest.main(
        ["-x", "-q", "-n0", "-pno:cacheprovider", "-rfE", "--tb=short", *imported_before, *chosen]
    )
    sys.stdout.flush(), sys.stderr.flush()
    return int(code)


def _verdict(result: str | None) -> str:
    return "not found" if result is None else "noticed" if result else "NOT NOTICED"


def _summarise(changes: list[Change], results: list[str | None]) -> int:
    print()
    for verdict in ("not found", "NOT NOTICED", "noticed"):
        for change, result in zip(changes, results, strict=True):
            if _verdict(result) == verdict:
                print(
                    f"{verdict:12} {change.file}: {change.words}"
                    + (f" ({result})" if result else "")
                )
    made = [result for result in results if result is not None]
    noticed = sum(bool(result) for result in made)
    print(
        f"\n{noticed} of {len(made)} changes noticed; the old text of {len(results) - len(made)} "
        "was not found."
    )
    return 0 if noticed == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
