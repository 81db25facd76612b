"""One map for all source layers, chosen among those of the single layers by KL.

One Jump Is All You Need (arXiv 2504.13984) shares one low-rank map among all exits and
does not publish how it is found. This is our rule: fit a map to each layer, try each at
all layers on tokens that it was not fitted on, and keep the one with the smallest mean
KL(full ‖ shortcut).
"""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, Float
from numpy import ndarray

from jmat.forward import logits
from jmat.maps.closed_forms import low_rank
from jmat.maps.compact import LowRank
from jmat.maps.regression import Regression
from jmat.maps.weighting import EQUAL, weigh, weighed_moments
from jmat.metrics.predictions import Distribution, compare_distributions, distribution
from jmat.models.family import Transformer

_TRIED = 256  # held-out tokens at most: every map is tried on each of them at every layer


def chosen_by_kl(
    model: Transformer,
    sources: Sequence[Float[ndarray, "N D"]],
    target: Float[ndarray, "N E"],
    rank: int,
    weights: str = EQUAL,
) -> LowRank:
    """Returns the map of one layer that serves all layers best, fitted again to all
    tokens of its layer.

    Args:
      model: its final norm and head read the maps' outputs.
      sources: the streams of all source layers; the last eighth of the tokens is held
        out for the choice.
      target: h_L at the same tokens.
      rank: of the map.
      weights: of the tokens in the fits (`jmat.maps.weighting`).

    Raises:
      ValueError: fewer than two tokens; no map has a finite KL.
    """
    N = len(target)
    if N < 2:
        raise ValueError(f"{N} tokens are too few to choose a map on: give two at least.")
    held_out = slice(N - max(N // 8, 1), N)
    rows = np.arange(N)[held_out]
    rows = rows[:: -(-len(rows) // _TRIED)]
    full = distribution(logits(model, target[rows]), 1)

    def fitted(source: Float[ndarray, "N D"], tokens: slice) -> LowRank:
        weighed = weigh(weights, source[tokens], target[tokens])
        return low_rank(Regression(weighed_moments(source[tokens], weighed)), rank)

    kl: list[float] = []
    for source in sources:
        stand_in = fitted(source, slice(0, held_out.start))
        each = [_divergence(model, full, stand_in, other[rows]) for other in sources]
        kl.append(float(np.mean(np.asarray(each, np.float64))))
    finite = np.where(np.isfinite(kl), kl, np.inf)
    if not np.isfinite(finite).any():
        raise ValueError(
            "no map of one layer has a finite KL at all layers: the dtype overflows, or the "
            "weights are damaged."
        )
    return fitted(sources[int(np.argmin(finite))], slice(None))


@jax.jit
def _divergence(
    model: Transformer, full: Distribution, stand_in: LowRank, x: Array | ndarray
) -> Array:
    """Returns the mean KL(full ‖ shortcut) over tokens, in nats."""
    short = distribution(logits(model, stand_in(x)), 1)
    return compare_distributions(full, short, (1,))["kl"].mean()
