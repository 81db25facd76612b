"""How texts with exits agree with the whole model: every figure worked out by hand."""

import itertools

import jax
import numpy as np
import pytest

import jmat
from jmat.decode.replay import replay
from jmat.models.flops import block_flops, head_flops, map_flops
from jmat.studies.decoding.agreement import distances, law_rows, measure_exits, rouge_l
from jmat.studies.decoding.exit_work import blocks_run, full_flops, token_flops
from tests.exiting import layer_logits, probabilities

FILLS = ("recompute", "copy", "map", "direct")
NEW = 16


@pytest.fixture(autouse=True)
def exact():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def exits(gpt2, gpt2_examples):
    return {
        fill: jmat.fit_exits(gpt2, gpt2_examples.fit, [1, 3], 0.06, fill=fill) for fill in FILLS
    }


def prompts(vocab_size, lengths=(3, 9, 1, 6)):
    rng = np.random.default_rng(0)
    return [rng.integers(5, vocab_size, size=length) for length in lengths]


def by_hand(model, found, exits):
    """KL and agreement of each token, where blocks are recomputed: by full passes."""
    kl, agrees, log_p = [], [], []
    for row, whole in enumerate(found.sequences):
        logits = layer_logits(model, whole, exits, found.exits.looked_at)
        at = len(found.prompts[row]) - 1 + np.arange(len(found.tokens[row]))
        places = [(*found.exits.looked_at, 4).index(layer) for layer in found.exits.layers[row]]
        q, p = (np.log(probabilities(logits[of, at])) for of in (places, -1))
        kl.append((np.exp(p) * (p - q)).sum(1)[1:])
        agrees.append((p.argmax(1) == q.argmax(1))[1:])
        log_p.append(p[np.arange(len(at)), found.tokens[row]][1:])
    return kl, agrees, log_p


@pytest.mark.slow
def test_laws_are_those_of_full_passes(gpt2, exits):
    found = jmat.generate(
        gpt2, prompts(gpt2.config.vocab_size), max_new_tokens=NEW, exits=exits["recompute"]
    )
    read = replay(gpt2, found, exits["recompute"])
    kl, agrees, log_p = by_hand(gpt2, found, exits["recompute"])
    for row, count in enumerate(map(len, found.tokens)):
        np.testing.assert_allclose(read.kl[row, 1:count], kl[row], atol=1e-4)
        np.testing.assert_array_equal(read.agrees[row, 1:count], agrees[row])
        np.testing.assert_allclose(read.log_p[row, 1:count], log_p[row], atol=1e-4)
        assert np.isnan(read.kl[row, 0])
        assert np.isnan(read.kl[row, count:]).all()
    rows = {row["metric"]: row for row in law_rows(found, read, 0) if "distance" not in row}
    left = np.concatenate([row[1:] < 4 for row in found.exits.layers])
    assert left.any()
    assert rows["precision@1"]["tokens"] == left.sum()
    assert rows["precision@1"]["value"] == pytest.approx(np.concatenate(agrees)[left].mean())
    assert rows["kl"]["value"] == pytest.approx(np.concatenate(kl).mean(), abs=1e-4)
    perplexity = np.exp(-np.concatenate(log_p).mean())
    assert rows["perplexity"]["value"] == pytest.approx(perplexity, rel=1e-4)
    with pytest.raises(RuntimeError, match="were not written with these exits"):
        replay(gpt2, found, jmat.Exits(exits["recompute"].maps, 0.2))


