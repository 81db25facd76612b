"""Wrong changes of early exits while a model writes."""

from tests.mutation import Change

_EXITS = "test_exits.py"
_AGREEMENT = "test_exit_agreement.py"

CHANGES = [
    Change(
        "jmat/decode/leave.py",
        "going=token.going & ~leaves,",
        "going=token.going,",
        "tokens that left run the other blocks, too",
        _EXITS,
    ),
    Change(
        "jmat/decode/leave.py",
        "logits=jnp.where(leaves[:, None], scores, token.logits),",
        "logits=jnp.where(leaves.any(), scores, token.logits),",
        "where one row leaves, others get its layer's prediction",
        _EXITS,
    ),
    Change(
        "jmat/decode/leave.py",
        "jnp.where(token.going, at, NOWHERE)[:, None]",
        "jnp.where(token.going, at + 1, NOWHERE)[:, None]",
        "streams of tokens that left stand a column too late",
        _EXITS,
    ),
    Change(
        "jmat/decode/fills.py",
        "jnp.where(going, at + 1 - cache.lengths[start], 0)",
        "jnp.where(going, jnp.minimum(at + 1 - cache.lengths[start], 1), 0)",
        "of the tokens that are made good the first one alone is read",
        _EXITS,
    ),
    Change(
        "jmat/decode/fills.py",
        "return cache, Gaps(put(gaps.streams, x, columns)), runs + 1",
        "return cache, gaps, runs + 1",
        "streams of tokens that are made good stay those of the layer before",
        _EXITS,
    ),
    Change(
        "jmat/decode/fills.py",
        "return both[:, :, 0], both[:, :, 1]",
        "return both[:, :, 1], both[:, :, 0]",
        "direct maps give values for keys",
        _EXITS,
    ),
    Change(
        "jmat/decode/fills.py",
        "    for k in range(layer, model.config.layers):\n        given",
        "    for k in range(layer + 1, model.config.layers):\n        given",
        "the first skipped block keeps nothing",
        _EXITS,
    ),
    Change(
        "jmat/decode/fit_exits.py",
        'own = (f"block.{k}.attn.k", f"block.{k}.attn.v")',
        'own = (f"block.{k}.attn.v", f"block.{k}.attn.k")',
        "direct maps are fitted to values, then keys",
        _EXITS,
    ),
    Change(
        "jmat/decode/text.py",
        "ends.append(ends[-1] + max(added, 0))",
        "ends.append(ends[-1] + 1)",
        "each token adds one letter",
        _EXITS,
    ),
    Change(
        "jmat/decode/replay.py",
        "final = jax.vmap(lambda row, at: row[at])(x, own)",
        "final = jax.vmap(lambda row, at: row[at])(x, own + 1)",
        "laws are held against those of the next token",
        _AGREEMENT,
    ),
    Change(
        "jmat/studies/decoding/exit_work.py",
        "np.maximum.accumulate(layers[::-1])[::-1]",
        "np.maximum.accumulate(layers)",
        "blocks are made good for tokens that come later",
        _AGREEMENT,
    ),
    Change(
        "jmat/studies/decoding/agreement.py",
        "left = [row[1:] < L for row in layers]",
        "left = [row[1:] <= L for row in layers]",
        "precision@1 counts tokens that did not leave",
        _AGREEMENT,
    ),
    Change(
        "jmat/studies/early_exit/thresholds.py",
        "        if p_value(k) > level:\n            break\n",
        "        if p_value(k) > level:\n            continue\n",
        "a threshold is chosen behind one that was not shown safe",
        "test_exit_calibration.py test_early_exit.py",
    ),
]
