"""Maps to the final layer that are trained on what the model predicts from it: the
tuned lens, and one hidden layer beside it.

The loss is KL(full ‖ lens) in nats: the model's own distribution against the one that
it reads from the map's output. Training starts at the affine map of the tokens that it
trains on. The last eighth of the tokens is held out: training ends where KL on them no
longer falls, and the best map so far is kept. So it is where the loss diverges.

The map is trained as `y = affine(x) + t * (z @ V + c + gelu(z @ U + u) @ O)`, with z
the source less its mean over its standard deviation, t the root mean square of the
affine map's error, and V, c and O zero at first. Adam's steps then mean the same to all
coordinates, outliers included.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int
from numpy import ndarray

from jmat.forward import logits
from jmat.maps.closed_forms import affine
from jmat.maps.compact import Hidden
from jmat.maps.regression import Regression, pair_moments
from jmat.maps.types import Linear
from jmat.models.family import Transformer
from jmat.runtime.annotations import PyTree

_FEWEST = 16  # tokens: fourteen to train on, and two that are held out


@dataclasses.dataclass(frozen=True, eq=False)
class Lesson:
    """Holds what a lens is trained on, and how.

    Attributes:
      model: its final norm and head read the map's output; their weights stay.
      source: the stream that the map reads, a token a row.
      target: h_L at the same tokens.
      steps: of Adam at most; the learning rate falls to 0 along a line.
      every: steps from one look at the held-out tokens to the next.
      patience: looks without a smaller KL after which training ends.
      rate: the first learning rate times D, in the units above.
      batch: tokens a step.
      seed: order of the tokens, and first weights of hidden units.
    """

    model: Transformer
    source: Float[ndarray, "N D"]
    target: Float[ndarray, "N E"]
    steps: int = 400
    every: int = 40
    patience: int = 3
    rate: float = 0.2
    batch: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError where there are too few tokens."""
        if len(self.source) < _FEWEST:
            raise ValueError(
                f"{len(self.source)} tokens are too few to train a map on: give {_FEWEST} at least."
            )


class _Frame(NamedTuple):
    """Holds what stays as it is while a map is trained."""

    start: Linear
    mean: Float[Array, " D"]
    inverse: Float[Array, " D"]  # 1 / s
    scale: Float[Array, " E"]  # t


class _Change(NamedTuple):
    """Holds what is trained; without hidden units U, u and O are empty."""

    V: Float[Array, "D E"]
    c: Float[Array, " E"]
    U: Float[Array, "D m"]
    u: Float[Array, " m"]
    O: Float[Array, "m E"]


def tuned(lesson: Lesson, parameter: None = None) -> Linear:
    """Returns the affine map that is trained on KL: the tuned lens."""
    frame, change = _trained(lesson, 0)
    W, bias = _affine_part(frame, change)
    return Linear(W, bias)


def hidden(lesson: Lesson, units: int) -> Hidden:
    """Returns an affine map and one hidden layer of so many units, trained on KL."""
    frame, change = _trained(lesson, units)
    W, bias = _affine_part(frame, change)
    U = frame.inverse[:, None] * change.U
    return Hidden(W, U, change.u - frame.mean @ U, change.O * frame.scale, bias)


