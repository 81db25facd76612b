"""Scripts as users run them, each in a process of its own; what all of them import is
imported once.

A server, one for each process of the tests, imports it and forks for every run, before
JAX has started any thread.
"""

import atexit
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from tests.test_reference import REFERENCE

ROOT = pathlib.Path(__file__).parent.parent
_COUNT = itertools.count()

# Reads a line of JSON for each request, and answers with one number.
_SERVER = """
import gc, importlib, json, os, pkgutil, resource, runpy, signal, sys, traceback
import matplotlib.pyplot
from transformers import AutoTokenizer
import jmat, experiments.cli

for module in pkgutil.walk_packages(jmat.__path__, "jmat."):  # not scripts, whose flags clash
    importlib.import_module(module.name)
AutoTokenizer.from_pretrained(sys.argv[1])
gc.freeze()

def start(arguments, output, largest_file):
    child = os.fork()
    if child:
        return child
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in enumerate(output, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which is not there where the tests run in the background
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    sys.argv, code = arguments, 0
    try:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)  # the interpreter's own end takes seconds: it touches all that the fork shares

def poll(child):
    done = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return 0 if done is None else 1

def wait(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

for line in sys.stdin:
    do, *given = json.loads(line)
    print({"start": start, "poll": poll, "wait": wait}[do](*given), flush=True)
"""


@functools.cache
def _server():
    environment = {**os.environ, "XLA_FLAGS": os.environ["JMAT_TEST_XLA"], "MPLBACKEND": "agg"}
    command = [sys.executable, "-W", "ignore", "-c", _SERVER, str(REFERENCE / "gpt2")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)
    atexit.register(server.communicate)
    return server


@functools.cache
def _folder():
    """Where scripts' output goes."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return folder.name


def _ask(*request):
    server = _server()
    print(json.dumps(request), file=server.stdin, flush=True)
    return int(server.stdout.readline())


@dataclasses.dataclass(frozen=True)
class Run:
    """A script that has been started."""

    pid: int
    output: list[str]  # files

    def is_over(self):
        return bool(_ask("poll", self.pid))

    def kill(self, number):
        os.kill(self.pid, number)

    def finish(self):
        """Exit code (less than 0: killed by a signal), standard output and standard
        error.
        """
        code = _ask("wait", self.pid)
        return code, *(pathlib.Path(name).read_text("utf-8") for name in self.output)


def start(script, *flags, largest_file=-1):
    """Starts a script; it can write no files larger than `largest_file` bytes."""
    output = [os.path.join(_folder(), f"{next(_COUNT)}.{name}") for name in ("out", "err")]
    arguments = [f"experiments.{script}", *map(str, flags)]
    return Run(_ask("start", arguments, output, largest_file), output)


def run(script, *flags, code=0):
    """Runs a script to its end; returns what it printed on standard output and on
    standard error.
    """
    ended, stdout, stderr = start(script, *flags).finish()
    assert ended == code, stderr
    assert "Traceback" not in stderr, stderr
    for flag in map(str, flags):
        if (
            code == 0
            and flag.startswith("--out=")
            and (pathlib.Path(flag[6:]) / "run.json").exists()
        ):
            check_that_all_is_listed(pathlib.Path(flag[6:]))
    return stdout, stderr


def check_that_all_is_listed(out):
    """Holds the list of what a run wrote, in run.json, against what its output folder
    holds.
    """
    wrote = json.loads((out / "run.json").read_text("utf-8"))["wrote"]
    names = {path.name for path in out.iterdir()}
    assert set(wrote) <= names
    kinds = (".json", ".safetensors", ".png", ".html")
    assert {name for name in names if name.endswith(kinds)} <= {"run.json", "done.json", *wrote}
    assert names & {"model", "steps", "checkpoints"} <= set(wrote)
    assert ".jmat-lock" not in names


def kill_after(running, checkpoints, number, *, later_than=0, wait=0.0):
    """Sends a signal `wait` seconds after there is a checkpoint of a step beyond;
    returns what `Run.finish` does.
    """
    while not any(step > later_than for step in steps(checkpoints)) and not running.is_over():
        time.sleep(0.002)
    time.sleep(wait)
    if not running.is_over():
        running.kill(number)
    return running.finish()


def steps(checkpoints):
    """Those that a folder has checkpoints of, in order."""
    return sorted(
        int(path.name) for path in pathlib.Path(checkpoints).glob("*") if path.name.isdigit()
    )


def on(family, out, **flags):
    """Flags of a run on a reference model."""
    folder = REFERENCE / family
    given = {"model": folder, "examples": folder / "examples.npz", "out": out, **flags}
    return [f"--{name}={value}" for name, value in given.items()]


def rows_of(out):
    """The rows that a run has written."""
    return json.loads((out / "results.json").read_text("utf-8"))["rows"]
