"""Defines the flag of experiments whose pass over the text goes on where it was killed."""

import numpy as np
from absl import flags

flags.DEFINE_float(
    "snapshot_every",
    300,
    "Seconds between two snapshots of a pass over the text, in OUT/checkpoints. A run that was "
    "killed goes on from the last one when it is started again with the same flags; 0 neither "
    "writes nor reads any.",
    lower_bound=0,
)
flags.register_validator("snapshot_every", np.isfinite, message="Expected seconds, or 0.")
