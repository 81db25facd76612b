"""Packing: several sentences share a row of tokens, blind to one another, each from
position 0.

`best_fit` decides which sentences share a row, and `lay_out` where each token goes.
Batches that a model only reads are made from them in `jmat.data.batches`, those that it
is trained on here: it is trained as it will be used, on one sentence, read from its
first token.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped


class TrainingBatch(NamedTuple):
    """Holds rows of packed sentences, and the token to predict at each place.

    Attributes:
      tokens: ids [B, T]; padding holds 0.
      segments: [B, T]; number of each token's sentence in its row, from 1; 0 is
        padding.
      positions: [B, T]; index of each token in its sentence, from 0.
      targets: [B, T]; id to predict; −1 where nothing is predicted.
    """

    tokens: Int[Array | np.ndarray, "B T"]
    segments: Int[Array | np.ndarray, "B T"]
    positions: Int[Array | np.ndarray, "B T"]
    targets: Int[Array | np.ndarray, "B T"]

    @property
    def rows(self) -> int:
        """Returns the number of rows, B."""
        return self.tokens.shape[0]

    def take(self, rows: Int[np.ndarray, " N"]) -> "TrainingBatch":
        """Returns some of the rows."""
        return TrainingBatch(*(field[rows] for field in self))

    def padded_to(self, multiple: int) -> "TrainingBatch":
        """Returns the batch with empty rows (no segment, no target) up to a multiple of
        rows.
        """
        extra = -self.rows % multiple
        fill = TrainingBatch(tokens=0, segments=0, positions=0, targets=-1)  # type: ignore[arg-type]
        pad = lambda field, value: np.pad(field, ((0, extra), (0, 0)), constant_values=value)  # noqa: E731
        return TrainingBatch(*map(pad, self, fill))


def next_tokens(
    sentences: Sequence[Sequence[int]], end: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns (tokens, targets) for a causal model: each token predicts the next, the
    last one `end`.
    """
    return [(np.asarray(s, np.int32), np.asarray([*s[1:], end], np.int32)) for s in sentences]


