"""Wrong changes of drafts, of weighted fits, and of jumps between inner layers."""

from tests.mutation import Change

_DRAFTS = "test_speculate.py"
_WEIGHTS = "test_weighting.py"
_JUMPS = "test_then_run.py"

CHANGES = [
    Change(
        "jmat/decode/speculate.py",
        "agrees = there & (u * of_q < of_p)",
        "agrees = there & (u < of_p)",
        "a draft is accepted by the model's probability alone",
        _DRAFTS,
    ),
    Change(
        "jmat/decode/speculate.py",
        "rest = jnp.maximum(p - jnp.pad(q, ((0, 0), (0, 1), (0, 0))), 0)",
        "rest = p",
        "the token in place of a draft is drawn from the model's law",
        _DRAFTS,
    ),
    Change(
        "jmat/decode/speculate.py",
        "q = jnp.where(there[:, :, None], jax.nn.softmax(drafted.logits, axis=-1), 0)",
        "q = jax.nn.softmax(drafted.logits, axis=-1)",
        "what was not drafted counts as drafted",
        _DRAFTS,
    ),
    Change(
        "jmat/decode/speculate.py",
        "cache=cache.with_lengths((before + count)[None]),",
        "cache=cache,",
        "drafts that were not accepted stay in the cache",
        _DRAFTS,
    ),
    Change(
        "jmat/decode/speculate.py",
        "real = going[:, None] & (columns <= drafted.lengths[:, None])",
        "real = going[:, None] & (columns < drafted.lengths[:, None])",
        "the last draft is not checked",
        _DRAFTS,
    ),
    Change(
        "jmat/decode/speculate.py",
        "count = jnp.minimum(accepted + 1, rules.most - state.written)",
        "count = accepted + 1",
        "texts grow beyond max_new_tokens",
        _DRAFTS,
    ),
    Change(
        "jmat/decode/speculate.py",
        "count = jnp.where(stopped, jnp.argmax(stops, axis=1).astype(jnp.int32) + 1, count)",
        "count = jnp.where(stopped, count, count)",
        "a text goes on behind its stop token",
        _DRAFTS,
    ),
    Change(
        "jmat/decode/speculate.py",
        "likely = jnp.max(jax.nn.softmax(scores, axis=-1), axis=-1) >= least",
        "likely = jnp.max(jax.nn.softmax(scores, axis=-1), axis=-1) >= 0",
        "least does nothing",
        _DRAFTS,
    ),
    Change(
        "jmat/decode/speculate.py",
        "counts.accepted + jnp.minimum(accepted, count),",
        "counts.accepted + count,",
        "the model's own token counts as accepted",
        _DRAFTS,
    ),
    Change(
        "jmat/decode/draft.py",
        "if not 1 <= draft.layer < config.layers:",
        "if not 1 <= draft.layer <= config.layers:",
        "a draft from the last layer is let in",
        _DRAFTS,
    ),
    Change(
        "jmat/maps/weighting.py",
        "scale = norm / (cosine * _positive(y_norm))",
        "scale = norm / _positive(y_norm)",
        "cosine: targets are scaled without their cosine",
        _WEIGHTS,
    ),
    Change(
        "jmat/maps/weighting.py",
        "_ROUNDS = 3",
        "_ROUNDS = 2",
        "cosine: a round fewer",
        _WEIGHTS,
    ),
    Change(
        "jmat/maps/weighting.py",
        "return np.asarray(kept / kept.mean())",
        "return np.asarray(kept / kept.max())",
        "the mean weight is not 1",
        _WEIGHTS,
    ),
    Change(
        "jmat/maps/regression.py",
        "cross += weighed_x.T @ y",
        "cross += x.T @ y",
        "weights are left out of the products of source and target",
        _WEIGHTS,
    ),
    Change(
        "jmat/studies/map_zoo/study.py",
        '"weights": options.weights, ',
        '"weights": "equal", ',
        "map_zoo: --weights does nothing",
        _WEIGHTS,
    ),
    Change(
        "jmat/studies/then_run.py",
        "for jump in (linear, Identity())",
        "for jump in (Identity(), linear)",
        "mat and id are swapped",
        _JUMPS,
    ),
    Change(
        "jmat/studies/then_run.py",
        "run_from(placed, jump(streams[i]), j, {}, batch)",
        "run_from(placed, jump(streams[i]), i, {}, batch)",
        "the blocks behind the source run, too",
        _JUMPS,
    ),
    Change(
        "jmat/studies/then_run.py",
        "metric_rows(values, j, groups=held_out.rows, seed=seed)",
        "metric_rows(values, j, seed=seed)",
        "intervals over examples in place of sentences",
        _JUMPS,
    ),
    Change(
        "jmat/maps/one_jump.py",
        "kl.append(float(np.mean(np.asarray(each, np.float64))))",
        "kl.append(float(np.asarray(each[0], np.float64)))",
        "the chosen jump is judged at one layer",
        "test_one_jump.py",
    ),
    Change(
        "jmat/metrics/top.py",
        "chosen = jnp.sort(_first(jnp.max(blocks, axis=-1), k), axis=-1)",
        "chosen = _first(jnp.max(blocks, axis=-1), k)",
        "equal scores in different blocks change places",
        "test_metrics.py",
    ),
]
