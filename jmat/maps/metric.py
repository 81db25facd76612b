"""The head's metric: how much a step of the final stream changes the logits, to first
order.

`Γ = diag(γ) W_Uᵀ W_U diag(γ) + εI`, with γ the scale of the final norm and W_U the
unembedding. The head of a masked model is no linear map: its Jacobian at the mean of
the final stream stands in for `W_U diag(γ)`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy import ndarray

from jmat.forward import logits
from jmat.models.family import Transformer
from jmat.models.layers import Head, LayerNorm, NoNorm, RMSNorm, word_kernel
from jmat.runtime.precision import float64

_EPSILON = 1e-6  # of the mean eigenvalue


@dataclasses.dataclass(frozen=True, eq=False)
class Metric:
    """Holds a metric of the final stream, float64.

    Attributes:
      root: Γ^½, symmetric.
      inverse_root: Γ^−½.
    """

    root: Float[Array, "D D"]
    inverse_root: Float[Array, "D D"]


@float64()
def head_metric(model: Transformer, mean: Float[Array | ndarray, " D"]) -> Metric:
    """Returns the metric of a model's head.

    Args:
      model: has a head.
      mean: of the final stream, at which heads that are no linear map are
        differentiated.
    """
    # on the host: the model may lie on several devices
    J = np.asarray(_jacobian(model, mean), np.float64)
    return metric_of(J @ J.T)


@float64()
def metric_of(gamma: Float[Array | ndarray, "D D"]) -> Metric:
    """Returns the metric of a matrix Γ without ε, which is added: 1e-6 of its mean
    eigenvalue.
    """
    return Metric(*_metric_roots(jnp.asarray(gamma, jnp.float64)))


@jax.jit
def _metric_roots(gamma: Array) -> tuple[Array, Array]:
    D = len(gamma)
    values, vectors = jnp.linalg.eigh(gamma + _EPSILON * jnp.trace(gamma) / D * jnp.eye(D))
    root = jnp.sqrt(values)
    return (vectors * root) @ vectors.T, (vectors / root) @ vectors.T


def _jacobian(model: Transformer, mean: Float[Array | ndarray, " D"]) -> Float[Array, "D V"]:
    """Returns the derivative of the logits by the final stream, transposed."""
    norm, head = model.final_norm, model.head
    if isinstance(head, Head) and isinstance(norm, LayerNorm | RMSNorm | NoNorm):
        kernel = word_kernel(model.embed.tokens.table[...], head.out, None)
        kernel = kernel if head.project is None else head.project.kernel[...] @ kernel
        return kernel if (scale := _scale(norm)) is None else scale[:, None] * kernel
    with float64(False):
        at = jnp.asarray(np.asarray(mean, np.float32))
        steps = jnp.eye(len(at), dtype=jnp.float32)
        return jax.vmap(lambda step: jax.jvp(lambda x: logits(model, x), (at,), (step,))[1])(steps)


def _scale(norm: LayerNorm | RMSNorm | NoNorm) -> Float[Array, " D"] | None:
    """Returns what a norm multiplies by; None where it does not."""
    if isinstance(norm, RMSNorm):
        return norm.scale[...].astype(jnp.float32) + norm.offset
    return None if isinstance(norm, NoNorm) or norm.scale is None else norm.scale[...]
