"""Training a language model: losses, optimizer, the jitted step, evaluation. Pure
functions over plain pytrees.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Shaped

from jmat.data.packing import TrainingBatch, mask_tokens
from jmat.forward import logits, run
from jmat.metrics.predictions import Predictions
from jmat.models.family import Transformer
from jmat.runtime.annotations import Leaf, PyTree
from jmat.runtime.mesh import shard_batch
from jmat.training.penalties import Regularizer

# (model, batch, key) → (summed loss in nats, number of predictions, number of correct predictions).
Loss = Callable[[PyTree, TrainingBatch, Shaped[Array, ""]], tuple[Array, Array, Array]]

NO_REGULARIZER = Regularizer()
OPTIMIZERS = ("adamw", "muon")
# of Adam's second moment: a shorter memory than the usual 0.999 suits some thousand steps
_B2 = 0.98


class TrainState(NamedTuple):
    """Holds all that training goes on from, besides the data and the seed."""

    model: Leaf[Transformer]
    opt_state: optax.OptState
    step: Int[Array, ""]


def cross_entropy(
    scores: Float[Array, "*batch V"], targets: Int[Array, "*batch"], weights: Float[Array, "*batch"]
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Returns the sum of −ln p(target), of the weights, and of the weights where the
    target scores highest; in float32.
    """
    scores = scores.astype(jnp.float32)
    picked = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
    # Not log_softmax, which takes a third longer with its gradient on a CPU.
    nats = jax.nn.logsumexp(scores, axis=-1) - picked
    correct = (scores.argmax(-1) == targets).astype(jnp.float32)
    return (nats * weights).sum(), weights.sum(), (correct * weights).sum()


def causal_lm_loss(
    model: Transformer,
    batch: TrainingBatch,
    key: Shaped[Array, ""],
    *,
    regularizer: Regularizer = NO_REGULARIZER,
) -> tuple[Array, Array, Array]:
    """Returns the loss where each token predicts the next one of its sentence; the key
    is not used.
    """
    del key
    x, penalty = _states(model, batch, batch.tokens, regularizer)
    targets = jnp.asarray(batch.targets)
    total, count, correct = cross_entropy(
        logits(model, x), jnp.maximum(targets, 0), (targets >= 0).astype(jnp.float32)
    )
    return total + penalty * count, count, correct


def masked_lm_loss(mask_id: int, *, regularizer: Regularizer = NO_REGULARIZER) -> Loss:
    """Returns the loss at masked tokens; the head runs at those places only."""

    def loss(
        model: Transformer, batch: TrainingBatch, key: Shaped[Array, ""]
    ) -> tuple[Array, Array, Array]:
        masked = mask_tokens(batch, key, mask_id=mask_id, vocab_size=model.config.vocab_size)
        x, penalty = _states(model, batch, masked.tokens, regularizer)
        x = jnp.take_along_axis(x, masked.places[..., None], axis=1)
        total, count, correct = cross_entropy(logits(model, x), masked.targets, masked.weights)
        return total + penalty * count, count, correct

    return loss


def _states(
    model: Transformer,
    batch: TrainingBatch,
    tokens: Int[Array | np.ndarray, "B T"],
    regularizer: Regularizer,
) -> tuple[Array, Array]:
    """Returns the final stream, and the penalty on the way to it."""
    keep = regularizer.sites(model.config.layers)
    x, acts = run(model, tokens, segments=batch.segments, positions=batch.positions, keep=keep)
    return x, regularizer(acts, jnp.asarray(batch.segments) > 0)


def make_optimizer(
    *,
    learning_rate: float,
    warmup_steps: int,
    steps: int,
    kind: str = "adamw",
    weight_decay: float = 0.1,
    clip: float = 1.0,
) -> optax.GradientTransformation:
    """Returns an optimizer: linear warm-up, cosine decay to 10 %, gradients clipped by
    global norm.

    `adamw` decays matrices only. `muon` (Jordan 2024) orthogonalizes the momentum of
    the blocks' matrices, its updates scaled to the size of AdamW's (Liu et al. 2025,
    arXiv 2502.16982); Adam, with Nesterov momentum, updates the rest.

    Raises ValueError for another kind, and where there are no more steps than warm-up
    steps.
    """
    if not 0 <= warmup_steps < steps:
        raise ValueError(
            f"{warmup_steps} warm-up steps of {steps} steps: expected fewer warm-up steps than "
            "steps."
        )
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, warmup_steps, steps, 0.1 * learning_rate
    )
    if kind == "adamw":
        optimizer = optax.adamw(
            schedule, b1=0.9, b2=_B2, weight_decay=weight_decay, mask=_is_matrix
        )
    elif kind == "muon":
        optimizer = optax.contrib.muon(
            schedule,
            weight_decay=weight_decay,
            adam_b2=_B2,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=_block_matrices,
        )
    else:
        raise ValueError(f"optimizer {kind!r} is unknown; choose from {', '.join(OPTIMIZERS)}.")
    return optax.chain(optax.clip_by_global_norm(clip), optimizer)


