"""Activations at the sampled positions, for any number of sites, in one pass over the model."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Array, Float
from numpy import ndarray

from jmat.capture.reading import reading_batches
from jmat.capture.sweep import sweep
from jmat.data.batches import Batch
from jmat.data.examples import Examples, Split, check_tokens
from jmat.forward import run
from jmat.models.config import ModelConfig
from jmat.models.family import Transformer
from jmat.models.sites import Site, check_names
from jmat.runtime.mesh import local_mesh, place, replicate, usual_batch


def capture(
    model: Transformer,
    split: Split,
    keep: Sequence[str],
    *,
    sites: Mapping[str, Site] | None = None,
    stop: int | None = None,
    tokens_per_batch: int | None = None,
    devices: Sequence[jax.Device] | None = None,
    progress: str | None = None,
) -> dict[str, Float[ndarray, "N W"]]:
    """Reads sites at every example's position.

    Args:
      model: as `jmat.load` returns it.
      split: sentences and the positions at which to read them, one example a position. A masked
        model reads them masked: see `jmat.data.examples.mask_positions`.
      keep: names of sites; W is D for all but `logits` (V) and single heads (K).
      sites: what stands in for parts of the model, as for `jmat.run`.
      stop: the block to stop before, where nothing behind it is read; all blocks by default.
      tokens_per_batch: padded tokens in one forward pass; default: `jmat.runtime.mesh.usual_batch`.
      devices: default, all local ones.
      progress: label of the progress bar; by default none is shown.

    Returns:
      Site → values in the order of the examples, float32, on the host; on every host all of them.

    Raises:
      ValueError: a token id outside the embedding, a sentence longer than the positions, NaN or infinity in what was
        read.
    """
    check_tokens(split.tokens, model.config.vocab_size)
    check_names(keep, model.config, replace=False)
    mesh = local_mesh(devices)
    model, sites = place(model, mesh), replicate(mesh, dict(sites or {}))
    size = tokens_per_batch or usual_batch(devices)
    # What stands in for attention might look at all tokens of a row: each sentence has its own.
    plan = reading_batches(model.config, split, size, row_multiple=mesh.size, alone=bool(sites))

    def read(batch: Batch) -> dict[str, Array]:
        return run(model, batch.tokens, keep=tuple(keep), sites=sites, stop=stop, read_at=batch.read_at, **batch.where)[
            1
        ]

    values = sweep(plan, read, mesh=mesh, progress=progress)
    values = {name: values[name] for name in keep}  # in the order asked for, not in that of the alphabet
    check_finite(values)
    return values


def check_examples(examples: Examples, config: ModelConfig) -> None:
    """Raises ValueError for tokens that the model does not have and for sentences longer than its positions."""
    for name, split in (("fit", examples.fit), ("eval", examples.eval)):
        check_tokens(split.tokens, config.vocab_size)
        longest = int(split.lengths.max(initial=0))
        if longest > config.num_positions:
            raise ValueError(
                f"the longest {name} sentence has {longest} tokens; the model has positions for "
                f"{config.num_positions}: cut the sentences."
            )


def check_finite(values: dict[str, Float[ndarray, "N W"]]) -> None:
    """Raises ValueError naming the first site, in the order captured, that holds NaN or infinity."""
    for name, value in values.items():
        with np.errstate(all="ignore"):
            sums = value @ np.ones(value.shape[-1], np.float32)
        if np.isfinite(sums).all():  # NaN and infinity stay in a sum, which is faster than to look at each number
            continue
        bad = ~np.isfinite(value).all(-1)
        if bad.any():
            raise ValueError(
                f"site {name!r} is not finite at {bad.sum()} of {len(bad)} examples (the first is example "
                f"{int(bad.argmax())}); the weights are damaged, or the dtype overflows: try --dtype=float32."
            )
