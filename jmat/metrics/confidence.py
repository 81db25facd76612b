"""How sure a prediction is, as numbers that rise with it, and a threshold for them that
falls along a text.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

PATIENCE = "patience"  # how many layers in a row agree with the one before on the top token
CONFIDENCES = ("gap", "max_probability", "entropy", PATIENCE)

Values = TypeVar("Values", Array, np.ndarray)


def certainty(entropy: Float[Values, "*N"], words: int) -> Float[Values, "*N"]:
    """Returns how far an entropy (nats) is below that of a uniform law over so many
    words, as a share: 0 for a uniform law, 1 where one word is certain.
    """
    return 1 - entropy / float(np.log(words))


def falling_threshold(
    lambdas: Float[Values, "*S"], positions: Float[Values, " N"], mean_length: float | Values
) -> Float[Values, "*S N"]:
    """Returns `0.9 λ + 0.1 exp(−4 t / N)` for every λ and every token's 0-based position
    t (Din et al. 2023, section 6): early tokens must be surer.

    Args:
      lambdas: λ.
      positions: t.
      mean_length: N, in tokens.
    """
    exponent = -4.0 * positions / mean_length
    decay = jnp.exp(exponent) if isinstance(exponent, jax.Array) else np.exp(exponent)
    return 0.9 * lambdas[..., None] + 0.1 * decay
