"""Passes over whole sentences: which of their tokens are read, and what a killed pass goes on from."""

import functools
from collections.abc import Collection
from typing import Any

import jax
import numpy as np
from absl import flags

from experiments import cli, common
from jmat.capture.snapshots import Snapshots, discard
from jmat.capture.stream import all_positions, packed_batches, sampled_positions
from jmat.checkpoint import parameters
from jmat.data.batches import Batch
from jmat.data.examples import Split, mask_positions
from jmat.data.sampling import skipped_tokens
from jmat.runtime import hosts
from jmat.runtime.digests import model_hash

flags.DEFINE_float(
    "snapshot_every",
    300,
    "Seconds between two snapshots of a pass over the text, in OUT/checkpoints. A run that was killed goes on from the "
    "last one when it is started again with the same flags; 0 neither writes nor reads any.",
    lower_bound=0,
)
flags.register_validator("snapshot_every", np.isfinite, message="Expected seconds, or 0.")

FLAGS = flags.FLAGS
SNAPSHOTS = "checkpoints"  # the folder, in the output folder
TOKENS = ("sampled", "all")


def as_read(job: common.Job, split: Split, tokens: str) -> Split:
    """The sentences as the model sees them: a masked model reads `sampled` positions under the mask, `all` unmasked."""
    return mask_positions(split, job.mask_token) if tokens == "sampled" else split


def tokens_read(job: common.Job, split: Split, tokens: str) -> np.ndarray:
    """Returns which tokens of a split are read.

    These are the `sampled` positions, or `all` but those that --protocol=jmat leaves out.
    """
    if tokens == "sampled":
        return sampled_positions(split)
    if FLAGS.protocol != "jmat":
        return all_positions(split)
    causal = job.model.config.causal
    first = int(causal) if FLAGS.skip_first is None else FLAGS.skip_first
    special = FLAGS.skip_special
    if job.tokenizer is None and (special or (special is None and not causal)):
        raise ValueError(f"{FLAGS.model} has no tokenizer that knows special tokens; give --noskip_special.")
    skipped: Collection[int] = ()
    if job.tokenizer is not None:
        skipped = skipped_tokens(job.tokenizer, masked=not causal, skip_special=special)
    return all_positions(split, skip_first=first, skip_tokens=sorted(skipped))


def packed(job: common.Job, split: Split, tokens: str) -> list[Batch]:
    """Batches of the sentences (`as_read`), in which the tokens to read are marked."""
    read = tokens_read(job, split, tokens)
    size = common.tokens_per_batch()
    return packed_batches(split, read, tokens_per_batch=size, row_multiple=jax.local_device_count())


def snapshots(job: common.Job, name: str = "fit", model: Any = None) -> Snapshots | None:
    """Returns the snapshot settings of one pass over the text, by default with the model of --model.

    None with `--snapshot_every=0`. Every host has its own snapshots, and goes through its share of the text
    independently. All are deleted when the run has ended well.
    """
    if not FLAGS.snapshot_every:
        return None
    checkpoints = job.path(SNAPSHOTS)
    cli.when_all_is_done(functools.partial(discard, checkpoints))
    owner: dict[str, Any] = {
        "hash of the model's weights": job.model_hash if model is None else model_hash(parameters(model))
    }
    if hosts.count() > 1:
        name = f"{name}-{jax.process_index()}"
        owner["number of processes"] = hosts.count()
    return Snapshots(checkpoints / name, FLAGS.snapshot_every, owner, cli.say)
