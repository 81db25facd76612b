"""Distilling the maps of removed blocks: only they are trained, until the stream is
again what it was.

With h_l the stream of the whole model after layer l, and h'_l that of the model with
maps, the loss is the mean over the layers l after the first removed block, over tokens,
of

| `loss` | |
|---|---|
| `relative` | `‖h'_l − h_l‖² / ‖h_l‖²` |
| `plain` | `‖h'_l − h_l‖² / D`, the layer-wise mean squared error of Razzhigaev et al. 2024 |

plus `kl_weight` times KL(whole ‖ with maps), in nats a token. Streams inside a stretch
have no counterpart and are left out. Relative to each token's own stream, the few
tokens with a hundred times the norm do not decide everything.

A map is trained as `W + V · t ⊗ 1/s`, with s the root mean square of each coordinate of
its input, t that of its error at the start, and V = 0 at first: Adam's steps then mean
the same to all coordinates, outliers included.
"""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float

from jmat.capture.reading import text_batches
from jmat.capture.sweep import on_devices
from jmat.data.batches import Batch
from jmat.data.examples import Split
from jmat.data.text import whole_sentences
from jmat.forward import logits, run
from jmat.maps.types import Linear
from jmat.models.family import Transformer
from jmat.models.sites import stream_sites
from jmat.runtime.mesh import local_mesh, place, replicate
from jmat.studies.prune.stand_ins import Stretch, stand_ins

# (step, loss): called after the first step, the last one, and some in between.
Log = Callable[[int, float], None]
LOSSES = ("relative", "plain")
_DIVERGED = 100  # times the first batch's loss; other batches differ from it by much less


def distil(
    model: Transformer,
    split: Split,
    maps: Mapping[Stretch, Linear],
    *,
    steps: int = 300,
    learning_rate: float = 3e-3,
    tokens_per_batch: int = 1024,
    kl_weight: float = 0.0,
    loss: str = "relative",
    seed: int = 0,
    log: Log | None = None,
    log_every: int = 20,
) -> dict[Stretch, Linear]:
    """Trains the maps on the split's sentences, all their tokens.

    Blocks are differentiated one by one by the same programs, so that another choice of
    blocks compiles nothing new.

    Args:
      model: the whole model; its own weights stay as they are.
      split: sentences; of a masked model as it reads them
        (`jmat.data.examples.mask_positions`).
      maps: to start from, by stretch: those of least squares.
      steps: of Adam, the learning rate falling to 0 along a cosine.
      learning_rate: the first, in the units above.
      tokens_per_batch: padded tokens a step.
      kl_weight: of KL(whole ‖ with maps) in the loss.
      loss: on the streams, one of `LOSSES`.
      seed: order of the batches.
      log: takes (step, loss).
      log_every: steps between two calls of it.

    Raises:
      ValueError: no maps, no steps, or an unknown loss; the loss grows a hundredfold,
        or is not finite.
    """
    if not maps or steps < 1:
        raise ValueError(f"{len(maps)} maps and {steps} steps: there is nothing to distil.")
    if loss not in LOSSES:
        raise ValueError(f"loss={loss!r} is unknown; choose from {', '.join(LOSSES)}.")
    relative = loss == "relative"
    removed = [i for start, stop in maps for i in range(start, stop)]
    first, stops = min(removed), {stop for _, stop in maps}
    streams = stream_sites(model.config.layers)
    compared = [
        l for l in range(first + 1, model.config.layers + 1) if l - 1 not in removed or l in stops
    ]
    keep = tuple(streams[l] for l in compared)

    def loss_of(changes, trainees, batch, start, teacher, whole):
        trained = {
            stretch: _trained(trainees[stretch], change) for stretch, change in changes.items()
        }
        sites = stand_ins(model, "map", removed, trained)
        x, acts = run(model, start, start=first, sites=sites, keep=keep, **batch.where)
        real = batch.segments > 0
        errors = sum(
            _error(acts[name], teacher[name], real, relative=relative) for name in keep
        ) / len(keep)
        if whole is not None:
            errors += kl_weight * _kl(whole, logits(model, x), real)
        return _mean(errors, real)

    mesh = local_mesh()
    model, maps = place(model, mesh), replicate(mesh, dict(maps))
    plan = text_batches(
        model.config, whole_sentences(split), tokens_per_batch, row_multiple=mesh.size
    )
    trainees: dict[Stretch, _Trainee] = {}
    before: float | None = None
    for step, (_, batch) in enumerate(on_devices(_shuffled(plan, steps, seed), mesh=mesh)):
        x, acts = run(model, batch.tokens, keep=streams, **batch.where)
        if not trainees:
            ends = {stretch: tuple(acts[streams[l]] for l in stretch) for stretch in maps}
            # One after another, since each sums over the devices: see `jmat.runtime.mesh.settled`.
            for stretch, linear in maps.items():
                trainees[stretch] = jax.block_until_ready(
                    _prepare(linear, *ends[stretch], batch.segments > 0)
                )
        changes = {stretch: trainee.change for stretch, trainee in trainees.items()}
        whole = logits(model, x) if kl_weight else None
        start = acts[streams[first]]
        value, gradients = jax.value_and_grad(loss_of)(changes, trainees, batch, start, acts, whole)
        # they are summed over the devices: see `jmat.runtime.mesh.settled`
        jax.block_until_ready(gradients)
        now = float(value)
        before = now if before is None else before
        if not now <= _DIVERGED * max(before, 1e-3):  # NaN is not
            raise ValueError(
                f"distilling diverged: the loss was {before:.3g} at step 1 and is {now:.3g} at "
                f"step {step + 1}; lower the learning rate, {learning_rate:g}."
            )
        rate = np.float32(learning_rate * 0.5 * (1 + np.cos(np.pi * step / steps)))
        # One by one: the same program for any number of maps.
        trainees = {
            stretch: _step(trainees[stretch], gradients[stretch], rate) for stretch in trainees
        }
        if log is not None and (step in (0, steps - 1) or (step + 1) % log_every == 0):
            log(step + 1, now)
    return {stretch: _trained(trainee, trainee.change) for stretch, trainee in trainees.items()}


