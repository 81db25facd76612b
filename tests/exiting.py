"""What exits while writing must come to: by full passes over the texts as they were
written, and block by block with a cache.
"""

import numpy as np

import jmat
from jmat.models.cache import new_cache


def probabilities(scores):
    scores = np.asarray(scores, np.float64)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def sure(kind, p):
    """How sure laws [..., V] are, by its definition."""
    largest = np.sort(p, axis=-1)[..., ::-1]
    if kind == "gap":
        return largest[..., 0] - largest[..., 1]
    if kind == "max_probability":
        return largest[..., 0]
    if kind == "entropy":
        logs = np.log(np.where(p > 0, p, 1))
        return 1 + (p * logs).sum(-1) / np.log(p.shape[-1])
    tops = p.argmax(-1)  # patience: the last axis but one is of layers
    runs = np.zeros(tops.shape)
    for i in range(1, tops.shape[-1]):
        runs[..., i] = np.where(tops[..., i] == tops[..., i - 1], runs[..., i - 1] + 1, 0)
    return runs


def layer_logits(model, whole, exits, looked_at, **options):
    """Returns logits [m + 1, T, V] that each layer looked at, and the last one, has at
    each token in one pass over a text.
    """
    keep = [f"block.{layer - 1}" for layer in looked_at]
    x, kept = jmat.run(model, whole[None], keep=keep, **options)
    maps = [exits.maps[layer] for layer in looked_at]
    streams = [stand_in(kept[name]) for stand_in, name in zip(maps, keep, strict=True)]
    return np.stack([np.asarray(jmat.logits(model, each[0])) for each in (*streams, x)])


def check_exact(model, found, exits, bound=1e-5, **options):
    """Asserts that each token is the most likely one, and its score and the confidences
    are those of the layer at which it left in a full pass; and that it left where the
    logged confidences say.
    """
    L, looked_at = model.config.layers, found.exits.looked_at
    threshold = exits.threshold - (0.5 if exits.confidence == "patience" else 0)
    for row, whole in enumerate(found.sequences):
        logits = layer_logits(model, whole, exits, looked_at, **options)
        size = np.abs(logits).max()
        layers, logged = found.exits.layers[row], found.exits.confidences[row]
        assert layers[0] == L
        assert np.isnan(logged[0]).all()
        for t, token in enumerate(found.tokens[row]):
            column = len(found.prompts[row]) + t - 1
            at = (*looked_at, L).index(layers[t])
            scores = logits[at, column]
            assert scores.max() - scores[token] <= 2 * bound * size
            score = np.log(probabilities(scores)[token])
            np.testing.assert_allclose(found.scores[row][t], score, atol=2 * bound * size)
            if t == 0:
                continue
            read = logits[:-1, column]
            read = read if exits.words is None else read[:, exits.words]
            expected = sure(exits.confidence, probabilities(read))
            seen = at + 1 if at < len(looked_at) else at
            np.testing.assert_allclose(logged[t, :seen], expected[:seen], atol=4 * bound * size)
            assert np.isnan(logged[t, seen:]).all()
            if exits.length is not None:
                threshold = 0.9 * exits.threshold + 0.1 * np.exp(-4 * column / exits.length)
            above = np.flatnonzero(logged[t] > threshold)
            assert layers[t] == (looked_at[above[0]] if above.size else L)


def by_hand(model, prompt, new, exits, fill):
    """Returns what one prompt becomes with confidence `gap`, block by block: tokens,
    layers, scores. `fill(cache, x, layer)` returns the cache in which blocks from
    `layer` on have something for a token that left with stream x.
    """
    L = model.config.layers
    looked_at = exits.looked_at(model.config)
    cache = new_cache(model, 1, len(prompt) + new)
    x, _, cache = jmat.run(model, np.asarray([prompt]), cache=cache)
    laws = [probabilities(jmat.logits(model, x[0, -1]))]
    tokens, layers = [int(laws[0].argmax())], [L]
    while len(tokens) < new:
        x, start, left = np.asarray([[tokens[-1]]]), 0, L
        for layer in (*looked_at, L):
            x, _, cache = jmat.run(model, x, start=start, stop=layer, cache=cache)
            start = layer
            stand_in = x if layer == L else exits.maps[layer](x)
            law = probabilities(jmat.logits(model, stand_in[0, 0]))
            if layer < L and sure("gap", law) > exits.threshold:
                left, cache = layer, fill(cache, x, layer)
                break
        laws.append(law)
        tokens.append(int(law.argmax()))
        layers.append(left)
    scores = [np.log(law[token]) for law, token in zip(laws, tokens, strict=True)]
    return tokens, layers, scores


def check_by_hand(model, prompts, exits, fill, new=20):
    """Asserts that tokens, layers and scores are those of `by_hand`. Returns the layers."""
    found = jmat.generate(
        model, prompts, max_new_tokens=new, stop_tokens=[], scores=True, exits=exits
    )
    for row, prompt in enumerate(prompts):
        tokens, layers, scores = by_hand(model, prompt, new, exits, fill)
        assert found.tokens[row].tolist() == tokens
        assert found.exits.layers[row].tolist() == layers
        np.testing.assert_allclose(found.scores[row], scores, atol=1e-4)
    return np.concatenate(found.exits.layers)
