"""A fingerprint sees every tensor, token, position and pair; what lacks a part of it is
not taken for the same.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmat.capture import stream as passes
from jmat.capture.snapshots import Snapshots, go_on, text_hash
from jmat.capture.stream import all_positions, packed_batches, partial_moments
from jmat.checkpoint import parameters
from jmat.data.batches import Batch
from jmat.data.examples import Examples, Split, fingerprint
from jmat.runtime.digests import model_hash


@pytest.mark.parametrize("place", ["first", "last"])
def test_every_tensor_changes_the_models_hash(gpt2, place):
    """One number of a tensor, in its last bit; each tensor in turn."""
    arrays = {path: np.asarray(value) for path, value in parameters(gpt2).items()}
    seen = {model_hash(arrays)}
    for path, value in arrays.items():
        changed = value.copy()
        flat = changed.reshape(-1)
        at = 0 if place == "first" else -1
        flat[at] = np.nextafter(flat[at], np.float32(9))
        seen.add(model_hash({**arrays, path: changed}))
    assert len(seen) == len(arrays) + 1


def test_leaving_a_tensor_out_changes_the_models_hash(gpt2):
    arrays = parameters(gpt2)
    hashes = {
        model_hash({path: value for path, value in arrays.items() if path != left})
        for left in arrays
    }
    assert len(hashes) == len(arrays)
    assert (
        model_hash({path: value.astype(jnp.bfloat16) for path, value in arrays.items()})
        not in hashes
    )


def changes_of(values):
    """The array with its first, a middle and its last number changed by one, each in
    turn.
    """
    for at in (0, values.size // 2, -1):
        changed = values.copy()
        changed.reshape(-1)[at] += 1
        yield changed


def test_every_token_and_every_token_that_is_read_changes_the_texts_hash():
    rng = np.random.default_rng(0)
    batches = [Batch(*rng.integers(5, size=(5, 3, 8)).astype(np.int32)) for _ in range(3)]
    seen = {text_hash(batches), text_hash(batches[::-1]), text_hash(batches[:2])}
    count = 3
    for k, batch in enumerate(batches):
        # in which it is read follows from the last
        for field in ("tokens", "segments", "positions", "examples"):
            for changed in changes_of(getattr(batch, field)):
                seen.add(
                    text_hash([*batches[:k], batch._replace(**{field: changed}), *batches[k + 1 :]])
                )
                count += 1
    assert len(seen) == count


def split_of(tokens=None, lengths=None, positions=None, rows=None):
    plain = {
        "tokens": np.arange(12, dtype=np.int32),
        "lengths": np.array([4, 5, 3], np.int32),
        "positions": np.array([1, 2, 0, 1], np.int32),
        "rows": np.array([0, 1, 1, 2], np.int32),
    }
    given = {"tokens": tokens, "lengths": lengths, "positions": positions, "rows": rows}
    return Split(**{name: plain[name] if value is None else value for name, value in given.items()})


def test_every_token_length_position_and_row_changes_the_examples_fingerprint():
    plain = split_of()
    others = [split_of(tokens=changed) for changed in changes_of(plain.tokens)]
    others += [split_of(positions=changed) for changed in changes_of(plain.positions)]
    others += [split_of(lengths=np.array(lengths, np.int32)) for lengths in ([5, 4, 3], [4, 4, 4])]
    others += [
        split_of(rows=np.array(rows, np.int32))
        for rows in ([0, 1, 0, 2], [1, 1, 1, 2], [0, 1, 1, 1])
    ]
    assert len({fingerprint(split) for split in (plain, *others)}) == 1 + len(others)
    pairs = {fingerprint(Examples(plain, other)) for other in (plain, *others)}
    pairs |= {fingerprint(Examples(other, plain)) for other in others}
    assert len(pairs) == 1 + 2 * len(others)


def nothing():
    with jax.enable_x64(True):
        return {"sum": jnp.zeros(3, jnp.float64)}


def one_step(done, state):
    with jax.enable_x64(True):
        for k in range(done + 1, 3):
            yield {"sum": state["sum"] + jnp.float64(k)}


@pytest.mark.parametrize("missing", ["model", "text"])
def test_a_snapshot_that_lacks_an_owner_field_is_not_taken(tmp_path, missing):
    owner = {"model": "a", "text": "b"}
    go_on(
        one_step,
        nothing(),
        2,
        Snapshots(tmp_path, 0, {name: owner[name] for name in owner if name != missing}),
    )
    with pytest.raises(ValueError, match=f"{missing} was None and is {owner[missing]}"):
        go_on(one_step, nothing(), 2, Snapshots(tmp_path, 0, owner))


def test_a_pass_tells_its_snapshots_all_that_decides_its_sums(
    gpt2, gpt2_examples, monkeypatch, tmp_path
):
    lengths = gpt2_examples.eval.lengths[:40]
    split = Split(
        gpt2_examples.eval.tokens[: lengths.sum()], lengths, gpt2_examples.eval.positions[:40]
    )
    told = []

    def go_on(states, start, total, snapshots):
        told.append(snapshots.owner)
        return start

    monkeypatch.setattr(passes, "go_on", go_on)

    def owner(
        skip_first=0,
        pairs=(("embed", "block.0"), ("embed", "block.1")),
        devices=None,
        name="a",
        last=0,
    ):
        read = all_positions(split, skip_first=skip_first)
        batches = packed_batches(split, read, tokens_per_batch=128, row_multiple=1)
        batches[-1].tokens[batches[-1].segments > 0] += last
        snapshots = Snapshots(tmp_path, 0, {"model": name})
        partial_moments(gpt2, batches, list(pairs), devices=devices, snapshots=snapshots)
        return told[-1]

    plain = owner()
    assert plain == owner()
    others = [
        owner(skip_first=1),
        owner(pairs=(("embed", "block.0"), ("embed", "block.2"))),
        owner(pairs=(("embed", "block.0"),)),
        owner(devices=jax.devices()[:1]),
        owner(name="b"),
        owner(last=1),  # other tokens in the last batch alone
    ]
    for other in others:
        assert plain.keys() == other.keys()
        assert sum(plain[name] != other[name] for name in plain) == 1