class _Trainee(NamedTuple):
    """Holds a map in training."""

    start: Linear  # what least squares gave
    scale: Linear  # t ⊗ 1/s, and t
    change: Linear  # V
    state: optax.OptState


_ADAM = optax.scale_by_adam(b2=0.99)


@jax.jit
def _prepare(
    linear: Linear,
    source: Float[Array, "B T D"],
    target: Float[Array, "B T D"],
    mask: Bool[Array, "B T"],
) -> _Trainee:
    weights = mask[..., None].astype(jnp.float32) / mask.sum().astype(jnp.float32)
    start = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), linear)

    def size(x):
        return jnp.sqrt(jnp.sum(weights * jnp.square(x), axis=(0, 1)))

    source, target = source.astype(jnp.float32), target.astype(jnp.float32)
    of_input, of_error = size(source), size(target - start(source))
    inverse = 1 / jnp.maximum(of_input, 1e-6 * of_input.max() + jnp.finfo(jnp.float32).tiny)
    scale = Linear(jnp.outer(inverse, of_error), None if linear.bias is None else of_error)
    change = jax.tree.map(jnp.zeros_like, start)
    return _Trainee(start, scale, change, _ADAM.init(change))


@jax.jit
def _trained(trainee: _Trainee, change: Linear) -> Linear:
    return jax.tree.map(
        lambda start, scale, step: start + scale * step, trainee.start, trainee.scale, change
    )


@jax.jit
def _step(trainee: _Trainee, gradient: Linear, rate: Float[Array, ""] | np.float32) -> _Trainee:
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to the power of an integer
        updates, state = _ADAM.update(gradient, trainee.state)
    change = jax.tree.map(lambda value, update: value - rate * update, trainee.change, updates)
    return trainee._replace(change=change, state=state)


@functools.partial(jax.jit, static_argnames=("relative",))
def _error(
    x: Float[Array, "B T D"],
    target: Float[Array, "B T D"],
    real: Bool[Array, "B T"],
    *,
    relative: bool,
) -> Float[Array, " B"]:
    """Returns each row's squared error, against the target's square or per coordinate,
    summed over its tokens.
    """
    x, target = x.astype(jnp.float32), target.astype(jnp.float32)
    error = jnp.square(x - target).sum(-1)
    if relative:
        size = jnp.square(target).sum(-1)
        error = error / jnp.where(size > 0, size, 1)
    else:
        error = error / jnp.float32(x.shape[-1])
    return jnp.where(real, error, 0).sum(-1)


@jax.jit
def _kl(
    whole: Float[Array, "B T V"], pruned: Float[Array, "B T V"], real: Bool[Array, "B T"]
) -> Float[Array, " B"]:
    log_p, log_q = jax.nn.log_softmax(whole), jax.nn.log_softmax(pruned)
    kl = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
    return jnp.where(real, kl, 0).sum(-1)


@jax.jit
def _mean(sums: Float[Array, " B"], real: Bool[Array, "B T"]) -> Float[Array, ""]:
    """Returns the mean over the tokens of all rows: the one place of the loss where
    devices meet.
    """
    return sums.sum() / real.sum().astype(jnp.float32)


def _shuffled(plan: list[Batch], steps: int, seed: int) -> list[Batch]:
    """Returns as many batches as there are steps; each epoch in another order."""
    random = np.random.default_rng(seed)
    epochs = [random.permutation(len(plan)) for _ in range(-(-steps // len(plan)))]
    return [plan[k] for k in np.concatenate(epochs)[:steps]]
