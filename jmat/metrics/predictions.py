"""Measures how well a stand-in agrees with what it stands in for: per-example values,
and intervals for their means.

Values stay per example until the bootstrap, so that every figure can have an interval.
Entropies and the like are in nats. Non-finite logits give NaN in every value of that
example, never a perfect score by accident of comparison.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from numpy import ndarray

from jmat.metrics.bootstrap import check_finite
from jmat.metrics.top import top_k
from jmat.runtime import hosts

KS = (1, 5, 10)  # of precision@k and recall@k, by default


class Distribution(NamedTuple):
    """Holds logits with what all figures read of them, so that each is computed once.

    Attributes:
      logits: float32, or float64 where they were.
      largest: the largest logit; 0 where it is not finite.
      log_sum: ln Σ exp(logit − largest).
      top: ids of the most likely tokens, the first one first. Ties rank the lower id
        first.
      second: logit of the second of them; −inf in a vocabulary of one.
      known: whether there is a distribution: no logit is NaN or +inf, and one is
        finite.
    """

    logits: Float[Array, "N V"]
    largest: Float[Array, " N"]
    log_sum: Float[Array, " N"]
    top: Int[Array, "N k"]
    second: Float[Array, " N"]
    known: Bool[Array, " N"]

    def log_p(self) -> Float[Array, "N V"]:
        """Returns the logarithm of all probabilities."""
        return self.logits - self.largest[:, None] - self.log_sum[:, None]

    def log_p_of(self, token: Int[Array, " N"]) -> Float[Array, " N"]:
        """Returns the logarithm of the probability of one token an example."""
        return _pick(self.logits, token) - self.largest - self.log_sum


@functools.partial(jax.jit, static_argnames=("k",))
def distribution(logits: Float[Array | ndarray, "N V"], k: int = max(KS)) -> Distribution:
    """Returns logits with what is read of them, and their k most likely tokens, or all
    where there are fewer.
    """
    scores = jnp.asarray(logits, jnp.float64 if logits.dtype == jnp.float64 else jnp.float32)
    V = scores.shape[-1]
    values, top = top_k(scores, min(max(k, 2), V))
    largest = jnp.max(scores, axis=-1)
    finite = jnp.isfinite(largest)
    largest = jnp.where(finite, largest, 0)
    log_sum = jnp.log(jnp.sum(jnp.exp(scores - largest[:, None]), axis=-1))
    second = values[:, 1] if V > 1 else jnp.full_like(largest, -jnp.inf)
    known = finite & ~jnp.isnan(log_sum)
    return Distribution(scores, largest, log_sum, top.astype(jnp.int32), second, known)


def compare(
    full_logits: Float[Array | ndarray, "N V"],
    short_logits: Float[Array | ndarray, "N V"],
    ks: tuple[int, ...] = KS,
) -> dict[str, Float[Array, " N"]]:
    """Compares the shortcut's predictions with the full model's, as
    `compare_distributions` does.
    """
    full, short = (distribution(logits, max(ks)) for logits in (full_logits, short_logits))
    return compare_distributions(full, short, ks)


@functools.partial(jax.jit, static_argnames=("ks",))
def compare_distributions(
    full: Distribution, short: Distribution, ks: tuple[int, ...] = KS
) -> dict[str, Float[Array, " N"]]:
    """Compares the shortcut's predictions with the full model's, example by example
    (Din et al. 2023, section 3).

    Returns:
      `precision@k`: 1 where the shortcut's top-1 token is among the full model's top k,
        else 0.
      `recall@k`: 1 where the full model's top-1 token is among the shortcut's top k,
        else 0 (the mirror image).
      `surprisal`: −ln p_full(the shortcut's top-1 token), in nats.
      `kl`: KL(full ‖ shortcut), in nats; infinite where the shortcut excludes (−inf) a
        token that the model does not.

      A k beyond the vocabulary means all of it; otherwise both distributions need k
      tokens at their top. All are NaN where one of the two is no distribution.
    """
    values = {f"precision@{k}": _among(full.top[:, :k], short.top[:, :1]) for k in ks}
    values |= {f"recall@{k}": _among(short.top[:, :k], full.top[:, :1]) for k in ks}
    values["surprisal"] = -full.log_p_of(short.top[:, 0])
    log_full = full.log_p()
    p_full = jnp.exp(log_full)
    # A token that the full model excludes (p = 0, log p = −inf) adds nothing.
    each = jnp.where(p_full > 0, p_full * (log_full - short.log_p()), 0)
    values["kl"] = jnp.sum(each, axis=-1)
    known = full.known & short.known
    return {name: jnp.where(known, value, jnp.nan) for name, value in values.items()}


def _among(top: Int[Array, "N k"], token: Int[Array, "N 1"]) -> Float[Array, " N"]:
    return jnp.any(top == token, axis=-1).astype(jnp.float32)


@jax.jit
def rank(full: Distribution, short: Distribution) -> Float[Array, " N"]:
    """Returns how many tokens the shortcut ranks before the full model's top-1 token,
    by logit and then by id; counted, since V is too long to sort.

    NaN where one of the two is no distribution.
    """
    logits, token = short.logits, full.top[:, 0]
    own = _pick(logits, token)[:, None]
    lower_id = jnp.arange(logits.shape[-1], dtype=token.dtype) < token[:, None]
    before = jnp.sum((logits > own) | ((logits == own) & lower_id), axis=-1, dtype=jnp.int32)
    return jnp.where(full.known & short.known, before.astype(jnp.float32), jnp.nan)


@jax.jit
def confidences_of(read: Distribution) -> dict[str, Float[Array, " N"] | Int[Array, " N"]]:
    """Returns several measures of the confidence of a prediction.

    Returns:
      `gap`: p(1) − p(2), between the two largest probabilities (0 where they tie): the
        confidence of Din et al. 2023, section 6.
      `max_probability`: p(1).
      `entropy`: in nats, from 0 to ln V.
      `top_1`: the predicted token, int32.
    """
    log_p = read.log_p()
    p = jnp.exp(log_p)
    entropy = -jnp.sum(jnp.where(p > 0, p * log_p, 0), axis=-1)
    largest, second = jnp.exp(-read.log_sum), jnp.exp(read.second - read.largest - read.log_sum)
    values = {"gap": largest - second, "max_probability": largest, "entropy": entropy}
    values = {name: jnp.where(read.known, value, jnp.nan) for name, value in values.items()}
    return values | {"top_1": read.top[:, 0]}


@jax.jit
def top_2_gap(logits: Float[Array | ndarray, "N V"]) -> Float[Array, " N"]:
    """Returns p(1) − p(2), the gap between the two largest probabilities."""
    return confidences_of(distribution(logits, 2))["gap"]


@jax.jit
def cross_entropy(logits: Float[Array, "*N V"], targets: Int[Array, "*N"]) -> Float[Array, "*N"]:
    """Returns −ln p(target), in nats; NaN where the target is no token id, since
    indexing would silently take another token.
    """
    valid = (targets >= 0) & (targets < logits.shape[-1])
    return jnp.where(valid, -_pick(_log_softmax(logits), jnp.where(valid, targets, 0)), jnp.nan)


def perplexity(
    nats: Float[Array | np.ndarray, "*N"], weights: Float[Array | np.ndarray, "*N"] | None = None
) -> float:
    """Returns `exp(Σ w · nats / Σ w)` of per-token cross entropies; padding has weight
    0, and then its value does not matter.

    Raises ValueError if a value that counts is not finite, or none counts.
    """
    values = np.asarray(nats, np.float64)
    importance = np.ones_like(values) if weights is None else np.asarray(weights, np.float64)
    values, importance = values[importance != 0], importance[importance != 0]
    check_finite("cross entropies", values)
    return float(np.exp(np.average(values, weights=importance)))


def _log_softmax(logits: Array) -> Array:
    dtype = jnp.float64 if logits.dtype == jnp.float64 else jnp.float32
    return jax.nn.log_softmax(logits.astype(dtype), axis=-1)


def _pick(values: Array, index: Array) -> Array:
    return jnp.take_along_axis(values, index[..., None], axis=-1)[..., 0]


# nats; predictions of a model that reads its text differ by thousands of times as much
_SAME = 1e-4


_FEW = 10  # so few examples can have the same most likely token by chance


@jax.jit
def _likeness(
    logits: Float[Array, "N V"], first: Float[Array, " V"]
) -> tuple[Int[Array, " N"], Float[Array, " N"]]:
    """Returns each example's most likely token, and how far its log-probabilities are
    from those of `first` (nats).
    """
    p, other = (
        jax.nn.log_softmax(scores.astype(jnp.float32), axis=-1) for scores in (logits, first)
    )
    # A token that both exclude has a logarithm of minus infinity in both.
    apart = jnp.where(p == other, 0, jnp.abs(p - other))
    return logits.argmax(-1).astype(jnp.int32), apart.max(-1)


class Predictions:
    """Collects what a model predicts, to tell whether it depends on the text at all.

    Weights of zero, or a norm's epsilon that overflows, make every stand-in agree with
    the model perfectly.
    """

    def __init__(self) -> None:
        self._first: ndarray | None = None
        self._tops: set[int] = set()
        self._counted: list[Bool[Array | ndarray, "*N"]] = []
        self._apart = 0.0

    def add(
        self,
        logits: Float[Array | ndarray, "*N V"],
        real: Bool[Array | ndarray, "*N"] | None = None,
    ) -> None:
        """Adds examples' logits. Once two have differed it waits for nothing, and costs
        nothing.

        Args:
          logits: of the whole model.
          real: which examples count; default: all.
        """
        self._counted.append(np.ones(logits.shape[:-1], bool) if real is None else real)
        if self._apart > _SAME and len(self._tops) > 1:
            return
        counts = np.asarray(self._counted[-1]).reshape(-1)
        if not counts.any():
            return
        if self._first is None:
            self._first = np.asarray(logits).reshape(-1, logits.shape[-1])[int(counts.argmax())]
        # Not before: a reshaped array of logits is a copy of them.
        flat = jnp.asarray(logits).reshape(-1, logits.shape[-1])
        tops, apart = (np.asarray(each)[counts] for each in _likeness(flat, self._first))
        self._tops |= set(np.unique(tops).tolist())
        self._apart = max(self._apart, float(np.nan_to_num(apart, nan=np.inf).max()))

    def meet_hosts(self) -> None:
        """Adds what the other processes have collected; all must call it, once, when
        all batches are added.
        """
        if hosts.count() == 1:
            return
        self._counted = list(hosts.gather(np.ones(self._count, bool)))
        self._tops = set(
            np.concatenate(hosts.gather(np.array(sorted(self._tops), np.int64))).tolist()
        )
        apart = np.concatenate(hosts.gather(np.array([self._apart])))
        first = np.empty(0, np.float32) if self._first is None else self._first.astype(np.float32)
        firsts = [each for each in hosts.gather(first) if each.size]
        if firsts:
            apart = np.append(apart, np.asarray(_likeness(np.stack(firsts), firsts[0])[1]))
        self._apart = float(np.nan_to_num(apart, nan=np.inf).max())

    @property
    def _count(self) -> int:
        return sum(int(np.asarray(real).sum()) for real in self._counted)

    def note(self) -> str | None:
        """Returns one sentence where all examples have the same prediction, or the same
        most likely token; else None.

        A single example says nothing, and fewer than ten with one most likely token say
        nothing either.
        """
        count = self._count
        if count < 2 or (self._apart > _SAME and (len(self._tops) > 1 or count < _FEW)):
            return None
        if self._apart <= _SAME:
            same, cause = "the model predicts the same", "its predictions do not depend on the text"
        else:
            same = f"the model's most likely token is the same ({min(self._tops)})"
            cause = "it does not depend on the text"
        return (
            f"{same} at all {count} places: {cause}, or all examples are alike; agreement and "
            "accuracy say nothing here"
        )
