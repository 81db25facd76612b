"""Streamed moments equal those of stored activations, whatever the packing, the
devices, and where the pass was cut.
"""

import dataclasses

import jax
import numpy as np
import pytest

import jmat
from jmat.capture import moments as module
from jmat.capture.activations import capture
from jmat.capture.moments import combine, merge
from jmat.capture.statistics import second_moments
from jmat.capture.stream import (
    all_positions,
    block_by_block,
    packed_batches,
    partial_moments,
    sampled_positions,
    stream_moments,
)
from jmat.capture.sweep import on_devices
from jmat.data.batches import Batch
from jmat.data.examples import Split, mask_positions
from jmat.maps.from_moments import fit
from jmat.maps.least_squares import lstsq
from tests.test_reference import REFERENCE

PAIRS = [
    ("embed", "block.0"),
    ("embed", "block.3"),
    ("block.2", "final_norm"),
    ("block.1", "block.1"),
    ("block.1.ln_2.in", "block.1.ln_2"),
    ("block.2.attn.in", "block.2.attn"),
    ("block.2.ffn.in", "block.3.ffn"),
]
SITES = list(dict.fromkeys(site for pair in PAIRS for site in pair))


def few(split, count):
    """The first sentences."""
    lengths = split.lengths[:count]
    return Split(
        tokens=split.tokens[: lengths.sum()], lengths=lengths, positions=split.positions[:count]
    )


def in_memory(model, split, read, sites):
    """Activations of the tokens that are read, in their order, from a plain forward
    pass over padded sentences.
    """
    real = np.arange(split.lengths.max()) < split.lengths[:, None]
    tokens = np.zeros(real.shape, np.int32)
    tokens[real] = split.tokens
    _, acts = jmat.run(model, tokens, keep=tuple(sites), mask=real)
    return {site: np.asarray(value)[real][read] for site, value in acts.items()}


def check(moments, acts, pairs, tolerance):
    wide = {site: values.astype(np.float64) for site, values in acts.items()}
    centred = {site: values - values.mean(0) for site, values in wide.items()}
    for data in (wide, centred):
        for x, y in pairs:
            got = np.asarray(second_moments(moments, x, y, centred=data is centred))
            scale = np.outer(np.linalg.norm(data[x], axis=0), np.linalg.norm(data[y], axis=0))
            np.testing.assert_allclose(
                got / scale, data[x].T @ data[y] / scale, atol=tolerance, err_msg=f"{x} → {y}"
            )


@pytest.fixture(scope="module")
def split(gpt2_examples):
    return few(gpt2_examples.eval, 60)


@pytest.fixture(scope="module")
def batches(split):
    return packed_batches(
        split, all_positions(split, skip_first=1), tokens_per_batch=512, row_multiple=4
    )


@pytest.fixture(scope="module")
def streamed(gpt2, batches):
    return stream_moments(gpt2, batches, PAIRS)


def test_streamed_is_in_memory(gpt2, split, streamed):
    acts = in_memory(gpt2, split, all_positions(split, skip_first=1), SITES)
    check(streamed, acts, PAIRS, 2e-6)
    assert (
        set(map(float, streamed.count.values()))
        == {len(acts["embed"])}
        == {int(split.lengths.sum()) - 60}
    )


def test_one_device_is_four(gpt2, split, streamed):
    read = all_positions(split, skip_first=1)
    alone = packed_batches(split, read, tokens_per_batch=1024)
    one = stream_moments(gpt2, alone, PAIRS, devices=jax.devices()[:1])
    maps = [fit(moments, "embed", ["block.0", "block.3"])[1].weights for moments in (one, streamed)]
    x = np.asarray(in_memory(gpt2, split, read, ["embed"])["embed"], np.float64)
    assert np.linalg.norm(x @ (maps[0] - maps[1])) < 1e-6 * np.linalg.norm(x @ maps[0])


def test_a_pass_can_be_cut_and_merged(gpt2, batches, streamed):
    assert len(batches) > 2
    first = partial_moments(gpt2, batches[:1], PAIRS)
    alone = jax.tree.map(lambda leaf: np.array(leaf), combine(first))
    resumed = combine(partial_moments(gpt2, batches[1:], PAIRS, moments=first))
    for got, want in zip(jax.tree.leaves(resumed), jax.tree.leaves(streamed), strict=True):
        np.testing.assert_array_equal(got, want)
    merged = merge(alone, stream_moments(gpt2, batches[1:], PAIRS))
    got, want = (
        fit(moments, "embed", ["block.3"], intercept=True)[1] for moments in (merged, streamed)
    )
    np.testing.assert_allclose(got.weights, want.weights, rtol=1e-6, atol=1e-8)
    with pytest.raises(ValueError, match="of other pairs"):
        partial_moments(gpt2, batches, PAIRS[:1], moments=resumed)


def test_sampled_positions_give_the_maps_of_stored_activations(
    gpt2, gpt2_examples, bert, bert_examples
):
    # A post-norm stream is all but dependent: the activations' own rounding shows in BERT's map.
    for model, examples, mask_token, tolerance in (
        (gpt2, gpt2_examples, None, 1e-4),
        (bert, bert_examples, 4, 1e-2),
    ):
        part = few(examples.fit, 120)
        seen = mask_positions(part, mask_token)
        acts = capture(model, seen, ("block.0", "block.1"), tokens_per_batch=20_000)
        packed = packed_batches(
            seen, sampled_positions(seen), tokens_per_batch=1024, row_multiple=4
        )
        moments = stream_moments(model, packed, [("block.0", "block.1")])
        check(moments, acts, [("block.0", "block.1")], 2e-6)
        _, solution = fit(moments, "block.0", ["block.1"])
        want = lstsq(acts["block.0"], acts["block.1"])
        x = acts["block.0"].astype(np.float64)
        assert solution.n == 120
        assert np.linalg.norm(x @ (solution.weights - want.weights)) < tolerance * np.linalg.norm(
            x @ want.weights
        )
        np.testing.assert_allclose(solution.residual, want.residual, rtol=tolerance)


def test_bfloat16_activations_are_summed_in_float64_as_they_are(split):
    model = jmat.load(REFERENCE / "gpt2", dtype="bfloat16")[0]
    pairs = [("embed", "block.0"), ("block.2.ffn.in", "block.2.ffn")]
    batches = packed_batches(split, all_positions(split), tokens_per_batch=512, row_multiple=4)
    acts = {site: [] for pair in pairs for site in pair}
    for batch, placed in on_devices(batches):
        for values in block_by_block(model, pairs)(*placed[:3]):
            for site, value in values.items():
                assert value.dtype == "bfloat16"
                acts[site].append(np.asarray(value.astype("float32"))[batch.examples >= 0])
    acts = {site: np.concatenate(values) for site, values in acts.items()}
    moments = stream_moments(model, batches, pairs)
    check(moments, acts, pairs, 1e-14)
    got, want = fit(moments, "embed", ["block.0"])[1], lstsq(acts["embed"], acts["block.0"])
    x = acts["embed"].astype(np.float64)
    assert np.linalg.norm(x @ (got.weights - want.weights)) < 1e-6 * np.linalg.norm(
        x @ want.weights
    )


def test_bert_all_positions(bert, bert_examples):
    part = few(bert_examples.eval, 30)
    read = all_positions(part, skip_tokens=[2, 3])
    pairs = [("embed", "block.0"), ("block.0.ffn.in", "block.0.ffn")]
    moments = stream_moments(
        bert, packed_batches(part, read, tokens_per_batch=512, row_multiple=4), pairs
    )
    check(moments, in_memory(bert, part, read, [s for pair in pairs for s in pair]), pairs, 2e-6)
    assert float(moments.count["embed"]) == (~np.isin(part.tokens, [2, 3])).sum() < len(part.tokens)


def test_memory_and_programs_do_not_grow_with_the_text(gpt2, batches, streamed):
    sizes = module._add_product._cache_size(), module._add_vectors._cache_size()
    short = stream_moments(gpt2, batches[:1], PAIRS)
    assert [leaf.shape for leaf in jax.tree.leaves(short)] == [
        leaf.shape for leaf in jax.tree.leaves(streamed)
    ]
    assert sizes == (module._add_product._cache_size(), module._add_vectors._cache_size())


def test_every_pair_comes_once_a_batch_and_blocks_come_apart(gpt2, batches):
    parts = [set(acts) for acts in block_by_block(gpt2, PAIRS)(*batches[0][:3])]
    assert parts == [
        {"block.1.ln_2.in", "block.1.ln_2"},
        set(SITES) - {"block.1.ln_2.in", "block.1.ln_2"},
    ]


def test_batches_hold_every_token_once_in_rows_of_one_shape(gpt2_examples):
    split = gpt2_examples.fit
    read = all_positions(split, skip_first=2)
    batches = packed_batches(split, read, tokens_per_batch=2000, row_multiple=4)
    assert len({batch.tokens.shape for batch in batches}) == 1
    assert len(batches[0].tokens) % 4 == 0
    for field in Batch._fields:
        assert all(getattr(batch, field).dtype == np.int32 for batch in batches)
    examples, tokens, positions = (
        np.concatenate([getattr(batch, field).ravel() for batch in batches])
        for field in ("examples", "tokens", "positions")
    )
    index = examples[examples >= 0]
    assert sorted(index) == np.flatnonzero(read).tolist()
    np.testing.assert_array_equal(split.tokens[index], tokens[examples >= 0])
    assert positions[examples >= 0].min() == 2
    full = np.concatenate([(batch.segments > 0).ravel() for batch in batches[:-1]])
    assert full.mean() > 0.97


def test_mistakes_are_named(gpt2, split, batches):
    with pytest.raises(ValueError, match=r"unknown site 'block\.9'"):
        stream_moments(gpt2, batches, [("embed", "block.9")])
    with pytest.raises(ValueError, match="is every sentence shorter"):
        packed_batches(split, all_positions(split, skip_first=1000))
    with pytest.raises(ValueError, match="give longer rows"):
        packed_batches(split, all_positions(split), row_length=4)
    wrong = dataclasses.replace(split, tokens=np.full_like(split.tokens, 768))
    foreign = packed_batches(wrong, all_positions(wrong), row_multiple=4)
    with pytest.raises(ValueError, match="token id 768"):
        stream_moments(gpt2, foreign, PAIRS)
    broken = jax.tree.map(lambda leaf: leaf, gpt2)
    broken.blocks[2] = jax.tree.map(lambda leaf: leaf * np.float32(np.nan), gpt2.blocks[2])
    with pytest.raises(ValueError, match=r"site 'block.3' is not finite"):
        stream_moments(broken, batches[:1], PAIRS)
