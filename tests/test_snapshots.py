"""A killed pass goes on and ends with the same bits; snapshots that are foreign or
cannot be written are named.
"""

import os
import shutil
import signal
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmat.capture import stream as passes
from jmat.capture.snapshots import Snapshots, discard, go_on
from jmat.capture.stream import all_positions, packed_batches, partial_moments
from jmat.data.examples import Split
from jmat.runtime.stopping import Terminated
from tests.scripts import kill_after, on, rows_of, start, steps
from tests.test_linearity import cut_examples

PAIRS = [("embed", "block.3"), ("block.1.attn.in", "block.1.attn"), ("block.2", "block.2")]
TOTAL = 6


def sums(done, state, stop_at=None):
    """Adds up 1/1, 1/2, .. 1/TOTAL, in float64; the process is told to stop while it is
    at batch `stop_at`.
    """
    add = jax.jit(lambda total, x: total + 1 / x, donate_argnums=0)
    for k in range(done + 1, TOTAL + 1):
        if k == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        with jax.enable_x64(True):
            state = {"sum": add(state["sum"], jnp.float64(k))}
        yield state


def nothing():
    with jax.enable_x64(True):
        return {"sum": jnp.zeros((300, 2), jnp.float64)}


def test_a_pass_goes_on_after_sigterm_with_the_same_bits(tmp_path):
    want = go_on(sums, nothing(), TOTAL, Snapshots(tmp_path / "whole", 1e9, {}))
    assert steps(tmp_path / "whole") == []  # it took less than the interval
    said = []
    kept = Snapshots(tmp_path / "cut", 1e9, {"model": "a"}, said.append)
    with pytest.raises(Terminated, match="after batch 3 of 6; start again with the same flags"):
        go_on(lambda done, state: sums(done, state, stop_at=3), nothing(), TOTAL, kept)
    assert steps(kept.folder) == [3]
    got = go_on(sums, nothing(), TOTAL, kept)
    assert got["sum"].dtype == jnp.float64
    np.testing.assert_array_equal(got["sum"], want["sum"])
    np.testing.assert_allclose(got["sum"][7], sum(1 / k for k in range(1, 7)), rtol=1e-15)
    # there was one before, so the last state is kept for what comes next
    assert steps(kept.folder) == [3, 6]
    again = go_on(sums, nothing(), TOTAL, kept)
    np.testing.assert_array_equal(again["sum"], want["sum"])
    assert [message.split(",")[0] for message in said] == [
        f"going on after batch {k} of 6" for k in (3, 6)
    ]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_sigterm_after_the_last_batch_ends_the_process_as_ever(tmp_path):
    ends = []
    before = signal.signal(signal.SIGTERM, lambda number, _: ends.append(number))

    def late(done, state):
        yield from sums(done, state)
        os.kill(os.getpid(), signal.SIGTERM)

    try:
        go_on(late, nothing(), TOTAL, Snapshots(tmp_path, 1e9, {}))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ends == [signal.SIGTERM]


def test_a_snapshot_holds_the_state_of_its_batch_though_that_is_used_up(tmp_path):
    go_on(sums, nothing(), TOTAL, Snapshots(tmp_path, 0, {}))
    assert steps(tmp_path) == [5, 6]
    for step in steps(tmp_path):
        there = np.frombuffer((tmp_path / str(step) / "default" / "sums").read_bytes()[:-12])
        np.testing.assert_allclose(
            there, np.full(600, sum(1 / k for k in range(1, step + 1))), rtol=1e-15
        )


