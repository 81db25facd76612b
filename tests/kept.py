"""All that a run of a script leaves, held against what the same run left before: rows,
maps, tables, figures.

A figure that changes is either a fault or a decision. Other tests compute what is right
by hand; this one says that nothing else changed with it: no label, n, note, legend,
fingerprint or line that is printed. `inside.call` asks it about every run that some
test makes, so it takes no time; a run that was never written down passes.

    python -m tests.kept          # writes down anew, after a decision (some ten minutes)

Another machine rounds differently. What then changes is found by writing down twice:
the second time all weights are off by some 1e-5 of themselves, and the clock runs three
times as fast. What differs is left out.
"""

import functools
import gzip
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from typing import Any

import jax
import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex

PATH = pathlib.Path(__file__).parent / "data" / "kept.json.gz"
# a folder to write to: that of the first time, or of the second
_WRITE = os.environ.get("JMAT_TEST_KEEP")
_SECOND = "second"
_NUMBERS = ("value", "low", "high")
_SHARES = (
    "precision@",
    "recall@",
    "accuracy",
    "disagreement",
    "token_error_share",
    "layers_saved",
    "same_top_1",
)
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
_UNSTABLE = "~"  # stands for what is not the same everywhere
_TESTS = ("wiring_early_exit wiring_jumps wiring_linearity wiring_measures wiring_models "
          "wiring_parts wiring_rest wiring_units pieces kept").split()  # fmt: skip

Leaves = dict[str, Any]  # name → number, list of numbers, or text


def check(outcome: Any) -> None:
    """Raises AssertionError where a run left something else than before."""
    name = outcome.name
    if _WRITE:
        _write(pathlib.Path(_WRITE), name, describe(outcome))
    elif (wanted := _kept().get(name)) is not None and (
        differing := differences(wanted, describe(outcome))
    ):
        shown = "\n".join(differing[:20])
        raise AssertionError(
            f"{name} leaves something else than before, in {len(differing)} places:\n{shown}"
        )


def is_kept(outcome: Any) -> bool:
    """Returns whether a run was written down."""
    return bool(_WRITE) or outcome.name in _kept()


def differences(wanted: Leaves, found: Leaves) -> list[str]:
    """Returns a line for each leaf that is missing, new or different."""
    lines = []
    for name in {**wanted, **found}:
        if name not in found or name not in wanted:
            known = wanted.get(name, _UNSTABLE)
            if known != _UNSTABLE or (name not in wanted and _is_closed(name, wanted)):
                lines.append(f"{name}: {'is missing' if name in wanted else 'is new'}")
        elif not _alike(name, wanted[name], found[name]):
            lines.append(f"{name}: {found[name]!r}, and was {wanted[name]!r}")
    return lines


def _is_closed(name: str, wanted: Leaves) -> bool:
    """Returns whether a new leaf is one too many: flags may come, and groups of which a
    part is unstable may differ.
    """
    group = name.partition(" ")[0]
    return group != "config" and wanted.get(f"group {group}") != _UNSTABLE


def _alike(name: str, wanted: Any, found: Any) -> bool:
    if wanted == _UNSTABLE:
        return True
    if isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        allowed = _allowed(name, wanted)
        return all(_close(a, b, allowed) for a, b in zip(wanted, found, strict=True))
    if isinstance(wanted, float) and isinstance(found, float):
        return _close(wanted, found, 0.03 if abs(wanted) < 2 else 0.02 * abs(wanted))
    return wanted == found


def _close(wanted: Any, found: Any, allowed: float) -> bool:
    if wanted is None or found is None or wanted == _UNSTABLE:
        return wanted == _UNSTABLE or wanted is found
    return abs(wanted - found) <= allowed + 0.01 * abs(wanted)


def _allowed(name: str, numbers: list[Any]) -> float:
    """Returns by how much the numbers of one row may be off: one example may fall the
    other way.
    """
    n = re.search(r"\bn=(\d+)", name)
    share = any(f"metric={metric}" in name for metric in _SHARES)
    known = [number for number in numbers if isinstance(number, float)]
    spread = max(known) - min(known) if known and name.startswith("row") else 0.0
    return 1e-6 + 0.03 * spread + (1.5 / int(n[1]) if share and n else 0.0)


# --- what a run left ------------------------------------------------------------------------------


