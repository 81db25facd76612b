"""Penalties that push a model in training towards, or away from, linearity (Razzhigaev
et al. 2024, section 5).

They are added to the language-model loss: `CE + weight · penalty`. Streams h_0 .. h_L
are as `jmat.run` keeps them, the last one before the final norm; means are over real
tokens.
"""

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jmat.models.sites import stream_sites

KINDS = ("none", "cosine", "mse", "final_jump")
_TINY = 1e-12  # keeps the gradient of a norm finite at zero


class Regularizer(NamedTuple):
    """Holds a penalty: its kind, one of `KINDS`, and its weight."""

    kind: str = "none"
    weight: float = 0.0

    def sites(self, layers: int) -> tuple[str, ...]:
        """Returns the streams that the penalty reads."""
        every = stream_sites(layers)
        return {"none": (), "cosine": every, "mse": every, "final_jump": every[-2:]}[self.kind]

    def __call__(
        self, acts: Mapping[str, Float[Array, "B T D"]], real: Bool[Array, "B T"]
    ) -> Float[Array, ""]:
        """Returns the weighted penalty on the streams at `sites`, in their order;
        float32.

        `cosine`: `Σ_l mean(1 − cos(h_l, h_{l−1}))`. `mse`:
        `Σ_l mean(||h_l − h_{l−1}||²)`, the squared length of what a block adds.
        `final_jump`: `mean(1 − cos(h_L, h_{L−1}))` alone. `none`: 0.
        """
        streams = [act.astype(jnp.float32) for act in acts.values()]
        if not streams:
            return jnp.float32(0)
        measure = _squared_distance if self.kind == "mse" else _cosine_distance
        per_token = sum(measure(a, b) for a, b in itertools.pairwise(streams))
        weights = real.astype(jnp.float32)
        return (
            jnp.float32(self.weight) * (per_token * weights).sum() / jnp.maximum(weights.sum(), 1)
        )


def _squared_distance(a: Float[Array, "B T D"], b: Float[Array, "B T D"]) -> Float[Array, "B T"]:
    return jnp.square(b - a).sum(-1)


def _cosine_distance(a: Float[Array, "B T D"], b: Float[Array, "B T D"]) -> Float[Array, "B T"]:
    lengths = jnp.square(a).sum(-1) * jnp.square(b).sum(-1)
    return 1 - (a * b).sum(-1) * jax.lax.rsqrt(lengths + _TINY)
