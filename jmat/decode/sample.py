"""The law by which the next token is drawn from a model's logits: its options, and the
arithmetic.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from jmat.runtime.checks import check_number, check_whole

_NEVER = -jnp.inf  # the logit of a token that cannot be drawn


class Law(NamedTuple):
    """Holds the numbers of a law. Those that are None are no part of the program; other
    numbers compile nothing new.

    Attributes:
      temperature: divides the logits; None takes the most likely token.
      top_k: so many most likely tokens can be drawn.
      tail: the least likely tokens that together have at most this probability, 1 −
        top-p, cannot be.
      min_p: tokens with at least this share of the most likely one's probability can be.
      repetition_penalty: divides positive logits of tokens that the text has already,
        and multiplies negative ones.
    """

    temperature: Float[np.ndarray | Array, ""] | None = None
    top_k: Int[np.ndarray | Array, ""] | None = None
    tail: Float[np.ndarray | Array, ""] | None = None
    min_p: Float[np.ndarray | Array, ""] | None = None
    repetition_penalty: Float[np.ndarray | Array, ""] | None = None


def checked_law(
    temperature: float | int,
    top_k: int | None,
    top_p: float | int | None,
    min_p: float | int | None,
    repetition_penalty: float | int | None,
) -> Law:
    """Returns the law of options that the user gives; those that change nothing are
    left out. Raises ValueError for options out of range, and for options of sampling
    without it.
    """
    _check_finite("temperature", temperature)
    if temperature > 0 and np.float32(temperature) < np.finfo(np.float32).tiny:
        raise ValueError(
            f"temperature={temperature!r} is too small to divide by: give 0, which always takes "
            "the most likely token."
        )
    if top_k is not None:
        check_whole("top_k", top_k, 1)
    for name, share in (("top_p", top_p), ("min_p", min_p)):
        if share is not None and not (_is_number(share) and 0 < share <= 1):
            raise ValueError(f"{name}={share!r}: expected a number above 0, and at most 1.")
    if repetition_penalty is not None and (
        not _is_number(repetition_penalty) or not 0 < repetition_penalty < math.inf
    ):
        raise ValueError(f"repetition_penalty={repetition_penalty!r}: expected a number above 0.")
    sampling = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    idle = [name for name, given in sampling.items() if given is not None]
    if temperature == 0 and idle:
        raise ValueError(
            f"{idle[0]}={sampling[idle[0]]!r} changes nothing at temperature 0, where the most "
            "likely token is always taken: give a temperature, such as 1.0."
        )

    def number(value: float | int | None, neutral: float | int) -> np.ndarray | None:
        return None if value is None or value == neutral else np.asarray(value, np.float32)

    return Law(
        temperature=number(temperature, 0),
        top_k=None if top_k is None else np.asarray(min(top_k, 2**31 - 1), np.int32),
        tail=None if top_p is None or top_p == 1 else np.asarray(1 - top_p, np.float32),
        min_p=number(min_p, 0),
        repetition_penalty=number(repetition_penalty, 1),
    )


def _check_finite(setting: str, value: object) -> None:
    check_number(setting, value, 0)
    if value == math.inf:
        raise ValueError(f"{setting}={value!r}: expected a finite number of at least 0.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def processed(
    logits: Float[Array, "B V"], seen: Bool[Array, "B V"] | None, law: Law
) -> Float[Array, "B V"]:
    """Returns the logits from which a token is drawn, −inf for those that cannot be.

    The order is that of transformers: penalty, temperature, top-k, top-p, min-p. Tokens
    that are as likely as the last one that top-k or top-p keep are kept, too.

    Args:
      logits: of the model.
      seen: which tokens each text has already, for the penalty.
      law: as `checked_law` returns it.
    """
    if law.repetition_penalty is not None and seen is not None:
        penalty = law.repetition_penalty
        logits = jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)
    if law.temperature is None:
        return logits
    # The largest becomes 0, so that a small temperature does not make infinity of it.
    logits = (logits - logits.max(-1, keepdims=True)) / law.temperature
    if law.top_k is not None:
        top_k = law.top_k
        kept = _from_least(logits, lambda above, _: above.sum(-1, keepdims=True) < top_k)
        logits = jnp.where(kept, logits, _NEVER)
    if law.tail is not None:
        tail, p = law.tail, jax.nn.softmax(logits, axis=-1)
        kept = _from_least(
            logits, lambda _, upto: jnp.where(upto, p, 0.0).sum(-1, keepdims=True) > tail
        )
        # the most likely token is always kept
        logits = jnp.where(kept | (p == p.max(-1, keepdims=True)), logits, _NEVER)
    if law.min_p is not None:
        least = logits.max(-1, keepdims=True) + jnp.log(law.min_p)
        logits = jnp.where(logits < least, _NEVER, logits)
    return logits


def _from_least(
    logits: Float[Array, "B V"],
    reached: Callable[[Bool[Array, "B V"], Bool[Array, "B V"]], Bool[Array, "B 1"]],
) -> Bool[Array, "B V"]:
    """Returns which logits of a row are at least the least number that `reached` holds
    for.

    It is found bit by bit, since XLA sorts slowly on CPUs.

    Args:
      logits: of each row.
      reached: takes which logits are above a number, and which are not; holds for all
        numbers from one on.
    """
    bits = jax.lax.bitcast_convert_type(logits, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    order = jnp.where(bits >= sign, ~bits, bits | sign)  # whole numbers, in order of the logits

    def with_bit(i: Int[Array, ""], below: UInt32[Array, "B 1"]) -> UInt32[Array, "B 1"]:
        """Returns the largest number that is not reached, as far as its first bits."""
        higher = below | (sign >> i.astype(jnp.uint32))
        return jnp.where(reached(order > higher, order <= higher), below, higher)

    none = jnp.zeros((len(logits), 1), jnp.uint32)
    return order > jax.lax.fori_loop(0, 32, with_bit, none)


def draw(
    logits: Float[Array, "B V"], law: Law, key: Key[Array, ""], step: Int[Array, " B"]
) -> Int[Array, " B"]:
    """Returns a token for each row: the most likely one, or one that is drawn.

    A row's draw depends on the key, the row and its step alone, so not on the other
    rows.

    Args:
      logits: as `processed` returns them.
      law: the same.
      key: of random numbers.
      step: how many tokens each row has.
    """
    if law.temperature is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    rows = jnp.arange(len(logits), dtype=jnp.int32)

    def one(row: Int[Array, ""], step: Int[Array, ""], logits: Float[Array, " V"]) -> Array:
        of_step = jax.random.fold_in(jax.random.fold_in(key, row), step)
        return jax.random.categorical(of_step, logits)

    return jax.vmap(one)(rows, step, logits).astype(jnp.int32)