def describe(outcome: Any) -> Leaves:
    """Returns all that a run left, by name."""
    results = outcome.results
    leaves: Leaves = {"group files": " ".join(sorted(path.name for path in outcome.out.iterdir()))}
    leaves |= _flat("experiment", results["experiment"]) | _flat("text", results["text"])
    leaves |= _flat("config", results["config"])
    if results["experiment"] not in ("pretrain", "benchmark"):  # which make models of their own
        leaves |= _flat("model_hash", results["model_hash"])
    count: Counter[str] = Counter()
    for row in results["rows"]:
        label = " ".join(
            f"{key}={_text(row[key])}" for key in sorted(row) if not _is_number(key, row[key])
        )
        count[label] += 1
        leaves[f"row {label} #{count[label]}"] = [
            _short(row[key]) for key in sorted(row) if _is_number(key, row[key])
        ]
    leaves["group row"] = str(len(results["rows"]))
    if (outcome.out / "maps.json").is_file():
        leaves |= _maps(*outcome.maps)
    for group, printed in (("printed", outcome.printed), ("said", outcome.said)):
        lines = [
            line for line in printed.splitlines() if group == "printed" or line.startswith("· ")
        ]
        # Empty lines say nothing; "timed on" names the processor.
        lines = [line for line in lines if line.strip() and not line.startswith("timed on")]
        leaves[f"group {group}"] = str(len(lines))
        for number, line in enumerate(lines):
            leaves |= _line(f"{group} {number}", line)
    for number, (count, certainty) in enumerate(outcome.collected):
        leaves |= {f"collected {number}": count, f"collected {number} certainty": certainty}
    leaves["group figure"] = str(len(outcome.figures))
    for number, figure in enumerate(outcome.figures):
        leaves |= _figure(f"figure {number}", figure)
    return leaves


def _is_number(key: str, value: Any) -> bool:
    return key in _NUMBERS or key.startswith("probability_") or key.endswith("_seconds")


def _text(value: Any) -> str:
    """A value of a label: paths without their folders, floats in four digits, notes
    without their numbers.
    """
    if isinstance(value, float):
        return f"{value:.4g}"
    return (
        _NUMBER.sub("#", _bare(value))
        if isinstance(value, str) and " " in value
        else _bare(str(value))
    )


def _bare(text: str) -> str:
    """A text in which paths have lost their folders, and output folders of earlier runs
    their numbers.
    """
    text = re.sub(r"\S*/jmat-inside-\w+/\d+(?!\w)", "OUT", text)
    return re.sub(r"(?:[\w.~-]*/)+(?=[\w.~-])", "", text)


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, int | float) else None


def _flat(name: str, value: Any) -> Leaves:
    if isinstance(value, dict):
        return {
            key: leaf
            for part in value
            for key, leaf in _flat(f"{name} {_bare(part)}", value[part]).items()
        }
    return {name: _bare(json.dumps(value, default=str))}


def _maps(maps: Any, info: Any) -> Leaves:
    """What maps.json says, and of every map its norm and what it makes of a fixed
    vector.
    """
    leaves = {
        key: leaf for key, leaf in _flat("maps", {**info.fields(), "model": "", "jmat": ""}).items()
    }
    for name, linear in maps.items():
        W = np.asarray(linear.W, np.float64)
        sines = np.sin(np.arange(W.shape[0])) @ W @ np.cos(np.arange(W.shape[1])) / np.sqrt(W.size)
        bias = (
            []
            if linear.bias is None
            else [_short(float(np.linalg.norm(np.asarray(linear.bias, np.float64))))]
        )
        leaves[f"map {name}"] = [_short(float(np.linalg.norm(W))), _short(float(sines)), *bias]
    leaves["group map"] = str(len(maps))
    return leaves


def _line(name: str, line: str) -> Leaves:
    """The words of a line, and its numbers; whole ones are words."""
    numbers: list[str] = []

    def number(match: re.Match[str]) -> str:
        if "." not in match[0] and "e" not in match[0]:
            return match[0]
        numbers.append(match[0])
        return "#"

    line = re.sub("─+", "─", line)  # as long as the names in the table, which may be paths
    leaves: Leaves = {name: " ".join(_NUMBER.sub(number, _bare(line)).split())}
    return leaves | {f"{name} {k}": float(text) for k, text in enumerate(numbers)}


def _figure(name: str, figure: Any) -> Leaves:
    leaves: Leaves = {f"{name} title": _bare(figure.get_suptitle())}
    for legend in figure.legends:
        pairs = zip(legend.get_texts(), legend.legend_handles, strict=True)
        leaves[f"{name} legend"] = " ".join(
            f"{text.get_text()}={_look(handle)}" for text, handle in pairs
        )
    for k, panel in enumerate(figure.axes):
        about = (
            panel.get_title(),
            panel.get_xlabel(),
            panel.get_ylabel(),
            panel.get_xscale(),
            panel.get_yscale(),
        )
        here = f"{name} panel {k}"
        leaves[here] = _bare(" | ".join(about))
        for axis in (panel.xaxis, panel.yaxis):
            texts = [text.get_text() for text in axis.get_ticklabels()]
            leaves[f"{here} {axis.axis_name} ticks"] = _bare(" ".join(texts))
        for m, line in enumerate(panel.lines):
            leaves[f"{here} line {m}"] = _look(line)
            for axis, data in (("x", line.get_xdata()), ("y", line.get_ydata())):
                leaves |= _array(f"{here} line {m} {axis}", data)
        bands = [
            found
            for found in panel.collections
            if isinstance(found, PolyCollection) and found.get_paths()
        ]
        for m, found in enumerate(bands):
            leaves[f"{here} band {m}"] = to_hex(found.get_facecolor()[0][:3])
            leaves |= _array(f"{here} band {m}", found.get_paths()[0].vertices)
        for m, image in enumerate(panel.images):
            leaves |= _array(f"{here} image {m}", np.ma.filled(image.get_array(), np.nan))
        for m, text in enumerate(panel.texts):
            leaves |= _line(f"{here} text {m}", f"{text.get_text()} at")
            leaves[f"{here} text {m} at"] = " ".join(
                f"{place:.3g}" for place in text.get_position()
            )
    return leaves


