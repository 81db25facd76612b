"""A model whose parameters are split over four devices computes what a replicated one
does.
"""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jmat
from jmat import forward
from jmat.capture.activations import capture
from jmat.capture.stream import stream_moments
from jmat.forward import logits
from jmat.maps.types import Identity
from jmat.models import stack
from jmat.runtime.mesh import (
    data_mesh,
    gathered,
    parameter_sharding,
    place,
    replicate,
    shard_parameters,
)
from jmat.studies.evaluation import evaluate
from tests import hf
from tests.families import BY_NAME
from tests.test_every_family import sentences
from tests.test_reference import REFERENCE
from tests.test_streaming import all_positions, packed_batches

CASES = [case for case in hf.CASES if case.name == "gpt2-plain"] + [BY_NAME["llama-plain"]]


def device_bytes(model):
    """Bytes of parameters on each device."""
    held = dict.fromkeys(jax.devices(), 0)
    for leaf in jax.tree.leaves(model):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return list(held.values())


def close(got, want):
    np.testing.assert_allclose(
        np.asarray(got), np.asarray(want), atol=1e-6 * float(np.abs(want).max())
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sharded_is_replicated(case):
    model, mesh = hf.ours(case), data_mesh()
    sharded = shard_parameters(mesh, model)
    copies, shares = device_bytes(replicate(mesh, model)), device_bytes(sharded)
    assert len(set(shares)) == 1
    assert 0.25 <= shares[0] / copies[0] < 0.3
    split, last = sentences(20, 0), f"block.{model.config.layers - 1}"
    keep = ("embed", "block.0.attn", "block.1.ffn.in", last, "final_norm", "logits")
    got, want = (capture(each, split, keep, tokens_per_batch=64) for each in (sharded, model))
    for site in keep:
        close(got[site], want[site])
    close(logits(sharded, want[last]), want["logits"])
    shortcuts = {("id", 1): (Identity(), want["block.1.ffn.in"])}
    got, want = (evaluate(each, want[last], shortcuts)["id", 1] for each in (sharded, model))
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-5, err_msg=name)
    batches = packed_batches(split, all_positions(split), tokens_per_batch=512, row_multiple=4)
    got, want = (stream_moments(each, batches, [("embed", last)]) for each in (sharded, model))
    close(got.own["embed"], want.own["embed"])
    close(got.cross["embed"][last], want.cross["embed"][last])


def test_blocks_gather_their_parameters_inside_the_program(gpt2):
    sharded = shard_parameters(data_mesh(), gpt2)
    block, x = sharded.blocks[0], np.zeros((4, 8, 64), np.float32)
    context = forward.enter(gpt2, np.zeros((4, 8), np.int32))[1]
    lowered = stack._block.lower(block, x, context, {}, None, keep=(), whole=stack._whole(sharded))
    assert "all-gather" in lowered.compile().as_text()
    jmat.run(sharded, np.zeros((4, 8), np.int32))
    assert gathered(jax.tree.leaves(block)[0]) is not None  # the model itself stays split


def test_gathering_programs_have_ended_when_the_next_one_starts(gpt2):
    # Otherwise CPU devices wait for one another for ever, now and then: see
    # `jmat.runtime.mesh.settled`.
    sharded, tokens = shard_parameters(data_mesh(), gpt2), np.zeros((64, 100), np.int32)
    for _ in range(3):
        x, context = forward.enter(sharded, tokens)
        assert x.is_ready()
        x, kept = jmat.run(sharded, tokens, keep=("block.1.ffn", "logits"))
        assert all(array.is_ready() for array in (x, *kept.values(), logits(sharded, x)))
        assert forward.advance(sharded, x, context, 1, 3).is_ready()


def test_each_parameter_is_split_along_its_largest_axis_that_can_be():
    mesh = data_mesh()
    for shape, spec in {
        (8, 12): (None, "data"),
        (12, 8): ("data",),
        (8, 8): ("data",),
        (8, 13): ("data",),
        (3, 13): (),
        (): (),
        (2, 4, 16): (None, None, "data"),
    }.items():
        assert parameter_sharding(mesh, shape).spec == PartitionSpec(*spec), shape


def test_a_model_is_loaded_split_and_stays_where_it_is(gpt2):
    model = jmat.load(REFERENCE / "gpt2", shard_parameters=True)[0]
    for got, want in zip(jax.tree.leaves(model), jax.tree.leaves(gpt2), strict=True):
        np.testing.assert_array_equal(got, want)
        assert got.sharding == parameter_sharding(data_mesh(), want.shape)
    assert place(model) is model
    for copied in (place(gpt2), place(model, data_mesh(jax.devices()[:2]))):
        assert not any(map(gathered, jax.tree.leaves(copied)))
    narrow = jmat.load(REFERENCE / "gpt2", shard_parameters=True, dtype="bfloat16")[0]
    plain = jmat.load(REFERENCE / "gpt2", dtype="bfloat16")[0]
    for got, want in zip(jax.tree.leaves(narrow), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
