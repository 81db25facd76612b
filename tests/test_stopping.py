"""The pass that truly stops says what the curves say."""

import jax.numpy as jnp
import numpy as np
import pytest

import jmat
from jmat.capture.activations import capture
from jmat.forward import logits
from jmat.maps.jumps import fit_jumps
from jmat.maps.types import Identity
from jmat.metrics.predictions import confidences_of, distribution
from jmat.models.sites import stream_sites
from jmat.studies.early_exit.curves import padded, top_words
from jmat.studies.early_exit.stopping import ExitRule, check, run_until_sure
from jmat.studies.early_exit.thresholds import exit_layers
from jmat.studies.evaluation import evaluate
from tests import hf
from tests.families import BY_NAME


def test_exits_and_predictions_equal_the_one_pass_reading(gpt2, gpt2_examples):
    L, split = gpt2.config.layers, gpt2_examples.eval
    sites = stream_sites(L)
    fit, held_out = capture(gpt2, gpt2_examples.fit, sites), capture(gpt2, split, sites)
    jumps, _ = fit_jumps([fit[site] for site in sites], targets="final")
    maps = {i: jumps[i, L] for i in range(L)} | {L: Identity()}
    shortcuts = {("mat", i): (maps[i], held_out[site]) for i, site in enumerate(sites)}
    values = evaluate(gpt2, held_out[sites[L]], shortcuts)
    gap = np.stack([values["mat", i]["gap"] for i in range(L)], axis=1)
    top_1 = np.stack([values["mat", i]["top_1"] for i in range(L + 1)], axis=1)
    count = 37
    # another one for every row
    thresholds = np.random.default_rng(0).permutation(np.linspace(0.02, 0.9, count))
    want = exit_layers(gap[:count], thresholds[None])[0]
    tokens, lengths, positions = padded(split, count, causal=True)
    rule = ExitRule({i: maps[i] for i in range(1, L)})
    layers, predicted = run_until_sure(gpt2, tokens, lengths, positions, thresholds, rule)
    assert set(want) == set(range(1, L + 1))
    assert layers.tolist() == want.tolist()
    assert predicted.tolist() == top_1[np.arange(count), want].tolist()


def test_short_list_reads_the_same_words(gpt2, gpt2_examples):
    sites = stream_sites(gpt2.config.layers)
    final = capture(gpt2, gpt2_examples.eval, sites[-1:])[sites[-1]]
    words = top_words(gpt2, final, 30)
    scores = np.asarray(logits(gpt2, final), np.float64)
    often = np.bincount(np.argsort(-scores, axis=1)[:, :10].ravel(), minlength=scores.shape[1])
    assert len(set(words)) == 30
    assert often[words].sum() == np.sort(often)[-30:].sum()
    assert (np.diff(words) > 0).all()
    at = np.zeros(len(final), np.int32)
    stand_in, gap = check(gpt2, Identity(), jnp.asarray(final)[:, None], at, words)
    np.testing.assert_array_equal(stand_in, final)
    np.testing.assert_allclose(
        gap,
        confidences_of(distribution(np.asarray(logits(gpt2, final))[:, words]))["gap"],
        atol=1e-5,
    )


CASES = [
    hf.gpt2("square", vocab_size=16),  # as many words as the stream is wide
    hf.gpt2("untied", tie_word_embeddings=False),
    hf.bert("plain"),
    hf.bert("untied", tie_word_embeddings=False),
    BY_NAME["opt-350m"],
    BY_NAME["opt-350m-untied"],
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_kind_of_head_reads_a_short_list(case):
    model, words = hf.ours(case), np.array([3, 0, 11])
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, model.config.width)), jnp.float32)
    table = model.embed.tokens.table[...]
    np.testing.assert_allclose(
        model.head(x, table, words), model.head(x, table)[:, words], rtol=1e-5, atol=1e-5
    )


@pytest.mark.slow
def test_bert_leaves_early_too(bert, bert_examples):
    L = bert.config.layers
    tokens, lengths, positions = padded(bert_examples.eval, 8, causal=False)
    rule = ExitRule({i: Identity() for i in range(1, L)})
    layers, predicted = run_until_sure(bert, tokens, lengths, positions, np.full(8, -1.0), rule)
    assert layers.tolist() == [1] * 8
    mask = np.arange(tokens.shape[1]) < lengths[:, None]
    _, acts = jmat.run(bert, tokens, keep=("block.0",), stop=1, mask=mask, read_at=positions)
    assert predicted.tolist() == np.asarray(logits(bert, acts["block.0"]).argmax(-1)).tolist()
