"""Checks the settings of `experiments.pretrain` before it trains, and its losses and
weights meanwhile.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jmat.runtime.annotations import Fields
from jmat.training.train import TrainState

MOST_STEPS = 2**31 - 1  # that the state can count


def check_sizes(settings: Fields) -> None:
    """Raises ValueError for sizes and steps that do not go together, before anything is
    read.
    """
    if settings["width"] % settings["heads"]:
        raise ValueError(
            f"--width={settings['width']} is not a multiple of --heads={settings['heads']}."
        )
    if settings["arch"] == "bert" and settings["length"] < 3:
        raise ValueError(
            f"--length={settings['length']} has no room for a token between [CLS] and [SEP]: give "
            "3 at least."
        )
    if 0 < settings["steps"] <= settings["warmup_steps"]:
        raise ValueError(
            f"--warmup_steps={settings['warmup_steps']} of --steps={settings['steps']}: the "
            "learning rate would never be reached; give more steps, or fewer of warm-up."
        )


def step_count(settings: Fields, rows: int) -> int:
    """Returns the number of steps. Raises ValueError for a text too small for one step,
    or for the warm-up.
    """
    batch, warmup = settings["batch_size"], settings["warmup_steps"]
    if rows < batch:
        raise ValueError(
            f"the text fills {rows} rows of {settings['length']} tokens, and a batch is {batch} "
            f"rows: give more text, or --batch_size={rows} or less."
        )
    per_epoch = rows // batch
    count = settings["steps"] or settings["epochs"] * per_epoch
    if not 1 <= count <= MOST_STEPS:
        raise ValueError(
            f"--epochs={settings['epochs']:g} of {per_epoch} steps each are {count:.3g} steps; "
            f"expected 1 to {MOST_STEPS:,}."
        )
    if int(count) <= warmup:
        raise ValueError(
            f"{int(count)} steps are no more than --warmup_steps={warmup}: the learning rate would "
            "never be reached; give more text or more --epochs, or fewer steps of warm-up."
        )
    return int(count)


def check_loss(step: int, loss: float | jax.Array) -> None:
    """Raises ValueError for a loss that is not finite, since no later one would be."""
    if not np.isfinite(float(loss)):
        raise ValueError(
            f"the loss of step {step} is {float(loss)}: training has diverged. Start anew with a "
            "lower --learning_rate; checkpoints of earlier steps are kept."
        )


def check_weights(state: TrainState) -> None:
    """Raises ValueError for weights that are not finite, before they are saved as a
    checkpoint.
    """
    if not all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(state.model)):
        raise ValueError(
            f"step {int(state.step)} has left weights that are not finite: training has diverged. "
            "Start anew with a lower --learning_rate; checkpoints of earlier steps are kept."
        )
