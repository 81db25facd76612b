"""Standard output that is closed, full or of few characters ends no run; children end
with their script.
"""

import os
import signal
import subprocess
import sys
import time

import pytest

from experiments import streams
from tests.scripts import ROOT

# A script without JAX's seconds.
_SCRIPT = """
import contextlib, os, sys
from experiments.streams import lasting_streams
with lasting_streams():
    print("wrote 9 maps ─ ·", "x" * 100000)
    print("· progress ─", file=sys.stderr, flush=True)
    print("more" * 50000, flush=True)
    sys.stdout.write("")
    sys.stderr.write("")
    with open(sys.argv[1], "w") as file, contextlib.suppress(OSError):
        file.write("all")
        file.flush()
        os.write(1, b"by a library")
        os.write(2, b"by another\\n")
    sys.exit(int(sys.argv[2]))
"""


def end(tmp_path, code=0, *, shell=None, **given):
    """Exit code of the script, and what it printed on both streams."""
    command = [sys.executable, "-c", _SCRIPT, str(tmp_path / "results"), str(code)]
    if shell is not None:
        command = ["bash", "-c", f'"$@" {shell}', "bash", *command]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, **given)
    assert (tmp_path / "results").read_text() == "all"
    return ran.returncode, ran.stdout, ran.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_characters_that_the_output_lacks_are_replaced(tmp_path, encoding):
    code, out, said = end(tmp_path, env={**os.environ, "PYTHONIOENCODING": encoding})
    assert code == 0
    assert out.startswith("wrote 9 maps ─ ·".encode(encoding, "replace"))
    assert said == "· progress ─\nby another\n".encode(encoding, "replace")


@pytest.mark.parametrize(("code", "expected"), [(0, streams.CLOSED), (1, 1)])
@pytest.mark.parametrize(
    "shell", ["| head -c 5; exit ${PIPESTATUS[0]}", "2>&1 | head -c 5; exit ${PIPESTATUS[0]}"]
)
def test_a_reader_that_leaves_ends_no_run(tmp_path, code, expected, shell):
    ended, out, said = end(tmp_path, code, shell=shell)
    assert ended == expected
    assert out == b"wrote"
    assert b"Traceback" not in said
    assert b"Exception" not in said


def test_a_full_disk_behind_the_output_is_told(tmp_path):
    ended, _, said = end(tmp_path, shell="> /dev/full")
    assert ended == 1
    assert (
        said.decode().splitlines()[-1]
        == "error: cannot print all: No space left on device; all files have been written."
    )


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_is_not_there_gets_no_files_number(tmp_path, closed):
    ended, out, said = end(tmp_path, shell=closed)
    assert ended == 0
    assert b"progress" not in out  # nor does what belongs on one stream come on the other
    assert b"wrote" not in said


_PARENT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # which is not there where tests run in the background
from experiments.children import run_child
from jmat.capture.snapshots import Terminated
child = '''
import pathlib, signal, sys, time
from experiments.children import end_with_parent
end_with_parent()
def save(*_):
    pathlib.Path(sys.argv[1], "saved").write_text("")
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
pathlib.Path(sys.argv[1], "began").write_text("")
time.sleep(300)
'''
try:
    print(run_child([sys.executable, "-c", child, sys.argv[1]]))
except (Terminated, KeyboardInterrupt) as stop:
    print(type(stop).__name__)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_child_saves_and_ends_with_its_parent(tmp_path, number):
    command = [sys.executable, "-c", _PARENT, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        while not (tmp_path / "began").exists() and parent.poll() is None:
            time.sleep(0.01)
        parent.send_signal(number)
        said = parent.stdout.read()  # ends when the child has ended, too, which has the same output
    assert (
        said
        == {
            signal.SIGTERM: "Terminated\n",
            signal.SIGINT: "KeyboardInterrupt\n",
            signal.SIGKILL: "",
        }[number]
    )
    assert (tmp_path / "saved").exists()