@pytest.mark.slow
def test_policies_side_by_side(gpt2, exits):
    """Rows of all policies; recompute alone leaves full tokens as they are."""
    ids = prompts(gpt2.config.vocab_size)
    rows = measure_exits(gpt2, ids, exits, max_new_tokens=NEW)
    assert {row["method"] for row in rows} == {"plain", *FILLS}

    def value(method, metric, **fields):
        chosen = [
            row
            for row in rows
            if (row["method"], row["metric"]) == (method, metric)
            and row.get("distance") == fields.get("distance")
        ]
        assert len(chosen) == 1
        return chosen[0]["value"]

    plain = jmat.generate(gpt2, ids, max_new_tokens=NEW, stop_tokens=[], scores=True)
    nats = -np.concatenate([row[1:] for row in plain.scores]).mean()
    assert value("plain", "perplexity") == pytest.approx(np.exp(nats), rel=1e-5)
    for fill in FILLS:
        found = jmat.generate(gpt2, ids, max_new_tokens=NEW, stop_tokens=[], exits=exits[fill])
        layers = np.concatenate([row[1:] for row in found.exits.layers])
        assert value(fill, "layers") == pytest.approx(layers.mean())
        pairs = list(zip(found.tokens, plain.tokens, strict=True))
        same = np.mean([(one == other).mean() for one, other in pairs])
        assert value(fill, "same_tokens") == pytest.approx(same)
        assert value(fill, "rouge_l") == pytest.approx(np.mean([rouge_l(*pair) for pair in pairs]))
        apart = value(fill, "kl", distance="0")
        assert apart < 1e-6 if fill == "recompute" else apart > 1e-4
        assert 0 < value(fill, "flops_ratio") < 3


def test_rouge_l_is_the_longest_common_subsequence():
    rng = np.random.default_rng(0)

    def longest(one, other):
        subsets = itertools.chain.from_iterable(
            itertools.combinations(one, size) for size in range(len(one) + 1)
        )

        def inside(part):
            rest = iter(other)
            return all(token in rest for token in part)

        return max(len(part) for part in subsets if inside(part))

    for _ in range(30):
        one, other = (rng.integers(0, 4, size=rng.integers(1, 8)) for _ in range(2))
        expected = 2 * longest(one.tolist(), other.tolist()) / (len(one) + len(other))
        assert rouge_l(one, other) == pytest.approx(expected)
    assert rouge_l(np.array([], int), np.array([], int)) == 1
    assert rouge_l(np.array([], int), np.array([1])) == 0


def test_distances_count_from_the_last_full_token():
    layers = np.array([4, 1, 2, 4, 4, 1, 1, 1])
    np.testing.assert_array_equal(distances(layers, 4), [0, 1, 2, 0, 0, 1, 2, 3])


def test_work_is_added_up_by_hand(gpt2, exits):
    config = gpt2.config
    D, L, layers, context = config.width, 4, np.array([1, 3, 1, 4, 1]), np.arange(5, 10)
    np.testing.assert_array_equal(blocks_run(layers, "recompute"), [4, 4, 4, 4, 1])
    np.testing.assert_array_equal(blocks_run(layers, "copy"), layers)
    look = map_flops(config) + head_flops(config)
    for fill in FILLS:
        expected = []
        for t, layer in enumerate(layers):
            run = max(layers[t:]) if fill == "recompute" else layer
            work = run * block_flops(config, 1, context[t]) + look * {1: 1, 3: 2, 4: 2}[layer]
            work += head_flops(config) if layer == L else 0
            if fill != "recompute":
                work += (L - layer) * 2 * (2 * D * D)  # keys and values
            if fill == "map":
                work += max(L - layer - 1, 0) * 2 * D * D
            expected.append(work)
        found = token_flops(config, layers, context, exits[fill])
        np.testing.assert_allclose(found, expected)
    short = jmat.Exits(exits["copy"].maps, 0.06, fill="copy", words=[3, 4, 5])
    cheaper = token_flops(config, layers, context, short)
    saved = np.array([1, 2, 1, 2, 1]) * (head_flops(config) - head_flops(config, 3))
    whole = np.where(layers < L, head_flops(config), 0)
    np.testing.assert_allclose(
        cheaper, token_flops(config, layers, context, exits["copy"]) - saved + whole
    )
    full = full_flops(config, context)
    np.testing.assert_allclose(full, L * block_flops(config, 1, context) + head_flops(config))
