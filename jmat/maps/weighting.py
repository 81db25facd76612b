"""Weights of tokens in a fit: least squares counts large activations most, and these
change that.

Models with massive activations have a few tokens whose vectors are hundreds of times as
long as the others'. The squared error of all tokens is then about these few.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float
from numpy import ndarray

from jmat.capture.moments import Moments
from jmat.maps.regression import Regression, pair_moments

EQUAL, NORMS, COSINE = "equal", "norms", "cosine"
WEIGHTS = (EQUAL, NORMS, COSINE)
_ROUNDS = 3
_LEAST = 0.1  # a smaller cosine counts as this one: its token would be scaled up without bound


class Weighed(NamedTuple):
    """Holds the targets of a fit, and a weight for each token; the mean weight is 1."""

    target: Float[ndarray, "N E"]
    weights: Float[ndarray, " N"] | None


def weigh(
    weights: str, source: Float[Array | ndarray, "N D"], target: Float[Array | ndarray, "N E"]
) -> Weighed:
    """Returns the weights of tokens, and the targets that go with them.

    Args:
      weights: `equal`: all alike. `norms`: 1 / (‖x‖ ‖y‖), so that errors count in
        proportion to the vectors. `cosine`: those of the affine map whose predictions
        have the largest mean cosine with y, found by three rounds of least squares.
      source: x, a token a row.
      target: y.

    Each round of `cosine` fits `y ‖ŷ‖ / (c ‖y‖)` with weights `c / ‖ŷ‖²`, where ŷ is
    the last round's prediction and c its cosine with y. The gradient of this squared
    error by the map is then that of the mean cosine, with the opposite sign. A token
    whose source or target is zero has weight 0.

    Raises:
      ValueError: no token has a source and a target that are not zero.
    """
    Y = np.asarray(target)
    if weights == EQUAL:
        return Weighed(Y, None)
    y_norm = _norms(Y)
    counts = (y_norm > 0) & (_norms(source) > 0)
    if not counts.any():
        raise ValueError(
            f"weights={weights!r} divides by the length of the activations, and all are zero."
        )
    if weights == NORMS:
        return Weighed(Y, _scaled(1 / _positive(y_norm * _norms(source)), counts))
    by_round = Weighed(Y, None)
    X = np.asarray(source, np.float64)
    for _ in range(_ROUNDS):
        pair = Regression(weighed_moments(source, by_round))
        W, bias = (np.asarray(part) for part in (pair.affine, pair.bias(pair.affine)))
        Y_hat = X @ W + bias
        norm = _positive(_norms(Y_hat))
        cosine = np.einsum("ne,ne->n", Y_hat, Y) / (norm * _positive(y_norm))
        cosine = np.maximum(cosine, _LEAST)
        scale = norm / (cosine * _positive(y_norm))
        by_round = Weighed(Y * scale[:, None], _scaled(cosine / norm**2, counts))
    return by_round


def weighed_moments(source: Float[Array | ndarray, "N D"], weighed: Weighed) -> Moments:
    """Returns the moments of a source and its weighed target."""
    return pair_moments(source, weighed.target, weighed.weights)


def _norms(values: Float[Array | ndarray, "N D"]) -> Float[ndarray, " N"]:
    return np.asarray(np.linalg.norm(np.asarray(values, np.float64), axis=1))


def _positive(values: Float[ndarray, " N"]) -> Float[ndarray, " N"]:
    """Returns what can be divided by: 1 in place of 0."""
    return np.where(values > 0, values, 1)


def _scaled(values: Float[ndarray, " N"], counts: ndarray) -> Float[ndarray, " N"]:
    """Returns weights of mean 1, 0 where a token does not count."""
    kept = np.where(counts, values, 0)
    return np.asarray(kept / kept.mean())
