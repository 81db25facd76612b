"""Measures how well a stand-in agrees with what it stands in for: per-example values, and intervals for their means.

Values stay per example until the bootstrap, so that every figure can have an interval. Entropies and the like are in
nats. Non-finite logits give NaN in every value of that example, never a perfect score by accident of comparison.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

# Resamples are drawn in chunks of about this many counts (16 MB).
_CHUNK = 2_000_000


@functools.partial(jax.jit, static_argnames=("ks",))
def compare(
    full_logits: Float[Array, "N V"], short_logits: Float[Array, "N V"], ks: tuple[int, ...] = (1, 5, 10)
) -> dict[str, Float[Array, " N"]]:
    """The shortcut's predictions against the full model's, example by example (Din et al. 2023, section 3).

    Returns:
        `precision@k`: 1 where the shortcut's top-1 token is among the full model's top k, else 0.
        `recall@k`: 1 where the full model's top-1 token is among the shortcut's top k, else 0 (the mirror image).
        `surprisal`: −ln p_full(the shortcut's top-1 token), in nats.
        `kl`: KL(full ‖ shortcut), in nats; infinite where the shortcut excludes (−inf) a token that the model does not.

        A k beyond the vocabulary means all of it. Ties rank the lower token id first, as `jax.lax.top_k` does.
    """
    log_full, log_short = _log_softmax(full_logits), _log_softmax(short_logits)
    top_full, top_short = jnp.argmax(log_full, axis=-1), jnp.argmax(log_short, axis=-1)
    known = _is_distribution(log_full) & _is_distribution(log_short)
    rank_in_full, rank_in_short = rank(full_logits, top_short), rank(short_logits, top_full)
    values = {f"precision@{k}": (rank_in_full < k).astype(jnp.float32) for k in ks}
    values |= {f"recall@{k}": (rank_in_short < k).astype(jnp.float32) for k in ks}
    values["surprisal"] = -_pick(log_full, top_short)
    p_full = jnp.exp(log_full)
    # A token that the full model excludes (p = 0, log p = −inf) adds nothing.
    values["kl"] = jnp.sum(p_full * jnp.where(p_full > 0, log_full - log_short, 0), axis=-1)
    return {name: jnp.where(known, value, jnp.nan) for name, value in values.items()}


def rank(logits: Float[Array, "N V"], token: Int[Array, " N"]) -> Int[Array, " N"]:
    """Returns how many tokens come before this one, by logit and then by id; counted, since V is too long to sort."""
    own = _pick(logits, token)[:, None]
    lower_id = jnp.arange(logits.shape[-1], dtype=token.dtype) < token[:, None]
    return jnp.sum((logits > own) | ((logits == own) & lower_id), axis=-1, dtype=jnp.int32)


@jax.jit
def confidences(logits: Float[Array, "N V"]) -> dict[str, Float[Array, " N"] | Int[Array, " N"]]:
    """Returns several measures of the confidence of a prediction.

    Returns:
        `gap`: p(1) − p(2), between the two largest probabilities (0 where they tie).
        `max_probability`: p(1).
        `entropy`: in nats, from 0 to ln V.
        `top_1`: the predicted token, int32.
    """
    log_p = _log_softmax(logits)
    p = jnp.exp(log_p)
    known = _is_distribution(log_p)
    entropy = -jnp.sum(p * jnp.where(p > 0, log_p, 0), axis=-1)
    values = {"gap": top_2_gap(logits), "max_probability": jnp.max(p, axis=-1), "entropy": entropy}
    top_1 = jnp.argmax(log_p, axis=-1).astype(jnp.int32)
    return {name: jnp.where(known, value, jnp.nan) for name, value in values.items()} | {"top_1": top_1}


@jax.jit
def top_2_gap(logits: Float[Array, "N V"]) -> Float[Array, " N"]:
    """p(1) − p(2), the gap between the two largest probabilities: the confidence of Din et al. 2023, section 6."""
    p = jnp.exp(_log_softmax(logits))
    first = jnp.argmax(p, axis=-1)
    others = jnp.where(jnp.arange(p.shape[-1], dtype=first.dtype) == first[:, None], 0, p)
    return _pick(p, first) - jnp.max(others, axis=-1)


@jax.jit
def cross_entropy(logits: Float[Array, "*N V"], targets: Int[Array, "*N"]) -> Float[Array, "*N"]:
    """−ln p(target), in nats; NaN where the target is no token id, since indexing would silently take another token."""
    valid = (targets >= 0) & (targets < logits.shape[-1])
    return jnp.where(valid, -_pick(_log_softmax(logits), jnp.where(valid, targets, 0)), jnp.nan)


def perplexity(nats: Float[Array | np.ndarray, "*N"], weights: Float[Array | np.ndarray, "*N"] | None = None) -> float:
    """`exp(Σ w · nats / Σ w)` of per-token cross entropies; padding has weight 0, and then its value does not matter.

    Raises ValueError if a value that counts is not finite, or none counts.
    """
    values = np.asarray(nats, np.float64)
    importance = np.ones_like(values) if weights is None else np.asarray(weights, np.float64)
    values, importance = values[importance != 0], importance[importance != 0]
    _check_finite("cross entropies", values)
    return float(np.exp(np.average(values, weights=importance)))


def r2_score(
    Y: Float[Array | np.ndarray, "N D"], Y_hat: Float[Array | np.ndarray, "N D"], *, variance_weighted: bool = False
) -> float:
    """Coefficient of determination of each coordinate, `1 − Σ(y − ŷ)² / Σ(y − ȳ)²`, averaged over the D coordinates.

    The average is uniform, or weighted by the coordinates' variances in Y. As in scikit-learn, a coordinate that is
    constant in Y scores 1 where it is predicted exactly and 0 elsewhere, with weight 0 unless all are. In float64.

    Raises ValueError if the shapes differ, there are fewer than two examples, or a value is not finite.
    """
    if Y.shape != Y_hat.shape or len(Y) < 2:
        raise ValueError(f"expected Y and Y_hat of one shape [N, D] with N >= 2, got {Y.shape} and {Y_hat.shape}")
    wide = np.asarray(Y, np.float64)
    error = np.sum(np.square(wide - np.asarray(Y_hat, np.float64)), axis=0)
    spread = np.sum(np.square(wide - wide.mean(axis=0)), axis=0)
    _check_finite("coordinates' errors and variances", np.stack([error, spread]))
    spread[wide.max(axis=0) == wide.min(axis=0)] = 0  # the mean of equal numbers may differ from them by rounding
    varies = spread > 0
    scores = np.where(varies, 1 - error / np.where(varies, spread, 1), error == 0)
    return float(np.average(scores, weights=spread if variance_weighted and varies.any() else None))


def varying(values: Float[Array | np.ndarray, "N D"]) -> Bool[np.ndarray, " D"]:
    """Returns which coordinates differ between examples, by any amount; the others have no R²."""
    if len(values) == 0:
        return np.zeros(values.shape[1], bool)
    return np.asarray(values.max(axis=0) != values.min(axis=0))


def bootstrap_mean(
    values: Float[Array | np.ndarray, "N *M"],
    *,
    groups: Int[np.ndarray, " N"] | None = None,
    confidence: float = 0.95,
    samples: int = 1000,
    seed: int = 0,
) -> tuple[Float[np.ndarray, "*M"], Float[np.ndarray, "*M"], Float[np.ndarray, "*M"]]:
    """Mean over the examples with its percentile bootstrap interval: `(mean, low, high)`, in float64.

    All columns are resampled together, so a difference of columns may be given as one more column: it is then paired.
    `groups` are resampled whole: the examples of one sentence are no independent ones. A single example, or group, has
    no interval: `low` and `high` are NaN.

    Raises ValueError if there are no examples, or a value is not finite: leaving such examples out would be a choice.
    """
    data = np.asarray(values, np.float64)
    if not 0 < confidence < 1 or samples < 1:
        raise ValueError(f"expected 0 < confidence < 1 and samples >= 1, got {confidence} and {samples}")
    _check_finite("values", data)
    mean = np.asarray(data.mean(axis=0))
    if len(np.unique(np.arange(len(data)) if groups is None else groups)) < 2:
        unknown = np.full_like(mean, np.nan)
        return mean, unknown, unknown
    flat = (data - mean).reshape(len(data), -1)
    chunks = _count_chunks(len(data), samples, seed, groups)
    shifts = np.concatenate([counts @ flat / counts.sum(1, keepdims=True) for counts in chunks])
    ends = mean + np.percentile(shifts, [50 * (1 - confidence), 50 * (1 + confidence)], axis=0).reshape(2, *mean.shape)
    low, high = np.clip(ends, data.min(axis=0), data.max(axis=0))  # a share is not below 0, not by rounding either
    return mean, np.asarray(low), np.asarray(high)


def bootstrap_counts(
    n: int, *, groups: Int[np.ndarray, " N"] | None = None, samples: int = 1000, seed: int = 0
) -> Float[np.ndarray, "S N"]:
    """Returns how often each of n examples is drawn in each resample; the same ones that `bootstrap_mean` uses."""
    return np.concatenate(list(_count_chunks(n, samples, seed, groups)))


def bootstrap_ratio(
    sums: Float[np.ndarray, " N"], counts: Float[np.ndarray, " N"], drawn: Float[np.ndarray, "S N"]
) -> tuple[float, float, float]:
    """`Σ sums / Σ counts` with its 95 % interval, `(value, low, high)`: a mean over parts of unequal sizes.

    `drawn` says how often each part is drawn (`bootstrap_counts`). A single part has no interval: NaN.
    """
    low, high = percentiles((drawn @ sums) / (drawn @ counts), drawn)
    return float(sums.sum() / counts.sum()), low, high


def percentiles(values: Float[np.ndarray, " S"], drawn: Float[np.ndarray, "S _"]) -> tuple[float, float]:
    """Returns the ends of the 95 % interval of a figure under bootstrap resamples.

    NaN where there is nothing to resample, all draws being of one sentence, and where the figure is not finite under
    some resample.
    """
    # Row by row, since the first one that differs settles it: `drawn` has millions of numbers.
    if not np.isfinite(values).all() or all(np.array_equal(row, drawn[0]) for row in drawn):
        return float("nan"), float("nan")
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def _count_chunks(
    n: int, samples: int, seed: int, groups: Int[np.ndarray, " N"] | None
) -> Iterator[Float[np.ndarray, "S N"]]:
    rng = np.random.default_rng(seed)
    group = np.arange(n) if groups is None else np.unique(groups, return_inverse=True)[1]
    drawn = int(group.max()) + 1
    size = max(1, _CHUNK // n)
    for start in range(0, samples, size):
        draws = [rng.integers(drawn, size=drawn) for _ in range(min(size, samples - start))]
        yield np.stack([np.bincount(draw, minlength=drawn)[group] for draw in draws]).astype(np.float64)


def _check_finite(what: str, values: np.ndarray) -> None:
    if values.size == 0:
        raise ValueError(f"no {what} to average: at least one example is needed")
    bad = np.count_nonzero(~np.isfinite(values))
    if bad:
        raise ValueError(
            f"{bad} of {values.size} {what} are NaN or infinite: there is no mean; find out where they arise"
        )


def _log_softmax(logits: Array) -> Array:
    dtype = jnp.float64 if logits.dtype == jnp.float64 else jnp.float32
    return jax.nn.log_softmax(logits.astype(dtype), axis=-1)


def _is_distribution(log_p: Array) -> Array:
    return ~jnp.any(jnp.isnan(log_p), axis=-1)


def _pick(values: Array, index: Array) -> Array:
    return jnp.take_along_axis(values, index[..., None], axis=-1)[..., 0]