def _look(line: Any) -> str:
    return f"{to_hex(line.get_color())},{line.get_marker()},{line.get_linestyle()}"


def _array(name: str, data: Any) -> Leaves:
    values = np.asarray(data, np.float64).reshape(-1)
    return {
        f"{name} {k}": float(f"{value:.4g}")
        for k, value in enumerate(values.tolist())
        if np.isfinite(value)
    }


# --- written down ---------------------------------------------------------------------------------


def name_of(script: str, words: tuple[str, ...]) -> str:
    """Returns the name of a run: the script and its flags, files without their folders."""
    return _bare(" ".join([script, *sorted(words)]))


@functools.cache
def _kept() -> dict[str, Leaves]:
    return json.loads(gzip.decompress(PATH.read_bytes()))


def _write(folder: pathlib.Path, name: str, leaves: Leaves) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "all.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({name: leaves}) + "\n")


def disturb() -> None:
    """For the second time: every weight is a little off, and the clock runs fast."""
    from jmat.checkpoint import model as checkpoint

    real_put, real_clock = checkpoint._put, time.perf_counter

    def put(part: np.ndarray, *given: Any) -> jax.Array:
        # the same whenever it is read
        random = np.random.default_rng(zlib.crc32(np.ascontiguousarray(part).tobytes()))
        noise = random.normal(1, 1e-5, part.shape).astype(np.float32)
        return real_put((np.asarray(part, np.float32) * noise).astype(part.dtype), *given)

    checkpoint._put = put
    time.perf_counter = lambda: 3 * real_clock()


def _read(folder: pathlib.Path) -> dict[str, list[Leaves]]:
    runs: dict[str, list[Leaves]] = {}
    for line in (folder / "all.jsonl").read_text("utf-8").splitlines():
        for name, leaves in json.loads(line).items():
            runs.setdefault(name, []).append(leaves)
    return runs


def combined(first: list[Leaves], second: list[Leaves]) -> Leaves | None:
    """Returns what a run leaves everywhere; None where tests make different runs of one
    name.
    """
    if any(differences(first[0], other) for other in first[1:]):
        return None
    leaves = dict(first[0])
    rounding = leaves["experiment"] == '"verify"' or leaves.get("config dtype") == '"bfloat16"'
    if rounding or not second:  # a pruned model, for one, is refused where its weights are off
        leaves = {
            name: value if isinstance(value, str) else _UNSTABLE for name, value in leaves.items()
        }
    for other in second:
        for name, value in first[0].items():
            if name.startswith(("model_hash", "maps model_hash")) or leaves[name] == _UNSTABLE:
                continue
            group = f"group {name.partition(' ')[0]}"
            if name not in other:
                leaves[name] = leaves[group] = _UNSTABLE
            elif (
                isinstance(value, list)
                and isinstance(other[name], list)
                and len(value) == len(other[name])
            ):
                pairs = zip(leaves[name], other[name], strict=True)
                third = _allowed(name, value) / 3
                leaves[name] = [
                    a if a == _UNSTABLE or _close(a, b, third) else _UNSTABLE for a, b in pairs
                ]
            elif isinstance(value, float) and isinstance(other[name], float):
                if abs(value - other[name]) > (0.01 if abs(value) < 2 else 0.007 * abs(value)):
                    leaves[name] = _UNSTABLE
            elif value != other[name]:
                leaves[name] = _UNSTABLE
    return leaves


def main() -> None:
    """Writes all down."""
    root = pathlib.Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as temporary:
        folders = [pathlib.Path(temporary) / part for part in ("first", _SECOND)]
        for folder in folders:
            files = [f"tests/test_{name}.py" for name in _TESTS]
            command = [sys.executable, "-m", "pytest", "-q", "-n0", "-m", "not lm_eval", *files]
            subprocess.run(
                command, cwd=root, env={**os.environ, "JMAT_TEST_KEEP": str(folder)}, check=False
            )
        first, second = map(_read, folders)
    write_combined(first, second)


def write_combined(first: dict[str, list[Leaves]], second: dict[str, list[Leaves]]) -> None:
    """Writes what both times have in common."""
    runs = {name: combined(first[name], second.get(name, [])) for name in sorted(first)}
    content = json.dumps(
        {name: leaves for name, leaves in runs.items() if leaves}, separators=(",", ":")
    )
    PATH.write_bytes(gzip.compress(content.encode(), mtime=0))


if _WRITE and _WRITE.endswith(_SECOND):
    disturb()
if __name__ == "__main__":
    main()
