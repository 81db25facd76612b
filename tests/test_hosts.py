"""Two processes with two devices each, joined by jax.distributed, find what one device
alone finds.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from absl.testing import flagsaver

from experiments import common
from jmat.capture.activations import capture
from jmat.data.examples import Examples, Split, load_examples, save_examples
from jmat.maps.files import read_maps
from jmat.models.sites import stream_sites
from jmat.runtime import hosts, joining
from jmat.runtime.stopping import EXIT_TERMINATED
from tests.scripts import ROOT, rows_of, steps
from tests.test_reference import REFERENCE

SCRIPTS = ("layer_jump", "linearity")  # of two_processes


def free_port():
    """A port of this machine that nobody listens at."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def start(folder, processes, devices, *, module=None, given=()):
    """Starts the processes, of a script or of tests.two_processes, with so many devices
    each; returns them.
    """
    xla = f"{os.environ['JMAT_TEST_XLA']} --xla_force_host_platform_device_count="
    each = devices if isinstance(devices, tuple) else (devices,) * processes
    port = free_port()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    commands = [
        ["tests.two_processes", str(port), str(processes), str(k), str(folder)]
        if module is None
        else [
            module,
            *given,
            f"--coordinator=localhost:{port}",
            f"--num_processes={processes}",
            f"--process_id={k}",
        ]
        for k in range(processes)
    ]
    return [
        subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env={**os.environ, "XLA_FLAGS": f"{xla}{count}"},
            **pipes,
        )
        for command, count in zip(commands, each, strict=True)
    ]


