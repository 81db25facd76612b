"""Options of the compiler for programs that some version of XLA gets wrong."""

import functools

import jax
import jax.numpy as jnp

_WITHOUT_FUSED_SUMS = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}


@functools.cache
def batched_gradients() -> dict[str, str]:
    """Returns the options of `jax.jit` with which `jax.vmap` of a vector-Jacobian
    product is right.

    XLA of jaxlib 0.10 fuses sums on CPUs into calls of a library. Gradients of a norm,
    [b, B, T, D] with values [B, T, D] that `vmap` shares, are wrong there from some
    4,000 rows on (`tests/test_compiling.py`). Only single products are left to the
    library here. Other versions of XLA may not have this option: then there is none.
    """
    try:
        jax.jit(jnp.negative, compiler_options=_WITHOUT_FUSED_SUMS).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return {}
    return _WITHOUT_FUSED_SUMS