def _is_matrix(params: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def _block_matrices(params: PyTree) -> PyTree:
    """Returns the matrices that muon orthogonalizes, [in, out]; None for all others."""

    def dimensions(
        path: tuple[object, ...], leaf: Array
    ) -> optax.contrib.MuonDimensionNumbers | None:
        in_block = path[0] == jax.tree_util.GetAttrKey("blocks")
        return optax.contrib.MuonDimensionNumbers() if in_block and leaf.ndim == 2 else None

    return jax.tree_util.tree_map_with_path(dimensions, params)


def init_state(model: PyTree, optimizer: optax.GradientTransformation) -> TrainState:
    """Returns the state before the first step."""
    return TrainState(model, optimizer.init(model), jnp.int32(0))


def make_train_step(
    loss: Loss, optimizer: optax.GradientTransformation, seed: int
) -> Callable[[TrainState, TrainingBatch], tuple[TrainState, Array]]:
    """Returns the jitted step: state, batch → next state (the old one is given up), and
    the mean loss in nats.

    Randomness depends on (seed, step) alone, so a resumed run repeats it.
    """

    def mean_loss(model: PyTree, batch: TrainingBatch, key: Shaped[Array, ""]) -> Array:
        total, count, _ = loss(model, batch, key)
        return total / jnp.maximum(count, 1)

    def step(state: TrainState, batch: TrainingBatch) -> tuple[TrainState, Array]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        value, gradient = jax.value_and_grad(mean_loss)(state.model, batch, key)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.model)
        model = optax.apply_updates(state.model, updates)
        return TrainState(model, opt_state, state.step + 1), value

    return jax.jit(step, donate_argnums=0)


def make_evaluate(
    loss: Loss, batch: TrainingBatch, batch_size: int, mesh: Mesh, seed: int = 0
) -> Callable[[PyTree], dict[str, float]]:
    """Returns a function model → {"loss", "accuracy", "count"} over all predictions of
    the batch, `batch_size` rows at a time.

    The loss is the mean in nats. The masks of a masked model are the same at each call.
    Where none of the tokens is predicted, `count` is 0, and loss and accuracy are NaN.
    """
    compiled = jax.jit(loss)
    padded = batch.padded_to(batch_size)
    slices = [
        shard_batch(mesh, padded.take(np.arange(at, at + batch_size)))
        for at in range(0, padded.rows, batch_size)
    ]

    def evaluate(model: PyTree) -> dict[str, float]:
        key = jax.random.key(seed)
        sums = [compiled(model, part, jax.random.fold_in(key, i)) for i, part in enumerate(slices)]
        total, count, correct = np.sum(
            np.asarray(jax.device_get(sums), np.float64), axis=0
        ).tolist()
        mean = (total / count, correct / count) if count else (float("nan"), float("nan"))
        return {"loss": mean[0], "accuracy": mean[1], "count": count}

    return evaluate


def predictions(model: Transformer, batch: TrainingBatch) -> Predictions:
    """Collects what a model predicts at the batch's targets, to tell whether that
    depends on the text.
    """
    x, _ = run(model, batch.tokens, segments=batch.segments, positions=batch.positions)
    found = Predictions()
    found.add(logits(model, x), np.asarray(batch.targets) >= 0)
    return found


def batches(
    epoch_rows: Callable[[int], TrainingBatch], batch_size: int, first_step: int, steps: int
) -> Iterator[tuple[int, TrainingBatch]]:
    """Yields steps `first_step` .. `steps − 1` with their batches; each epoch's last
    few rows that fill no batch are left out.

    `epoch_rows(epoch)` packs one epoch; all have equally many rows, so that a step's
    batch follows from its number. Raises ValueError where an epoch does not fill one
    batch.
    """
    per_epoch, packed, held = 0, None, -1
    for step in range(first_step, steps):
        if packed is None:
            packed, held = epoch_rows(0), 0
            per_epoch = packed.rows // batch_size
            if per_epoch == 0:
                raise ValueError(
                    f"{packed.rows} rows do not fill a batch of {batch_size}: choose a smaller "
                    "batch."
                )
        epoch, index = divmod(step, per_epoch)
        if epoch != held:
            packed, held = epoch_rows(epoch), epoch
        yield step, packed.take(np.arange(index * batch_size, (index + 1) * batch_size))
