"""float64 where sums of products are formed and solved; everything else keeps the
model's precision.

A model runs in float32 or less. Second moments, what is factorised or read off from
them, and sums over long texts are float64: a product of activations with themselves
squares their condition number, which float32 does not have the digits for.

JAX knows float64 only where `jax_enable_x64` is set. Set for a whole process it would
also widen every Python number, and so change and slow down the model's own programs. It
is therefore set around single functions, here and nowhere else:

    @float64()
    def merge(first, second): …
"""

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp


@contextlib.contextmanager
def float64(wanted: bool = True) -> Iterator[None]:
    """Allows float64 arrays inside a `with`, or in the function that it decorates; in
    this thread alone.

    With `wanted=False` they become float32 inside, as is the default of JAX.
    """
    with jax.enable_x64(wanted):
        yield


def allows_float64() -> bool:
    """Returns whether float64 arrays can be made, in this thread."""
    return jnp.result_type(float) == jnp.float64
