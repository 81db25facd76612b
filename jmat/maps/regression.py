"""Second moments of one source and one target, and what is factorised from them: all
that closed-form maps need.

Stored activations and text that streams by lead to the same moments, float64, so that
both give the same maps. Each factorisation is made at its first use and kept: that of
the source serves all kinds of maps.

With X and Y centred, the eigenvectors of XᵀX give R of `X = Q R` (`jmat.maps.roots`).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpy import ndarray

from jmat.capture.moments import Moments, mean, merge
from jmat.capture.statistics import check_pairs, second_moments, spread
from jmat.maps.metric import Metric
from jmat.maps.roots import Roots, Spectrum, projected, roots, solved, spectrum, varying
from jmat.maps.solution import Solution
from jmat.runtime.precision import float64

SOURCE, TARGET = "source", "target"
_ROWS = 2048


@float64()
def pair_moments(
    source: Float[Array | ndarray, "N D"],
    target: Float[Array | ndarray, "N E"],
    weights: Float[ndarray, " N"] | None = None,
) -> Moments:
    """Returns the moments of stored activations, whose sites are called `source` and
    `target`; `weights` of the tokens are 1 by default.

    numpy multiplies: on a CPU its products of float64, by BLAS, take a third of the
    time of XLA's.
    """
    acts = {SOURCE: np.asarray(source), TARGET: np.asarray(target)}
    D, E = source.shape[1], target.shape[1]
    own, cross, squares = np.zeros((D, D)), np.zeros((D, E)), np.zeros(E)
    sums = {SOURCE: np.zeros(D), TARGET: np.zeros(E)}
    with np.errstate(all="ignore"):  # NaN and infinity stay in the sums, where they are looked for
        shift = {site: values[:_ROWS].mean(0, dtype=np.float64) for site, values in acts.items()}
        # so many rows, as float64, fit a processor's cache
        for start in range(0, len(source), _ROWS):
            x, y = (acts[site][start : start + _ROWS] - shift[site] for site in (SOURCE, TARGET))
            weighed_x, weighed_y = x, y
            if weights is not None:
                w = weights[start : start + _ROWS, None]
                weighed_x, weighed_y = w * x, w * y
            own += weighed_x.T @ x
            cross += weighed_x.T @ y
            squares += np.einsum("nd,nd->d", weighed_y, y)
            sums = {
                SOURCE: sums[SOURCE] + weighed_x.sum(0),
                TARGET: sums[TARGET] + weighed_y.sum(0),
            }
    total = len(source) if weights is None else weights.sum()
    count = dict.fromkeys(acts, np.float64(total))
    by_site = {SOURCE: np.diag(own), TARGET: squares}
    held = Moments(count, shift, sums, by_site, {SOURCE: own}, {SOURCE: {TARGET: cross}})  # type: ignore[arg-type, dict-item]
    return jax.tree.map(jnp.asarray, held)


def one_pair(moments: Moments, source: str, target: str) -> Moments:
    """Returns the moments of one pair out of many, whose sites are then called `source`
    and `target`.
    """
    check_pairs(moments, source, [target])
    names = {SOURCE: source, TARGET: target}
    by_site = (moments.count, moments.shift, moments.sums, moments.squares)
    count, shift, sums, squares = (
        {new: each[old] for new, old in names.items()} for each in by_site
    )
    cross = {SOURCE: {TARGET: moments.cross[source][target]}}
    return Moments(count, shift, sums, squares, {SOURCE: moments.own[source]}, cross)


def pooled(pairs: list[Moments]) -> Moments:
    """Returns the moments of several pairs together, as if all their tokens were those
    of one.
    """
    return functools.reduce(merge, pairs)


@dataclasses.dataclass(frozen=True, eq=False)
class Regression:
    """Holds the moments of one pair, centred where there is an intercept.

    Attributes:
      moments: of a pair whose sites are called `source` and `target`.
      metric: of the head, for maps that are best where logits are compared; None: there
        is none.
    """

    moments: Moments
    metric: Metric | None = None

    def check(self) -> None:
        """Raises ValueError where the moments give no answer: no token, NaN or
        infinity.
        """
        check_pairs(self.moments, SOURCE, [TARGET])

    @functools.cached_property
    def n(self) -> int:
        """Returns the number of tokens."""
        return round(float(self.moments.count[SOURCE]))

    @functools.cached_property
    @float64()
    def x_mean(self) -> Float[Array, " D"]:
        """Returns the mean of the source."""
        return jnp.asarray(mean(self.moments, SOURCE))

    @functools.cached_property
    @float64()
    def y_mean(self) -> Float[Array, " E"]:
        """Returns the mean of the target."""
        return jnp.asarray(mean(self.moments, TARGET))

    @functools.cached_property
    @float64()
    def gram(self) -> Float[Array, "D D"]:
        """Returns XᵀX, centred."""
        return jnp.asarray(second_moments(self.moments, SOURCE, SOURCE, centred=True))

    @functools.cached_property
    @float64()
    def cross(self) -> Float[Array, "D E"]:
        """Returns XᵀY, centred."""
        return jnp.asarray(second_moments(self.moments, SOURCE, TARGET, centred=True))

    @functools.cached_property
    @float64()
    def y_spread(self) -> Float[Array, " E"]:
        """Returns the sum of squares of each centred coordinate of the target."""
        return jnp.asarray(spread(self.moments, TARGET, centred=True))

    @property
    @float64()
    def change_spread(self) -> Float[Array, ""]:
        """Returns `‖Y − X‖²` of the centred source and target, which are equally wide."""
        return self.y_spread.sum() - 2 * jnp.trace(self.cross) + jnp.trace(self.gram)

    @functools.cached_property
    @float64()
    def roots(self) -> Roots:
        """Returns R of the centred source."""
        return roots(self.gram, varying(self.gram, self.x_mean, self.n))

    @functools.cached_property
    @float64()
    def projected(self) -> Float[Array, "D E"]:
        """Returns P = QᵀY."""
        return projected(self.roots, self.cross)

    @functools.cached_property
    @float64()
    def affine(self) -> Float[Array, "D E"]:
        """Returns the weights of least squares with an intercept; those of minimum norm
        where X is rank deficient.
        """
        return solved(self.roots, self.projected)

    @functools.cached_property
    @float64()
    def linear(self) -> Float[Array, "D E"]:
        """Returns the weights of least squares without an intercept; of minimum norm
        where X is rank deficient.
        """
        if self.roots.kept.all():  # then it differs from the affine map by a matrix of rank 1
            return _without_intercept(
                self.roots, self.affine, self.x_mean, self.bias(self.affine), jnp.float64(self.n)
            )
        gram, cross = (
            second_moments(self.moments, SOURCE, site, centred=False) for site in (SOURCE, TARGET)
        )
        found = roots(jnp.asarray(gram), jnp.full(len(gram), True))
        return solved(found, projected(found, jnp.asarray(cross)))

    @functools.cached_property
    @float64()
    def variance(self) -> Spectrum:
        """Returns the principal components of the source."""
        return spectrum(self.gram)

    @functools.cached_property
    @float64()
    def rotated(self) -> Float[Array, "D E"]:
        """Returns XᵀY in the principal components of the source."""
        return self.variance.vectors.T @ self.cross

    @functools.cached_property
    @float64()
    def explained(self) -> Spectrum:
        """Returns the principal components of what the affine map predicts."""
        return spectrum(self.projected.T @ self.projected)

    @functools.cached_property
    @float64()
    def explained_logits(self) -> Spectrum:
        """Returns the principal components of what the affine map predicts, in the
        metric of the head.

        Raises ValueError where there is no metric.
        """
        if self.metric is None:
            raise ValueError(
                "a map in the metric of logits needs the model's head, and there is none."
            )
        seen = self.projected @ self.metric.root
        return spectrum(seen.T @ seen)

    @property
    @float64()
    def rank(self) -> Int[Array, ""]:
        """Returns the rank of the centred source."""
        return jnp.sum(self.roots.kept)

    @float64()
    def solution(self) -> Solution:
        """Returns the affine map with the statistics of its fit: rank and condition
        number of the centred source.
        """
        rank, values = int(self.rank), self.variance.values
        condition = jnp.sqrt(values[0] / values[rank - 1]) if rank else jnp.ones(())
        weights, bias = (
            np.asarray(part, np.float32) for part in (self.affine, self.bias(self.affine))
        )
        return Solution(
            weights,
            bias,
            np.asarray(rank, np.int32),
            np.asarray(condition, np.float32),
            None,
            self.n,
            0.0,
        )

    @float64()
    def bias(self, W: Float[Array, "D E"]) -> Float[Array, " E"]:
        """Returns the intercept that goes with weights."""
        return self.y_mean - self.x_mean @ W


@jax.jit
def _without_intercept(roots: Roots, W: Array, x_mean: Array, bias: Array, n: Array) -> Array:
    """Returns `(XᵀX + n x̄x̄ᵀ)⁻¹ (XᵀY + n x̄ȳᵀ)` from the affine map, by the formula of
    Sherman and Morrison.
    """
    half = roots.Vt @ (x_mean / roots.scale) / roots.s
    u = roots.Vt.T @ (half / roots.s) / roots.scale  # (XᵀX)⁻¹ x̄
    return W + jnp.outer(u, bias) / (1 / n + half @ half)
