"""Which drafts a model would accept, found without drafting: from one pass over texts that
it wrote greedily.

While all drafts of a cycle are right, the streams of the drafting blocks are those of the
text itself. So the guess of a map at each token says how far a cycle that begins there
would come, for drafts of any length; a carry has one guess for each number of tokens that
were drafted before. The counts are those of `jmat.generate(…, draft=…).drafts`.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Int32
from numpy import ndarray

from jmat.capture.activations import capture
from jmat.data.examples import Split
from jmat.decode.draft import DraftCounts
from jmat.decode.lookup import Lookup, copies
from jmat.forward import logits
from jmat.maps.carry import Carry
from jmat.models.family import Transformer
from jmat.models.sites import Site, stream_sites

_ROWS = 512  # tokens whose logits are in memory at a time


@dataclasses.dataclass(frozen=True, eq=False)
class Texts:
    """Holds texts that a model wrote greedily, text behind text, with their streams.

    Attributes:
      tokens: of prompts and new texts.
      lengths: of each text, its prompt included.
      prompts: the length of each prompt.
      streams: h_l of all tokens, by layer.
    """

    tokens: Int32[ndarray, " N"]
    lengths: Int[ndarray, " B"]
    prompts: Int[ndarray, " B"]
    streams: Mapping[int, Float[ndarray, "N D"]]

    @property
    def starts(self) -> Int[ndarray, " B"]:
        """Returns where each text begins."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def places(self) -> Int[ndarray, " N"]:
        """Returns the index of each token in its text."""
        return np.arange(len(self.tokens)) - np.repeat(self.starts, self.lengths)


def read_texts(
    model: Transformer,
    prompts: Sequence[Int[ndarray, " _"]],
    tokens: Sequence[Int[ndarray, " _"]],
    layers: Iterable[int],
) -> Texts:
    """Reads the streams of texts.

    Args:
      model: that wrote them.
      prompts: token ids.
      tokens: the new tokens behind each.
      layers: whose streams are kept.
    """
    whole = [np.concatenate(pair).astype(np.int32) for pair in zip(prompts, tokens, strict=True)]
    lengths = np.array([len(row) for row in whole], np.int32)
    split = Split(np.concatenate(whole), lengths, np.zeros(len(whole), np.int32))
    split = split.with_examples(np.ones(len(split.tokens), bool))
    sites = stream_sites(model.config.layers)
    acts = capture(model, split, [sites[layer] for layer in layers])
    streams = {layer: acts[sites[layer]] for layer in layers}
    return Texts(split.tokens, lengths, np.array([len(row) for row in prompts]), streams)


def right_guesses(
    model: Transformer,
    texts: Texts,
    layer: int,
    stand_in: Site | Carry,
    depth: int,
    words: Iterable[Int[ndarray, " W"] | None],
) -> list[Bool[ndarray, "N depth"]]:
    """Returns for each list of words whether a draft behind each token is the text's next
    one, where so many tokens were drafted before it.

    Args:
      model: whose head reads the guesses.
      texts: with the streams of `layer` and the last one.
      layer: that drafts.
      stand_in: the map from its stream to h_L.
      depth: most tokens of a draft.
      words: lists of words that may be drafted; None: all.
    """
    stream, final = texts.streams[layer], texts.streams[model.config.layers]
    later = np.flatnonzero(texts.places > 0)
    lists = list(words)
    right = [np.zeros((len(stream), depth), bool) for _ in lists]
    state = final
    for number in range(depth):
        if isinstance(stand_in, Carry):
            before = state[later - 1], stream[later - 1]
            state = np.array(final)
            state[later] = np.asarray(stand_in(stream[later], *before))
        elif number == 0:
            state = np.asarray(stand_in(jnp.asarray(stream)))
        else:  # a map of one stream guesses the same, however many were drafted before
            for each in right:
                each[:, number] = each[:, 0]
            continue
        for each, guess in zip(right, _guesses(model, state, lists), strict=True):
            each[:-1, number] = guess[:-1] == texts.tokens[1:]
    for each in right:
        each[np.cumsum(texts.lengths) - 1] = False  # nothing comes behind a text
    return right


