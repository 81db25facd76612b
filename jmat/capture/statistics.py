"""Reads means, second moments and spreads off moments, and checks them."""

from collections.abc import Iterable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy import ndarray

from jmat.capture.moments import Moments, moved
from jmat.runtime.precision import float64


@float64()
def second_moments(
    moments: Moments, source: str, target: str, *, centred: bool
) -> Float[Array | ndarray, "D E"]:
    """Returns `Σ w (x − x̄)(y − ȳ)ᵀ`, or `Σ w x yᵀ`; float64."""
    total = moments.own[source] if source == target else moments.cross[source][target]
    sums = (moments.sums[source], moments.sums[target])
    n = moments.count[source]
    steps = (
        (-sums[0] / n, -sums[1] / n) if centred else (moments.shift[source], moments.shift[target])
    )
    return moved(total, n, sums, steps)


@float64()
def spread(moments: Moments, site: str, *, centred: bool) -> Float[Array | ndarray, " D"]:
    """Returns `Σ w (x − x̄)²` of each coordinate, or `Σ w x²`."""
    n, sums = moments.count[site], moments.sums[site]
    step = -sums / n if centred else moments.shift[site]
    return jnp.maximum(moments.squares[site] + 2 * step * sums + n * step**2, 0)


def check_pairs(moments: Moments, source: str, targets: Sequence[str]) -> int:
    """Returns the number of tokens. Raises ValueError where the pairs' moments cannot
    give an answer.
    """
    for target in targets:
        known = (
            source in moments.own if target == source else target in moments.cross.get(source, {})
        )
        if not known:
            raise ValueError(
                f"the pair {(source, target)} was not summed up; there are {moments.pairs}."
            )
    if not targets:
        raise ValueError("no targets to fit: give at least one.")
    counts = {site: float(moments.count[site]) for site in (source, *targets)}
    if len(set(counts.values())) > 1 or not counts[source] > 0:
        raise ValueError(
            f"the sites have seen {counts} tokens; expected equally many, and at least one."
        )
    check_finite(moments, (source, *targets))
    return round(counts[source])


def check_finite(moments: Moments, sites: Iterable[str]) -> None:
    """Raises ValueError naming the first site whose activations held NaN or infinity."""
    for site in sites:
        if not np.isfinite(np.asarray(moments.squares[site])).all():
            raise ValueError(
                f"site {site!r} is not finite for some token; the weights are damaged, or the "
                "dtype overflows: try --dtype=float32."
            )