def test_snapshots_of_something_else_are_refused(tmp_path):
    go_on(sums, nothing(), TOTAL, Snapshots(tmp_path, 0, {"model": "a", "devices": 4}))
    with pytest.raises(
        ValueError,
        match=r"of another run \(model was a and is b; devices was 4 and is 1\): make that as it was",
    ):
        go_on(sums, nothing(), TOTAL, Snapshots(tmp_path, 0, {"model": "b", "devices": 1}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: content[:-20], "expected 4812 bytes, got 4792"),
        (lambda content: content + b"more", "expected 4812 bytes, got 4816"),
        (
            lambda content: content[:77] + bytes([content[77] ^ 1]) + content[78:],
            "its checksum is another one",
        ),
    ],
    ids=["cut", "longer", "one bit"],
)
def test_a_damaged_snapshot_is_left_out(tmp_path, damage, reason):
    want, said = go_on(sums, nothing(), TOTAL, Snapshots(tmp_path, 0, {})), []
    for damaged, then in (([6], "going on after batch 5 of 6"), ([5, 6], None)):
        for step in damaged:
            file = tmp_path / str(step) / "default" / "sums"
            file.write_bytes(damage(file.read_bytes()))
        got = go_on(sums, nothing(), TOTAL, Snapshots(tmp_path, 0, {}, said.append))
        np.testing.assert_array_equal(got["sum"], want["sum"])
        assert steps(tmp_path) == [5, 6]
        assert [
            f"snapshot {step} in {tmp_path} is damaged ({reason}): it is left out"
            for step in damaged[::-1]
        ] == (said if then is None else said[:-1])
        assert then is None or said[-1].startswith(then)
        said.clear()


@pytest.mark.parametrize(("of", "under"), [(5, 6), (5, 4), (6, 5), (6, 7), (6, 999999)])
@pytest.mark.parametrize("whole", [True, False], ids=["the folder", "the sums alone"])
def test_a_snapshot_under_another_number_is_left_out(tmp_path, of, under, whole):
    want, said, part = (
        go_on(sums, nothing(), TOTAL, Snapshots(tmp_path, 0, {"model": "a"})),
        [],
        "default/sums",
    )
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / f"{of}", copy)
    if not whole and under <= TOTAL:
        if (tmp_path / f"{under}").exists():
            (tmp_path / f"{under}" / part).write_bytes((copy / part).read_bytes())
        shutil.rmtree(copy)
    else:
        shutil.rmtree(tmp_path / f"{under}", ignore_errors=True)
        copy.rename(tmp_path / f"{under}")
    for step in steps(tmp_path):  # only what lies under the wrong number, and older ones
        if step > under:
            shutil.rmtree(tmp_path / f"{step}")
    got = go_on(sums, nothing(), TOTAL, Snapshots(tmp_path, 0, {"model": "a"}, said.append))
    np.testing.assert_array_equal(got["sum"], want["sum"])
    assert steps(tmp_path) == [5, 6]
    if whole or under in (5, 6):
        reason = (
            f"it is that after batch {of} under another number"
            if under <= TOTAL
            else "there are only 6 batches"
        )
        assert said[0] == f"snapshot {under} in {tmp_path} is damaged ({reason}): it is left out"


def test_snapshots_of_version_0_1_go_on(tmp_path):
    want, said = go_on(sums, nothing(), TOTAL, Snapshots(tmp_path, 0, {})), []
    for step in steps(tmp_path):
        file = tmp_path / f"{step}" / "default" / "sums"
        arrays = file.read_bytes()[:-12]
        file.write_bytes(arrays + zlib.crc32(arrays).to_bytes(4))
    got = go_on(sums, nothing(), TOTAL, Snapshots(tmp_path, 0, {}, said.append))
    np.testing.assert_array_equal(got["sum"], want["sum"])
    assert said == [f"going on after batch 6 of 6, from {tmp_path}"]


@pytest.mark.parametrize("damage", ["cut", "removed", "all removed"])
def test_a_snapshot_that_does_not_say_whose_it_is_is_left_out(tmp_path, damage):
    owner, said = {"model": "a"}, []
    want = go_on(sums, nothing(), TOTAL, Snapshots(tmp_path, 0, owner))
    about = tmp_path / "6" / "_CHECKPOINT_METADATA"
    if damage == "cut":
        about.write_bytes(about.read_bytes()[:10])
    elif damage == "removed":
        about.unlink()
    else:
        shutil.rmtree(about.parent)
        about.parent.mkdir()
    got = go_on(sums, nothing(), TOTAL, Snapshots(tmp_path, 0, owner, said.append))
    np.testing.assert_array_equal(got["sum"], want["sum"])
    assert "snapshot 6" in said[0]
    assert said[0].endswith("it is left out")
    assert said[1].startswith("going on after batch 5 of 6")


