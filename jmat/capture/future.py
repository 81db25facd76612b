"""Sums of a site over a position and all later ones of its text."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from numpy import ndarray

from jmat.capture.activations import check_finite
from jmat.capture.sweep import sweep
from jmat.data.batches import Batch, padded_batches
from jmat.data.examples import Split, check_tokens
from jmat.forward import run
from jmat.models.family import Transformer
from jmat.models.site_names import site_of
from jmat.models.sites import check_names, gather, width
from jmat.runtime.mesh import local_mesh, place, usual_batch


def future_sums(
    model: Transformer,
    split: Split,
    site: str,
    *,
    tokens_per_batch: int | None = None,
    progress: str | None = None,
) -> Float[ndarray, "N W"]:
    """Returns `Σ_{t' ≥ t} y_{t'}` of a site at every example t of a split, float32.

    Args:
      model: as `jmat.load` returns it.
      split: sentences, which are run whole, and positions.
      site: with one vector at a token.
      tokens_per_batch: padded tokens in one forward pass; default:
        `jmat.runtime.mesh.usual_batch`.
      progress: label of the progress bar; by default none is shown.

    Raises:
      ValueError: as `jmat.capture`.
    """
    site = site_of(site, model.config)
    check_names([site], model.config, replace=False)
    width(site, model.config)
    check_tokens(split.tokens, model.config.vocab_size)
    mesh = local_mesh()
    model = place(model, mesh)
    plan = padded_batches(
        split,
        cut_after_position=False,
        max_length=model.config.num_positions,
        tokens_per_batch=tokens_per_batch or usual_batch(),
        row_multiple=mesh.size,
    )

    def read(batch: Batch) -> dict[str, Array]:
        _, kept = run(model, batch.tokens, keep=site, **batch.where)
        return {site: gather(_from_here_on(kept[site], batch.segments), batch.read_at)}

    values = sweep(plan, read, mesh=mesh, progress=progress)
    check_finite(values)
    return values[site]


@jax.jit
def _from_here_on(y: Float[Array, "B T W"], segments: Int[Array, "B T"]) -> Float[Array, "B T W"]:
    """Returns the sums over each position and those behind it; padding counts as 0."""
    real = jnp.where(segments[:, :, None] > 0, y.astype(jnp.float32), 0)
    return jnp.cumsum(real[:, ::-1], axis=1)[:, ::-1]
