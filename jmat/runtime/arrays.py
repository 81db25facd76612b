"""Turns what a user gives into an array of the host, unless it is on a device already."""

import jax
import numpy as np


def on_host(values: object) -> jax.Array | np.ndarray:
    """Returns what is no `jax.Array` as a numpy array.

    Raises:
      ValueError: it makes no array, such as lists of several lengths.
    """
    if isinstance(values, jax.Array):
        return values
    try:
        return np.asarray(values)
    # the last is PyTorch's, of a tensor that has a gradient
    except (ValueError, TypeError, RuntimeError):
        raise ValueError(
            f"expected numbers in rows of one length; got a {type(values).__name__} that makes no "
            "array: pad its rows, or give texts."
        ) from None