def same_tokens(
    sentences: Sequence[Sequence[int]], specials: Sequence[int]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns (tokens, targets) for a masked model: each token but the special ones
    could be predicted.
    """
    arrays = [np.asarray(s, np.int32) for s in sentences]
    return [(s, np.where(np.isin(s, list(specials)), np.int32(-1), s)) for s in arrays]


def pack(
    pairs: Sequence[tuple[np.ndarray, np.ndarray]], length: int, seed: Sequence[int] = (0,)
) -> TrainingBatch:
    """Packs (tokens, targets) pairs into rows of `length` tokens; longer sentences are
    cut.

    Raises ValueError where there is nothing to pack.
    """
    if not pairs or min(len(tokens) for tokens, _ in pairs) == 0:
        raise ValueError(
            f"got {len(pairs)} sentences, expected at least one and none empty: is the corpus "
            "empty?"
        )
    sizes = np.minimum([len(tokens) for tokens, _ in pairs], length)
    rows = shuffled_rows(sizes, length, seed)
    places = lay_out(rows, sizes, length)
    tokens, targets = (np.full(len(rows) * length, fill, np.int32) for fill in (0, -1))
    for filled, part in ((tokens, 0), (targets, 1)):
        filled[places.of_token] = np.concatenate(
            [pairs[i][part][: sizes[i]] for i in places.members]
        )
    shape = (len(rows), length)
    return TrainingBatch(
        tokens.reshape(shape), places.segments, places.positions, targets.reshape(shape)
    )


def shuffled_rows(
    sizes: Int[np.ndarray, " S"], length: int, seed: Sequence[int] = (0,)
) -> list[Int[np.ndarray, " _"]]:
    """Returns which sentences share each row of `length` tokens: best fit, the longest
    first.

    The seed decides which of several equally long sentences goes where, and the order
    of the rows, but not their number, which depends on the sizes alone: so every epoch
    can be packed anew and has equally many rows.
    """
    random = np.random.default_rng(list(seed))
    order = random.permutation(len(sizes))
    order = order[np.argsort(-sizes[order], kind="stable")]
    rows = [order[members] for members in best_fit(sizes[order].tolist(), length)]
    shuffled = [order] * len(rows)
    for row, place in zip(rows, random.permutation(len(rows)).tolist(), strict=True):
        shuffled[place] = row
    return shuffled


class Places(NamedTuple):
    """Holds the places of sentences in rows of one length.

    Attributes:
      members: sentences, row after row, in the order in which they lie.
      row: of each member.
      start: column of each member's first token.
      of_token: place of each token of the members, in the flattened rows.
      segments: as in `TrainingBatch`.
      positions: as in `TrainingBatch`.
    """

    members: Int[np.ndarray, " S"]
    row: Int[np.ndarray, " S"]
    start: Int[np.ndarray, " S"]
    of_token: Int[np.ndarray, " total"]
    segments: Int[np.ndarray, "R T"]
    positions: Int[np.ndarray, "R T"]


def lay_out(
    rows: Sequence[Int[np.ndarray, " _"]],
    sizes: Int[np.ndarray, " S"],
    length: int,
    *,
    count: int | None = None,
) -> Places:
    """Returns the places of the sentences' tokens, one sentence after another in each
    row.

    Args:
      rows: sentences that share each row.
      sizes: number of tokens of every sentence.
      length: T.
      count: number of rows, those at the end empty; by default as many as are given.
    """
    members = np.concatenate(rows)
    in_row = np.array([len(row) for row in rows])
    row = np.repeat(np.arange(len(rows)), in_row)
    number = np.arange(len(members)) - np.repeat(np.cumsum(in_row) - in_row, in_row)
    n = sizes[members]
    before = np.cumsum(n) - n  # tokens of all members that come earlier
    start = before - np.repeat(before[number == 0], in_row)
    position = np.arange(n.sum()) - np.repeat(before, n)
    of_token = np.repeat(row * length + start, n) + position
    segments, positions = np.zeros((2, (count or len(rows)) * length), np.int32)
    segments[of_token] = np.repeat(number + 1, n)
    positions[of_token] = position
    return Places(
        members, row, start, of_token, segments.reshape(-1, length), positions.reshape(-1, length)
    )


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
    # room[r]: the rows with r places left that are not full
    room: list[list[int]] = [[] for _ in range(length + 1)]
    rows: list[list[int]] = []
    held: list[int] = []  # counts in each row
    for i, size in enumerate(sizes):
        count = 0 if counts is None or most is None else counts[i]
        best = next(
            (
                r
                for r in range(size, length)
                if room[r] and held[room[r][-1]] + count <= (most or 0)
            ),
            length,
        )
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
    """Holds a masked batch: `tokens` as the model sees them, and the ids to predict at
    `places` (weight 0: none).
    """

    tokens: Int[Array, "B T"]
    places: Int[Array, "B P"]
    targets: Int[Array, "B P"]
    weights: Float[Array, "B P"]


def mask_tokens(
    batch: TrainingBatch,
    key: Shaped[Array, ""],
    *,
    mask_id: int,
    vocab_size: int,
    share: float = 0.15,
) -> Masked:
    """Masks tokens as BERT does (Devlin et al. 2018, section 3.1): of each row's
    candidates, `targets >= 0`, a share is predicted.

    80 % of these read `mask_id`, 10 % a random token, 10 % themselves. The key decides
    everything.
    """
    tokens, candidates = jnp.asarray(batch.tokens), jnp.asarray(batch.targets)
    B, T = tokens.shape
    P = int(share * T) + 1
    which, how, what, rounding = jax.random.split(key, 4)
    candidate = candidates >= 0
    score = jnp.where(candidate, jax.random.uniform(which, (B, T)), -1.0)
    _, places = jax.lax.top_k(score, P)
    expected = share * candidate.sum(-1, keepdims=True).astype(jnp.float32)
    # Rounded up or down at random: on average exactly the share, however short the row.
    count = jnp.floor(expected + jax.random.uniform(rounding, (B, 1)))
    chosen = jnp.arange(P, dtype=jnp.float32) < count
    original = jnp.take_along_axis(tokens, places, axis=1)
    dice = jax.random.uniform(how, (B, P))
    noise = jax.random.randint(what, (B, P), 0, vocab_size)
    seen = jnp.where(dice < 0.8, mask_id, jnp.where(dice < 0.9, noise, original))
    tokens = tokens.at[jnp.arange(B)[:, None], places].set(jnp.where(chosen, seen, original))
    targets = jnp.take_along_axis(candidates, places, axis=1)
    return Masked(tokens, places, jnp.where(chosen, targets, 0), chosen.astype(jnp.float32))