def _trained(lesson: Lesson, units: int) -> tuple[_Frame, _Change]:
    N, D = lesson.source.shape
    held_out = slice(N - max(N // 8, 2), N)
    x, y = lesson.source[: held_out.start], lesson.target[: held_out.start]
    pair = Regression(pair_moments(x, y))
    pair.check()
    frame = _frame(affine(pair, None), x, y)
    change = _first(D, y.shape[1], units, lesson.seed)
    state, best, least, worse = _ADAM.init(change), change, np.inf, 0
    batches = _batches(len(x), min(lesson.batch, len(x)), lesson.seed)
    for step in range(lesson.steps + 1):
        if step % lesson.every == 0 or step == lesson.steps:
            kl = _held_out(lesson, frame, change, held_out)
            best, least, worse = (change, kl, 0) if kl < least else (best, least, worse + 1)
            if worse == lesson.patience or not np.isfinite(kl) or step == lesson.steps:
                break
        rows = next(batches)
        rate = np.float32(lesson.rate / D * (1 - step / lesson.steps))
        # optax raises a float to the power of an integer
        with jax.numpy_dtype_promotion("standard"):
            change, state = _step(lesson.model, frame, change, state, x[rows], y[rows], rate)
    return frame, best


_ADAM = optax.scale_by_adam(b2=0.99)


def _first(D: int, E: int, units: int, seed: int) -> _Change:
    """Returns the change that changes nothing, with hidden units that look at x."""
    U = np.random.default_rng(seed).normal(size=(D, units)) / np.sqrt(D)
    zeros = functools.partial(jnp.zeros, dtype=jnp.float32)
    return _Change(
        zeros((D, E)), zeros(E), jnp.asarray(U, jnp.float32), zeros(units), zeros((units, E))
    )


@jax.jit
def _frame(
    start: Linear, x: Float[Array | ndarray, "N D"], y: Float[Array | ndarray, "N E"]
) -> _Frame:
    mean, spread = jnp.mean(x, axis=0), jnp.std(x, axis=0)
    error = jnp.sqrt(jnp.mean(jnp.square(y - start(x)), axis=0))
    tiny = jnp.finfo(jnp.float32).tiny
    inverse = 1 / jnp.maximum(spread, 1e-6 * spread.max() + tiny)
    return _Frame(start, mean, inverse, jnp.maximum(error, 1e-6 * error.max()))


def _apply(frame: _Frame, change: _Change, x: Array | ndarray) -> Array:
    z = (x - frame.mean) * frame.inverse
    units = jax.nn.gelu(z @ change.U + change.u, approximate=False)
    return frame.start(x) + frame.scale * (z @ change.V + change.c + units @ change.O)


def _affine_part(frame: _Frame, change: _Change) -> tuple[Float[Array, "D E"], Float[Array, " E"]]:
    step = frame.inverse[:, None] * change.V * frame.scale
    bias = frame.start(jnp.zeros_like(frame.mean)) + frame.scale * change.c
    return jnp.asarray(frame.start.W) + step, bias - frame.mean @ step


def _divergence(
    model: Transformer, frame: _Frame, change: _Change, x: Array | ndarray, y: Array | ndarray
) -> Array:
    """Returns KL(full ‖ lens) of each token, in nats."""
    log_p = jax.nn.log_softmax(logits(model, y))
    log_q = jax.nn.log_softmax(logits(model, _apply(frame, change, x)))
    return jnp.sum(jnp.exp(log_p) * jnp.where(log_p > -jnp.inf, log_p - log_q, 0), axis=-1)


@jax.jit
def _step(
    model: Transformer,
    frame: _Frame,
    change: _Change,
    state: PyTree,
    x: Array,
    y: Array,
    rate: Array,
) -> tuple[_Change, PyTree]:
    gradient = jax.grad(lambda change: jnp.mean(_divergence(model, frame, change, x, y)))(change)
    updates, state = _ADAM.update(gradient, state)
    return jax.tree.map(lambda value, update: value - rate * update, change, updates), state


_divergences = jax.jit(_divergence)


def _held_out(lesson: Lesson, frame: _Frame, change: _Change, rows: slice) -> float:
    """Returns the mean KL over tokens that are not trained on."""
    x, y = lesson.source[rows], lesson.target[rows]
    parts = [slice(k, k + lesson.batch) for k in range(0, len(x), lesson.batch)]
    kl = [
        np.asarray(_divergences(lesson.model, frame, change, x[part], y[part]), np.float64)
        for part in parts
    ]
    return float(np.concatenate(kl).mean())


def _batches(count: int, size: int, seed: int) -> Iterator[Int[ndarray, " size"]]:
    """Returns rows to train on, in a new order each time round; a last batch that would
    be short is left out.
    """
    random = np.random.default_rng(seed)
    while True:
        order = random.permutation(count)
        yield from (order[k : k + size] for k in range(0, count - size + 1, size))
