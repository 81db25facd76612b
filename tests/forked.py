"""Runs of scripts, one after another, each in a process of its own that can be killed; what they import is shared."""

import json
import os
import subprocess
import sys

from tests.test_experiments import ROOT, on
from tests.test_reference import REFERENCE

# Imports once, then forks a process for every run, before JAX has started any thread. Reads a list of
# [script, flags, signal, seconds, largest file]: when a new snapshot is there, and so many seconds later, the run gets
# the signal, if it is not 0.
_FORK = """
import importlib, json, os, pathlib, resource, sys, time
from transformers import AutoTokenizer
from experiments import cli, fitting

AutoTokenizer.from_pretrained(sys.argv[1])

def steps(out):
    return [int(p.name) for p in pathlib.Path(out, "checkpoints", "fit").glob("*") if p.name.isdigit()]

ends = []
for script, given, number, wait, limit in json.load(sys.stdin):
    out = given[-1].removeprefix("--out=")
    before = max(steps(out), default=0)
    child = os.fork()
    if child == 0:
        sys.argv = [script, *given]
        os.dup2(2, 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        cli.run(importlib.import_module(script).main)
        os._exit(0)
    if number:
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while max(steps(out), default=0) <= before and not os.waitid(os.P_PID, child, look):
            time.sleep(0.002)
        time.sleep(wait)
        os.kill(child, number)
    ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(ends, max(steps(out), default=0), file=sys.stderr, flush=True)
json.dump(ends, sys.stdout)
"""


def run_of(script, family, out, *, kill=0, after=0.0, largest_file=-1, **flags):
    """One run of a script on a reference model; `kill` is sent some seconds `after` its first new snapshot."""
    given = [*on(family, "", **flags), f"--out={out}"]
    return [f"experiments.{script}", given, int(kill), after, largest_file]


def forked(*runs):
    """Exit codes of the runs (less than 0: killed by a signal), and what they said."""
    environment = {**os.environ, "XLA_FLAGS": os.environ["JMAT_TEST_XLA"]}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FORK, str(REFERENCE / "gpt2")],
        input=json.dumps(runs), cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr
