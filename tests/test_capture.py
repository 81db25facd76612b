"""Captured activations equal a plain forward pass, whatever the batching, devices and
padding.
"""

import jax
import numpy as np
import pytest

import jmat
from jmat.capture.activations import capture, check_examples
from jmat.data.examples import Examples, Split, mask_positions, target_tokens
from jmat.models.sites import stream_sites


def one_by_one(model, split, keep, mask_token=None):
    rows = {site: [] for site in keep}
    for row, position in zip(split.rows, split.positions, strict=True):
        start = split.starts[row]
        tokens = np.zeros((1, model.config.num_positions), np.int32)  # one length, so one program
        tokens[0, : split.lengths[row]] = split.tokens[start : start + split.lengths[row]]
        if mask_token is not None:
            tokens[0, position] = mask_token
        mask = np.arange(tokens.shape[1])[None] < split.lengths[row]
        _, acts = jmat.run(model, tokens, keep=keep, mask=mask)
        for site in keep:
            rows[site].append(np.asarray(acts[site])[0, position])
    return {site: np.stack(values) for site, values in rows.items()}


def few(split, count, positions=2):
    """The first sentences, each read at several positions."""
    lengths = split.lengths[:count]
    tokens = split.tokens[: lengths.sum()]
    rows = np.repeat(np.arange(count), positions).astype(np.int32)
    at = np.stack([np.linspace(0, n - 1, positions).astype(np.int32) for n in lengths]).ravel()
    return Split(tokens=tokens, lengths=lengths, positions=at, rows=rows)


@pytest.mark.parametrize("devices", [1, 4])
def test_gpt2(gpt2, gpt2_examples, devices):
    split, keep = (
        few(gpt2_examples.eval, 20),
        ("embed", "block.1.attn", "block.2.ffn.in", "block.3"),
    )
    got = capture(gpt2, split, keep, tokens_per_batch=256, devices=jax.devices()[:devices])
    want = one_by_one(gpt2, split, keep)
    for site in keep:
        np.testing.assert_allclose(got[site], want[site], atol=2e-5, err_msg=site)


def test_bert_masks_each_position_alone(bert, bert_examples):
    split, keep = few(bert_examples.eval, 12), ("block.0.ln_1", "block.2")
    got = capture(bert, mask_positions(split, 4), keep, tokens_per_batch=512)
    want = one_by_one(bert, split, keep, mask_token=4)
    for site in keep:
        np.testing.assert_allclose(got[site], want[site], atol=2e-5, err_msg=site)


def test_mask_positions_changes_only_the_position(bert_examples):
    split = few(bert_examples.eval, 5, positions=3)
    masked = mask_positions(split, 4)
    assert masked.num_sentences == masked.num_examples == 15
    for example in range(15):
        row = split.rows[example]
        before = split.tokens[split.starts[row] :][: split.lengths[row]].copy()
        before[split.positions[example]] = 4
        after = masked.tokens[masked.starts[example] :][: masked.lengths[example]]
        assert after.tolist() == before.tolist()


def test_target_tokens():
    split = Split(
        tokens=np.array([5, 6, 7, 8, 9], np.int32),
        lengths=np.array([3, 2], np.int32),
        positions=np.array([0, 2, 0, 1], np.int32),
        rows=np.array([0, 0, 1, 1], np.int32),
    )
    assert target_tokens(split, masked=False).tolist() == [6, -1, 9, -1]
    assert target_tokens(split, masked=True).tolist() == [5, 7, 8, 9]


def test_nan_is_named(gpt2, gpt2_examples):
    broken = jax.tree.map(lambda leaf: leaf, gpt2)
    broken.blocks[2] = jax.tree.map(lambda leaf: leaf * np.float32(np.nan), gpt2.blocks[2])
    with pytest.raises(ValueError, match=r"site 'block.2' is not finite"):
        capture(broken, few(gpt2_examples.eval, 3), stream_sites(4))


def test_tokens_and_lengths_are_checked(gpt2):
    def of(tokens):
        part = Split(
            tokens=tokens,
            lengths=np.array([len(tokens)], np.int32),
            positions=np.array([0], np.int32),
        )
        return Examples(fit=part, eval=part)

    check_examples(of(np.zeros(128, np.int32)), gpt2.config)
    with pytest.raises(ValueError, match="token id 768"):
        check_examples(of(np.array([0, 768], np.int32)), gpt2.config)
    with pytest.raises(ValueError, match="129 tokens; the model has positions for 128"):
        check_examples(of(np.zeros(129, np.int32)), gpt2.config)


def test_activations_are_a_pytree(gpt2, gpt2_examples):
    split = gpt2_examples.eval
    acts = capture(gpt2, split, ["block.1", "embed"])
    doubled = jax.tree.map(lambda values: 2 * values, acts)
    assert type(doubled) is type(acts)
    assert list(doubled) == ["block.1", "embed"]
    np.testing.assert_array_equal(doubled["embed"], 2 * acts["embed"])
    np.testing.assert_array_equal(doubled.sentence, split.rows)
    np.testing.assert_array_equal(doubled.position, split.positions)
    means = jax.jit(lambda acts: jax.tree.map(lambda values: values.mean(0), acts))(acts)
    np.testing.assert_allclose(means["block.1"], acts["block.1"].mean(0), atol=1e-5)
    assert [
        jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(acts)
    ] == [
        "['block.1']",
        "['embed']",
    ]
    elsewhere = Split(split.tokens, split.lengths, np.zeros_like(split.positions))
    with pytest.raises(ValueError, match="pytree"):
        jax.tree.map(np.subtract, acts, capture(gpt2, elsewhere, ["block.1", "embed"]))