def _guesses(
    model: Transformer,
    state: Float[ndarray, "N D"],
    lists: Sequence[Int[ndarray, " W"] | None],
) -> list[Int[ndarray, " N"]]:
    """Returns the most likely word at each token, out of each list."""
    parts: list[list[ndarray]] = [[] for _ in lists]
    for start in range(0, len(state), _ROWS):
        rows = state[start : start + _ROWS]
        full = np.concatenate([rows, np.zeros((_ROWS - len(rows), rows.shape[1]), rows.dtype)])
        scores = np.asarray(logits(model, jnp.asarray(full)))[: len(rows)]
        for part, words in zip(parts, lists, strict=True):
            best = scores.argmax(1) if words is None else words[scores[:, words].argmax(1)]
            part.append(best)
    return [np.concatenate(part) for part in parts]


def right_copies(texts: Texts, lookup: Lookup) -> tuple[Bool[ndarray, "N g"], Bool[ndarray, " N"]]:
    """Returns whether each token of a copy behind each token is the text's own, as
    `right_guesses` does, and behind which tokens there is a copy.
    """
    widest = int(texts.lengths.max())
    rows = np.zeros((len(texts.tokens), widest), np.int32)
    of_text = np.repeat(np.arange(len(texts.lengths)), texts.lengths)
    for text, (start, length) in enumerate(zip(texts.starts, texts.lengths, strict=True)):
        rows[of_text == text, :length] = texts.tokens[start : start + length]
    ends = (texts.places + 1).astype(np.int32)
    found = _copies(rows, ends, tokens=lookup.tokens, longest=lookup.longest)
    drafts, matched = (np.asarray(part) for part in found)
    right = np.zeros((len(rows), lookup.tokens), bool)
    left = np.repeat(texts.starts + texts.lengths, texts.lengths) - np.arange(len(rows)) - 1
    for ahead in range(lookup.tokens):
        inside = np.flatnonzero(left > ahead)
        # by the place where a guess is made, as for maps
        right[inside + ahead, ahead] = drafts[inside, ahead] == texts.tokens[inside + ahead + 1]
    return right, matched >= lookup.shortest


_copies = jax.jit(copies, static_argnames=("tokens", "longest"))


class Counted(NamedTuple):
    """Holds what becomes of drafts of one length.

    Attributes:
      counts: cycles, drafted and accepted tokens of each text.
      share: of the cycles in which texts are written together, how many have a draft of
        any of them.
    """

    counts: DraftCounts
    share: float


def counted(
    texts: Texts,
    right: Bool[ndarray, "N depth"],
    tokens: int,
    drafts: Bool[ndarray, " N"] | None = None,
) -> Counted:
    """Returns what becomes of drafts of a length.

    Args:
      texts: that are written.
      right: as `right_guesses` returns it, `tokens` deep at least.
      tokens: of a draft.
      drafts: behind which tokens there is a draft; None: behind each.
    """
    counts = np.zeros((3, len(texts.lengths)), np.int32)
    has_draft = np.zeros(int(texts.lengths.max()), bool)  # by the number of the cycle
    for row, (start, length) in enumerate(zip(texts.starts, texts.lengths, strict=True)):
        at = int(texts.prompts[row])  # the first new token comes with the prompt
        while at + 1 < length:
            place, most = int(start) + at, length - at - 1
            drafted = tokens if drafts is None or drafts[place] else 0
            has_draft[counts[0, row]] |= drafted > 0
            accepted = 0
            while accepted < min(drafted, most) and right[place + accepted, accepted]:
                accepted += 1
            counts[:, row] += (1, drafted, accepted)
            at += accepted + 1
    share = has_draft.sum() / max(int(counts[0].max()), 1)
    return Counted(DraftCounts(*counts), float(share))
