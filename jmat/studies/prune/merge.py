"""Folding what stands in for removed blocks into the feed-forward part before them: an
ordinary, smaller checkpoint.

**What cannot be folded.** Replacing blocks s .. e − 1 by `h ↦ h W` multiplies the
*whole* stream h_s by W. That stream is a sum, `h_s = h_0 + Σ attn_i + Σ ffn_i`, so W
would have to go into the embedding and into every output projection before block s. But
the blocks before s read the same sum, through norms that do not commute with W (an
RMSNorm commutes with rotations only, a LayerNorm with fewer), and a checkpoint has
nothing between h_s and block e that could hold W. So `h W` folds exactly for W = I
alone, which is deletion.

**What can.** In a pre-norm block, sequential or parallel, the last thing that happens
is

    h_s = r + a W_down + b,    a = activation(up(x)) [F], or activation(gate(x)) · up(x)

where neither r (the stream that the feed-forward output is added to) nor a depends on
W_down, and nothing in the block reads the sum. Anything linear in a can therefore be
added to h_s through W_down:

    h_e ≈ h_s + a C + c = r + a (W_down + C) + (b + c)

The `≈` is the fit, least squares of the removed blocks' contribution h_e − h_s on a, at
the same position; attention of the removed blocks to other positions is what it cannot
express. The `=` is algebra: the merged checkpoint is the model with the map, up to
rounding. Two choices of C:
- `hidden`: any C [F, D];
- `output`: `h_e ≈ h_s + f M + c` with f = a W_down + b, the feed-forward output, and M
  [D, D]; then C = W_down M, and the bias grows by b M + c. Fewer parameters, for when
  examples are few.

**Refused.** Post-norm blocks: h_s = norm(x + a W_down + b), so that the norm reads the
sum, and what is added to W_down comes out changed. A stretch that starts at block 0: no
feed-forward part stands before it. An intercept, where the checkpoint's feed-forward
parts have no bias to hold it.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from numpy import ndarray

from jmat.checkpoint import parameters, with_parameters
from jmat.maps.least_squares import lstsq
from jmat.maps.solution import Solution
from jmat.maps.types import Linear
from jmat.models.config import ModelConfig
from jmat.models.family import Transformer
from jmat.models.layers import FeedForward
from jmat.models.stack import model_dtype
from jmat.studies.prune.stand_ins import Stretch

FEATURES = ("hidden", "output")


def check_mergeable(config: ModelConfig, *, intercept: bool = False) -> None:
    """Raises ValueError, with the reason, for a model whose wiring does not let a map
    be folded.
    """
    if not config.pre_norm:
        raise ValueError(
            f"method merge does not hold for this {config.family} model: it is post-norm, so a "
            "norm reads the sum that the feed-forward part is added to, and nothing added to its "
            "projection reaches the stream unchanged; choose delete, map or distil."
        )
    if intercept and not config.ffn_bias:
        raise ValueError(
            "method merge with an intercept needs a feed-forward bias to hold it, and this "
            f"{config.family} model has none; leave --intercept out."
        )


def features_site(start: int, features: str) -> str:
    """Returns the site from which the map of a stretch that begins at block `start` is
    fitted.
    """
    return f"block.{start - 1}.ffn" + (".in" if features == "hidden" else "")


def fit_merge(
    ffn: FeedForward,
    read: Float[ndarray, "N D"],
    contribution: Float[ndarray, "N D"],
    *,
    features: str = "hidden",
    intercept: bool = False,
    ridge: float = 0.0,
) -> tuple[Linear, Solution]:
    """Fits C and c of `h_e ≈ h_s + a C + c` by least squares.

    Args:
      ffn: the feed-forward part before the stretch.
      read: what `features_site` names: the part's input (`hidden`) or output
        (`output`), example by example.
      contribution: h_e − h_s at the same examples.
      features: `hidden` or `output`.
      intercept: fit c.
      ridge: penalty on C (on M for `output`), on the scale of a sum over examples.
    """
    if features == "hidden":
        hidden = _hidden(ffn, jnp.asarray(read, ffn.down.kernel[...].dtype))
        solution = lstsq(
            np.asarray(hidden, np.float32), contribution, intercept=intercept, ridge=ridge
        )
        return Linear(solution.weights, solution.bias), solution
    solution = lstsq(read, contribution, intercept=intercept, ridge=ridge)
    with jax.default_matmul_precision("highest"):
        C = ffn.down.kernel[...].astype(jnp.float32) @ solution.weights
        if ffn.down.bias is None:
            return Linear(C, solution.bias), solution
        c = ffn.down.bias[...].astype(jnp.float32) @ solution.weights
    return Linear(C, c if solution.bias is None else c + solution.bias), solution


def fold(model: Transformer, maps: Mapping[Stretch, Linear]) -> Transformer:
    """Returns the model whose feed-forward parts before the stretches write what stands
    in for them, too.

    The stretches themselves are still there: `jmat.studies.prune.surgery.remove_blocks`
    takes them out.

    Raises:
      ValueError: a wiring for which that does not hold; a stretch without a block
        before it; a bias without place.
    """
    arrays = dict(parameters(model))
    dtype = model_dtype(model)
    for (start, _), linear in maps.items():
        check_mergeable(model.config, intercept=linear.bias is not None)
        if start == 0:
            raise ValueError("block 0 cannot be merged: there is no feed-forward part before it.")
        down = f"blocks.{start - 1}.ffn.down"
        # Added in float32, rounded once.
        for name, extra in (("kernel", linear.W), ("bias", linear.bias)):
            if extra is not None:
                whole = arrays[f"{down}.{name}"].astype(jnp.float32) + jnp.asarray(
                    extra, jnp.float32
                )
                arrays[f"{down}.{name}"] = whole.astype(dtype)
    return with_parameters(model, arrays)


@jax.jit
def _hidden(ffn: FeedForward, x: jax.Array) -> jax.Array:
    return ffn.hidden(x)
