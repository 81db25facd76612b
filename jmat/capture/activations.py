"""Activations at the sampled positions, for any number of sites, in one pass over the model."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float
from numpy import ndarray

from jmat.data.batches import Batch, Padded, batches, examples_of, packed, padding_mask
from jmat.data.examples import Examples, Split, check_tokens, mask_positions
from jmat.forward import run
from jmat.models.config import ModelConfig
from jmat.models.sites import Site, check_names, width
from jmat.runtime import hosts
from jmat.runtime.mesh import data_mesh, place, replicate, shard_batch, usual_batch
from jmat.runtime.progress import track

_IN_FLIGHT = 2  # batches whose results have not come back yet: the host prepares while the device computes


def capture(
    model: Any,
    split: Split,
    keep: Sequence[str],
    *,
    sites: Mapping[str, Site] | None = None,
    stop: int | None = None,
    mask_token: int | None = None,
    tokens_per_batch: int | None = None,
    devices: Sequence[jax.Device] | None = None,
    progress: str | None = None,
) -> dict[str, Float[ndarray, "N W"]]:
    """Reads sites at every example's position; batches are shared out among hosts, each sharded over the devices.

    Args:
      model: as `jmat.load` gives it.
      split: sentences and the positions at which to read them (one example a position).
      keep: names of sites; W is D for all but `logits` (V) and single heads (K).
      sites: what stands in for parts of the model, as for `jmat.run`.
      stop: the block to stop before, where nothing behind it is read; all blocks by default.
      mask_token: for masked models, the id that stands at the position when it is read.
      tokens_per_batch: padded tokens in one forward pass; default: `jmat.runtime.mesh.usual_batch`.
      devices: default, all local ones.
      progress: what the progress bar says; None shows none.

    Returns:
      Site → values in the order of the examples, float32, on the host; on every host all of them.

    Raises:
      ValueError: a token id outside the embedding, a sentence longer than the positions, NaN or infinity in what was
        read.
    """
    check_tokens(split.tokens, model.config.vocab_size)
    check_names(keep, model.config, replace=False)
    mesh = data_mesh(devices or jax.local_devices())
    model, sites = place(mesh, model), replicate(mesh, dict(sites or {}))
    size = tokens_per_batch or usual_batch(devices)
    how: dict[str, Any] = {"tokens_per_batch": size, "row_multiple": mesh.size}
    if sites:  # what stands in for attention might look at all tokens of a row: each sentence has its own
        plan = [_alone(batch) for batch in reading_batches(model.config, split, mask_token, **how)]
    else:
        plan = packed_readings(model.config, split, mask_token, **how)
    plan = hosts.share(plan)
    values = {name: np.empty((split.num_examples, width(name, model.config)), np.float32) for name in keep}
    pending: collections.deque[tuple[ndarray, dict[str, jax.Array]]] = collections.deque()

    def fetch() -> None:
        examples, acts = pending.popleft()
        real = examples >= 0
        for name, value in acts.items():
            values[name][examples[real]] = np.asarray(value, np.float32)[real]

    for batch in track(plan, progress):
        fields = (batch.tokens, batch.segments, batch.positions, batch.read_at)
        tokens, segments, positions, read_at = shard_batch(mesh, fields)
        where: dict[str, Any] = {"segments": segments, "positions": positions, "read_at": read_at}
        acts = run(model, tokens, keep=tuple(keep), sites=sites, stop=stop, **where)[1]
        pending.append((np.asarray(batch.examples), acts))
        if len(pending) > _IN_FLIGHT:
            fetch()
    while pending:
        fetch()
    for site_values in values.values():
        hosts.fill_in(site_values, examples_of(plan))
    check_finite(values)
    return values


def reading_batches(
    config: ModelConfig, split: Split, mask_token: int | None, tokens_per_batch: int, *, row_multiple: int = 1
) -> list[Padded]:
    """Batches that hold what the model must see to be read at the examples' positions, a sentence a row.

    A causal model never looks past the position that is read: the rest of the sentence is cut.
    """
    split, how = _seen(config, split, mask_token)
    return list(batches(split, tokens_per_batch=tokens_per_batch, row_multiple=row_multiple, **how))


def packed_readings(
    config: ModelConfig, split: Split, mask_token: int | None, tokens_per_batch: int, *, row_multiple: int = 1
) -> list[Batch]:
    """Like `reading_batches`, with several sentences a row."""
    split, how = _seen(config, split, mask_token)
    return packed(split, tokens_per_batch=tokens_per_batch, row_multiple=row_multiple, **how)


def _seen(config: ModelConfig, split: Split, mask_token: int | None) -> tuple[Split, dict[str, Any]]:
    split = split if mask_token is None else mask_positions(split, mask_token)
    return split, {"cut_after_position": config.causal, "max_length": config.num_positions}


def _alone(batch: Padded) -> Batch:
    """Rows that hold one sentence each."""
    real = padding_mask(batch)
    positions = np.where(real, np.arange(real.shape[1], dtype=np.int32), np.int32(0))
    return Batch(batch.tokens, real.astype(np.int32), positions, batch.positions, batch.examples)


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
        bad = ~np.isfinite(value).all(-1)
        if bad.any():
            raise ValueError(
                f"site {name!r} is not finite at {bad.sum()} of {len(bad)} examples (the first is example "
                f"{int(bad.argmax())}); the weights are damaged, or the dtype overflows: try --dtype=float32."
            )