def of_one_shape(split, count):
    """Sentences that are read at positions 8 .. 15: batches of one shape, since
    compiling takes the time.
    """
    rows = np.flatnonzero((split.positions >= 8) & (split.positions < 16))[:count]
    assert len(rows) == count
    return Split(
        tokens=split.tokens[split.places(rows)],
        lengths=split.lengths[rows],
        positions=split.positions[rows],
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Where one process on one device, and two processes on two devices each, have
    written.
    """
    whole = load_examples(REFERENCE / "gpt2" / "examples.npz")
    examples = Examples(fit=of_one_shape(whole.fit, 200), eval=of_one_shape(whole.eval, 90))
    folders = {}
    for processes, devices in ((1, 1), (2, 2)):
        folder = folders[processes] = tmp_path_factory.mktemp(f"by{processes}")
        save_examples(folder / "examples.npz", examples)
        # no tokenizer: importing transformers takes long
        for file in ("config.json", "model.safetensors"):
            (folder / file).write_bytes((REFERENCE / "gpt2" / file).read_bytes())
        started = start(folder, processes, devices)
        try:
            said = [process.communicate(timeout=900)[0] for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
        assert [process.returncode for process in started] == [0] * processes, "\n".join(said)
    return folders


@pytest.fixture(scope="module")
def arrays(folders):
    """What the lone process found, and each of the two."""
    return [
        dict(np.load(folders[processes] / f"{k}.npz")) for processes, k in ((1, 0), (2, 0), (2, 1))
    ]


@pytest.fixture(scope="module")
def reports(folders):
    return [json.loads((folders[2] / f"{k}.json").read_text()) for k in range(2)]


@pytest.mark.slow
def test_a_process_without_a_batch_has_everything_too(arrays):
    alone, *both = arrays
    for name, want in alone.items():
        np.testing.assert_array_equal(both[0][name], both[1][name], err_msg=name)
        assert both[0][name].dtype == want.dtype
        np.testing.assert_allclose(
            both[0][name], want, atol=1e-6 * np.abs(want).max(), err_msg=name
        )


@pytest.mark.slow
def test_maps_equal_those_of_one_device(folders, gpt2):
    split = load_examples(folders[2] / "examples.npz").eval
    one, two = (read_maps(folders[processes] / "layer_jump")[0] for processes in (1, 2))
    streams = list(capture(gpt2, split, stream_sites(4)).values())
    for name, linear in one.items():
        x = streams[int(name.split(".")[1])]
        assert np.linalg.norm(linear.W - two[name].W) < 1e-5 * np.linalg.norm(linear.W), name
        assert np.linalg.norm(x @ linear.W - x @ two[name].W) < 1e-6 * np.linalg.norm(
            x @ linear.W
        ), name


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_rows_equal_those_of_one_device(folders, script):
    one, two = (rows_of(folders[processes] / script) for processes in (1, 2))
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        assert {k: v for k, v in a.items() if not isinstance(v, float)} == {
            k: v for k, v in b.items() if not isinstance(v, float)
        }
        for key in ("value", "low", "high"):
            if isinstance(a.get(key), float):
                assert a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-5), a


@pytest.mark.slow
def test_killed_processes_go_on_each_from_its_own_snapshot(folders, tmp_path):
    """SIGKILL ends one, SIGTERM the other; the run that is started again ends with the
    maps of one left alone.
    """
    flags = [
        f"--model={folders[2]}",
        f"--examples={REFERENCE / 'gpt2' / 'examples.npz'}",
        "--num_fit=1500",
    ]
    flags += [
        "--route=streaming",
        "--fit_tokens=all",
        "--targets=final",
        "--tokens_per_batch=512",
        "--protocol=jmat",
    ]

    def begin(out, every):
        given = [*flags, f"--out={out}", f"--snapshot_every={every}"]
        return start(tmp_path, 2, 1, module="experiments.layer_jump", given=given)

    ends = [process.communicate(timeout=900)[0] for process in begin(tmp_path / "whole", 0)]
    broken = begin(tmp_path / "broken", 0.1)
    folders_of = [tmp_path / "broken" / "checkpoints" / f"fit-{k}" for k in range(2)]
    while not all(map(steps, folders_of)) and all(process.poll() is None for process in broken):
        time.sleep(0.005)
    broken[1].terminate()
    said = broken[1].communicate(timeout=60)[0]
    assert broken[1].returncode == EXIT_TERMINATED, said
    broken[0].kill()
    broken[0].communicate()
    assert all(map(steps, folders_of))
    again = begin(tmp_path / "broken", 0.1)
    ends += [process.communicate(timeout=900)[0] for process in again]
    assert "going on after batch" in ends[2], ends
    whole, resumed = (
        (tmp_path / out / "maps.safetensors").read_bytes() for out in ("whole", "broken")
    )
    assert whole == resumed
    assert not (tmp_path / "broken" / "checkpoints").exists()


@pytest.mark.slow
def test_only_the_first_process_speaks_and_writes(reports):
    for name in SCRIPTS:
        (code, out, _), other = (report["ends"][name] for report in reports)
        assert code in (None, 0)
        assert "wrote" in out
        assert other[:2] == [code, ""]
        assert not re.sub(r"· joining the other processes at .*\n", "", other[2])


@pytest.mark.slow
def test_a_failure_in_one_process_is_told_in_all(reports):
    (code, _, first), (other_code, _, second) = (report["ends"]["claimed"] for report in reports)
    assert code == other_code == 1
    assert "belongs to experiment layer_jump" in first
    assert re.search("process 0 failed: .* belongs to experiment layer_jump", second)
    told, mine = "process {} failed: the disk is full", "the disk is full"
    differ = "--num_fit is 20 in process 0 and 21 in process 1; all must work on the same."
    assert reports[0]["said"][:3] == [mine, told.format(1), differ]
    assert reports[1]["said"][:3] == [told.format(0), mine, differ]
    for report in reports:
        assert re.fullmatch(
            "the hash of the weights of the model is '.*' in process 0 and '.*' in process 1; .*",
            report["said"][3],
        )


@pytest.mark.slow
def test_gathered_values_keep_every_bit(arrays):
    for found in arrays[1:]:
        assert found["gathered 0"].size == 0
        np.testing.assert_array_equal(
            found["gathered 1"], np.random.default_rng(1).standard_normal(3)
        )
        np.testing.assert_array_equal(
            found["in rounds"], np.r_[np.arange(100.0), 1000 + np.arange(100.0)]
        )


_MEETING = """
import sys, time
import numpy as np
from experiments import cli
from jmat.runtime import hosts, joining

port, me, alone, sys.argv[1:] = *sys.argv[1:4], []

def main(argv):
    joining.initialize(f"localhost:{port}", 2, int(me))
    hosts.gather(np.ones(3))
    print("met", flush=True)
    while True:
        time.sleep(float(alone))
        hosts.gather(np.ones(3))

cli.run(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "alone"), [(0, 0.05), (1, 0.05), (0, 600)])
def test_where_a_process_dies_the_other_ends_with_a_sentence(victim, alone):
    """At a meeting, and while it works alone."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    port = free_port()
    both = [
        subprocess.Popen(
            [sys.executable, "-c", _MEETING, str(port), str(me), str(alone)], cwd=ROOT, **pipes
        )
        for me in range(2)
    ]
    try:
        for process in both:
            assert "met\n" in iter(process.stdout.readline, "")
        both[victim].kill()
        said = both[1 - victim].communicate(timeout=60)[0]
    finally:
        for process in both:
            process.kill()
            process.communicate()
    assert both[1 - victim].returncode == 1, said
    assert said.count("error: ") == 1
    last = said.splitlines()[-1]
    assert last.startswith("error: ")
    assert "another process has died or cannot be reached" in last
    assert last.endswith(
        "start all of them again with the same flags; a pass over the text then goes on from its "
        "last snapshots."
    )
    assert "Traceback" not in said
    assert len(said.splitlines()) < 12, said


@pytest.mark.slow
def test_unequal_numbers_of_devices_are_told_in_all(tmp_path):
    given = [f"--model={REFERENCE / 'gpt2'}", f"--out={tmp_path / 'out'}"]
    for process in start(tmp_path, 2, (2, 1), module="experiments.r2", given=given):
        said = process.communicate(timeout=300)[0]
        assert process.returncode == 1
        assert (
            "different numbers of devices (process 0 has 2, process 1 has 1); expected equally "
            "many." in said
        )


@pytest.mark.parametrize(("listens", "at"), [(True, "localhost:{}"), (False, "a..b:{}")])
def test_an_address_that_cannot_serve(listens, at):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        says = f"port {port} of this host cannot be used" if listens else "no such host or port"
        with pytest.raises(ValueError, match=says):
            joining.initialize(at.format(port), 2, 0)


def test_processes_that_do_not_come_are_not_waited_for_for_ever(monkeypatch, capsys):
    codes = []
    monkeypatch.setattr(hosts.os, "_exit", codes.append)
    with joining._no_longer_than(0.01, "host:1234", 2):
        time.sleep(0.5)
    assert codes == [1]
    assert (
        "the 2 processes have not come together in 0 seconds; was each started"
        in capsys.readouterr().err
    )
    with joining._no_longer_than(0.2, "host:1234", 2):
        pass
    time.sleep(0.4)
    assert codes == [1]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((None, 2, None), "--num_processes without --coordinator"),
        ((None, None, 0), "--process_id without --coordinator"),
        (("auto", None, 1), "leave it out"),
        (("somewhere", 2, 0), "expected HOST:PORT"),
        (("host:port", 2, 0), "expected HOST:PORT"),
        (("host:65536", 2, 0), "expected HOST:PORT"),
        (("host:1234", 2, None), "needs --num_processes and --process_id"),
        (("host:1234", 0, 0), "--num_processes=0: expected at least 1"),
        (("host:1234", 2, 2), r"--process_id=2: expected 0 .. 1"),
        (("host:1234", 2, -1), r"--process_id=-1: expected 0 .. 1"),
    ],
)
def test_flags_that_do_not_go_together(given, says):
    with pytest.raises(ValueError, match=says):
        joining.initialize(*given)


def test_an_experiment_of_one_host_refuses_to_be_one_of_many():
    common.FLAGS.mark_as_parsed()
    joined = flagsaver.flagsaver(coordinator="host:1234", num_processes=2, process_id=0)
    with joined, pytest.raises(ValueError, match="prune runs on one host: leave out --coordinator"):
        common.claim("prune")


def test_a_lone_process_has_everything_to_itself():
    joining.initialize(None)
    joining.initialize("host:1234", 1, 0)
    assert hosts.count() == 1
    assert hosts.is_first()
    assert hosts.share([1, 2, 3]) == [1, 2, 3]
    hosts.check_same({"--seed": 0})
    with pytest.raises(ValueError, match="as it was"), hosts.together():
        raise ValueError("as it was")


@pytest.mark.parametrize("processes", [1, 2, 3, 5])
def test_processes_share_the_work_and_leave_nothing_out(monkeypatch, processes):
    """Batches come sorted by size: neighbours go to different processes."""
    monkeypatch.setattr(hosts, "count", lambda: processes)
    shares = []
    for index in range(processes):
        monkeypatch.setattr(hosts.jax, "process_index", lambda index=index: index)
        shares.append(hosts.share(list(range(11))))
    assert sorted(item for share in shares for item in share) == list(range(11))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert all(np.diff(share).min() >= processes for share in shares if len(share) > 1)
