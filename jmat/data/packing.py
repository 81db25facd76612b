"""Sentences → fixed rows: several sentences share a row of T tokens, blind to one another, each starting at position 0.

Hardly a place is wasted, and the model is trained as it will be used: on one sentence, read from its first token.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped


class Batch(NamedTuple):
    """Rows of packed sentences. `inputs` and `targets` are token ids; `targets` is −1 where nothing is predicted."""

    inputs: Int[Array | np.ndarray, "B T"]
    targets: Int[Array | np.ndarray, "B T"]
    segments: Int[Array | np.ndarray, "B T"]  # 1, 2, … within a row; 0 is padding
    positions: Int[Array | np.ndarray, "B T"]  # from 0 in each sentence

    @property
    def rows(self) -> int:
        """B."""
        return self.inputs.shape[0]

    def take(self, rows: Int[np.ndarray, " N"]) -> "Batch":
        """Some of the rows."""
        return Batch(*(field[rows] for field in self))

    def padded_to(self, multiple: int) -> "Batch":
        """Returns the batch with empty rows (no segment, no target) up to a multiple of rows."""
        extra = -self.rows % multiple
        fill = Batch(inputs=0, targets=-1, segments=0, positions=0)  # type: ignore[arg-type]
        pad = lambda field, value: np.pad(field, ((0, extra), (0, 0)), constant_values=value)  # noqa: E731
        return Batch(*map(pad, self, fill))


def next_tokens(sentences: Sequence[Sequence[int]], end: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(inputs, targets) for a causal model: each token predicts the next, the last one predicts `end`."""
    return [(np.asarray(s, np.int32), np.asarray([*s[1:], end], np.int32)) for s in sentences]


def same_tokens(sentences: Sequence[Sequence[int]], specials: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(inputs, targets) for a masked model: each token could be masked and predicted, except the special ones."""
    arrays = [np.asarray(s, np.int32) for s in sentences]
    return [(s, np.where(np.isin(s, list(specials)), np.int32(-1), s)) for s in arrays]


def pack(pairs: Sequence[tuple[np.ndarray, np.ndarray]], length: int, seed: Sequence[int] = (0,)) -> Batch:
    """Packs (inputs, targets) pairs into rows of `length` tokens, best fit first, longest first; longer ones are cut.

    The seed decides which of several equally long sentences goes where, and the order of the rows, but not their
    number, which depends on the lengths alone: so every epoch can be packed anew and has equally many rows.
    Raises ValueError where there is nothing to pack.
    """
    if not pairs or min(len(inputs) for inputs, _ in pairs) == 0:
        raise ValueError(f"got {len(pairs)} sentences, expected at least one and none empty: is the corpus empty?")
    random = np.random.default_rng(list(seed))
    order = random.permutation(len(pairs))
    sizes = np.minimum([len(pairs[i][0]) for i in order], length)
    longest_first = np.argsort(-sizes, kind="stable")
    rows = [order[longest_first[members]] for members in best_fit(sizes[longest_first].tolist(), length)]
    batch = Batch(*np.zeros((4, len(rows), length), np.int32))
    batch.targets[:] = -1
    for row, place in zip(rows, random.permutation(len(rows)).tolist(), strict=True):
        start = 0
        for segment, i in enumerate(row.tolist(), 1):
            inputs, targets = (part[:length] for part in pairs[i])
            span = slice(start, start + len(inputs))
            batch.inputs[place, span] = inputs
            batch.targets[place, span] = targets
            batch.segments[place, span] = segment
            batch.positions[place, span] = np.arange(len(inputs))
            start += len(inputs)
    return batch


def best_fit(
    sizes: Sequence[int],
    length: int,
    *,
    counts: Sequence[int] | None = None,
    most: int | None = None,
    opens: int = 1,
) -> list[list[int]]:
    """Returns which sizes share a row of a length.

    Each size goes, in order, where it leaves the least room, or into a new row. With
    `counts`, those in a row add up to `most`, or it holds only one. Sizes under `opens`
    fill rows, but begin none: they are left out where there is no room.
    """
    room: list[list[int]] = [[] for _ in range(length + 1)]  # room[r]: the rows with r places left that are not full
    rows: list[list[int]] = []
    held: list[int] = []  # counts in each row
    for i, size in enumerate(sizes):
        count = 0 if counts is None or most is None else counts[i]
        best = next((r for r in range(size, length) if room[r] and held[room[r][-1]] + count <= (most or 0)), length)
        if best == length:
            if size < opens:
                continue
            rows.append([])
            held.append(0)
            room[length] = [len(rows) - 1]
        row = room[best].pop()
        rows[row].append(i)
        held[row] += count
        if most is None or held[row] < most:
            room[best - size].append(row)
    return rows


class Masked(NamedTuple):
    """A masked batch: `inputs` as the model sees them, and what to predict at `places` (weight 0: nothing)."""

    inputs: Int[Array, "B T"]
    places: Int[Array, "B P"]
    targets: Int[Array, "B P"]
    weights: Float[Array, "B P"]


def mask_tokens(batch: Batch, key: Shaped[Array, ""], *, mask_id: int, vocab_size: int, share: float = 0.15) -> Masked:
    """BERT's masking (Devlin et al. 2018, section 3.1): of each row's candidates, `targets >= 0`, a share is predicted.

    80 % of these read `mask_id`, 10 % a random token, 10 % themselves. The key decides everything.
    """
    inputs, candidates = jnp.asarray(batch.inputs), jnp.asarray(batch.targets)
    B, T = inputs.shape
    P = int(share * T) + 1
    which, how, what, rounding = jax.random.split(key, 4)
    candidate = candidates >= 0
    score = jnp.where(candidate, jax.random.uniform(which, (B, T)), -1.0)
    _, places = jax.lax.top_k(score, P)
    expected = share * candidate.sum(-1, keepdims=True).astype(jnp.float32)
    # Rounded up or down at random: on average exactly the share, however short the row.
    count = jnp.floor(expected + jax.random.uniform(rounding, (B, 1)))
    chosen = jnp.arange(P, dtype=jnp.float32) < count
    original = jnp.take_along_axis(inputs, places, axis=1)
    dice = jax.random.uniform(how, (B, P))
    noise = jax.random.randint(what, (B, P), 0, vocab_size)
    seen = jnp.where(dice < 0.8, mask_id, jnp.where(dice < 0.9, noise, original))
    inputs = inputs.at[jnp.arange(B)[:, None], places].set(jnp.where(chosen, seen, original))
    targets = jnp.take_along_axis(candidates, places, axis=1)
    return Masked(inputs, places, jnp.where(chosen, targets, 0), chosen.astype(jnp.float32))