def test_discarded_snapshots_are_gone(tmp_path):
    go_on(sums, nothing(), TOTAL, Snapshots(tmp_path / "checkpoints" / "fit", 0, {}))
    discard(tmp_path / "checkpoints")
    assert list(tmp_path.iterdir()) == []
    discard(tmp_path / "checkpoints")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(
        OSError, match=r"^cannot write a snapshot in .*/checkpoints/fit: Not a directory; those"
    ):
        go_on(sums, nothing(), TOTAL, Snapshots(tmp_path / "checkpoints" / "fit", 0, {}))


def test_moments_go_on_with_the_same_bits_on_four_devices(
    gpt2, gpt2_examples, tmp_path, monkeypatch
):
    lengths = gpt2_examples.eval.lengths[:60]
    split = Split(
        gpt2_examples.eval.tokens[: lengths.sum()], lengths, gpt2_examples.eval.positions[:60]
    )
    batches = packed_batches(split, all_positions(split), tokens_per_batch=512, row_multiple=4)
    want = partial_moments(gpt2, batches, PAIRS)
    kept, update, calls = Snapshots(tmp_path, 1e9, {"model": "a"}), passes.update, []

    def interrupted(*given):
        calls.append(0)
        if len(calls) == 3:  # the first of two parts of the second batch
            os.kill(os.getpid(), signal.SIGTERM)
        return update(*given)

    monkeypatch.setattr(passes, "update", interrupted)
    with pytest.raises(Terminated, match=f"after batch 2 of {len(batches)}"):
        partial_moments(gpt2, batches, PAIRS, snapshots=kept)
    got = partial_moments(gpt2, batches, PAIRS, snapshots=kept)
    assert len(calls) == 2 * len(batches) > 4
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert jax.tree.leaves(got)[0].sharding == jax.tree.leaves(want)[0].sharding
    with pytest.raises(ValueError, match="number of devices was 4 and is 2"):
        partial_moments(gpt2, batches, PAIRS, snapshots=kept, devices=jax.devices()[:2])
    with pytest.raises(ValueError, match=r"text was .* and is"):
        partial_moments(gpt2, batches[1:], PAIRS, snapshots=kept)
    with pytest.raises(ValueError, match=r"pairs was .* and is"):
        partial_moments(gpt2, batches, PAIRS[::-1], snapshots=kept)


@pytest.mark.slow
def test_killed_runs_end_with_the_same_maps_bit_for_bit(tmp_path):
    """The disk is full in the last but one: files can have 30 kB, enough for run.json,
    too little for a snapshot.
    """
    random = np.random.default_rng()
    cut_examples(tmp_path / "few.npz", "gpt2", (1500, 40))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    flags = {
        "examples": tmp_path / "few.npz",
        "route": "streaming",
        "fit_tokens": "all",
        "tokens_per_batch": 256,
    }
    checkpoints, ends = broken / "checkpoints" / "fit", []

    def go(out, every=0.2, **limits):
        return start("layer_jump", *on("gpt2", out, snapshot_every=every, **flags), **limits)

    ends.append(go(whole, every=0).finish())
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        last = max(steps(checkpoints), default=0)
        ends.append(
            kill_after(
                go(broken), checkpoints, number, later_than=last, wait=random.uniform(0, 0.2)
            )
        )
    ends += [go(broken, largest_file=30_000).finish(), go(broken).finish()]
    said = "".join(end[2] for end in ends)
    assert [end[0] for end in ends] == [0, -9, 143, -9, 1, 0], said
    assert said.count("stopped by SIGTERM after batch") == 1
    assert said.count("going on after batch") == 4
    assert said.count("error: ") == said.count(f"cannot write a snapshot in {broken}") == 1
    assert "Traceback" not in said
    for name in ("maps.safetensors", "maps.json"):
        assert (whole / name).read_bytes() == (broken / name).read_bytes()
    assert rows_of(whole) == rows_of(broken)
    assert not (broken / "checkpoints").exists()
