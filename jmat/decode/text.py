"""Follows texts while they are written: new tokens become text, stop strings are found,
and what cannot change any more is handed on.
"""

import itertools
from collections.abc import Callable, Sequence

from jaxtyping import Int32
from numpy import ndarray

from jmat.data.encoding import Tokenizer

OnText = Callable[[int, str], object]

_BEFORE = 8  # tokens of a prompt that decide how the first new ones are written
_HALF = "\ufffd"  # stands for a character of which some bytes are still to come


class Follower:
    """Follows one text.

    Attributes:
      prompt: the text of the prompt, special tokens included.
      text: what is written so far, without a stop string.
      stopped: after how many tokens a stop string came; None as long as none did.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Int32[ndarray, " P"],
        stop_strings: Sequence[str],
        stop_tokens: Sequence[int],
        hand_on: Callable[[str], object] | None,
    ):
        self.text = ""
        self.stopped: int | None = None
        self._tokenizer = tokenizer
        self.prompt = _decoded(tokenizer, prompt.tolist())
        self._before = prompt[-_BEFORE:].tolist()
        self._before_text = _decoded(tokenizer, self._before)
        self._stop_strings = tuple(stop_strings)
        self._stop_tokens = frozenset(stop_tokens)
        self._hand_on = hand_on
        self._tokens: list[int] = []
        self._handed = 0

    def take(self, tokens: Int32[ndarray, " n"], *, ended: bool) -> None:
        """Takes all tokens so far; `ended` says that no more will come."""
        new = [int(token) for token in tokens[len(self._tokens) :]]
        if self.stopped is not None:
            return
        step = 1 if self._stop_strings else max(len(new), 1)
        for at in range(0, len(new), step):
            self._tokens += new[at : at + step]
            self.text = self._written()
            if (found := self._first_stop()) is not None:
                self.text, self.stopped = self.text[:found], len(self._tokens)
                break
        self._hand(whole=ended or self.stopped is not None)

    def _written(self) -> str:
        """Returns the text of the new tokens as it stands behind the prompt: by
        themselves, some tokenizers write no space in front of them.
        """
        ended = bool(self._tokens) and self._tokens[-1] in self._stop_tokens
        own = self._tokens[:-1] if ended else self._tokens
        whole, before = _decoded(self._tokenizer, self._before + own), self._before_text
        same = 0
        for ours, theirs in zip(whole, before, strict=False):
            if ours != theirs:
                break
            same += 1
        return whole[same:]

    def pieces(self) -> tuple[str, ...]:
        """Returns what each token adds to the text: together they are the text. A
        character of several tokens counts to the last of them.
        """
        ends, before = [0], self._before
        for token in self._tokens:
            longer = [*before, token]
            added = len(self._whole(longer)) - len(self._whole(before))
            ends.append(ends[-1] + max(added, 0))
            before = longer[-_BEFORE:]
        ends[-1] = len(self.text)
        return tuple(self.text[start:end] for start, end in itertools.pairwise(ends))

    def _whole(self, tokens: list[int]) -> str:
        """Returns the text of tokens without a character of which bytes are to come."""
        return _decoded(self._tokenizer, tokens).rstrip(_HALF)

    def _first_stop(self) -> int | None:
        found = [self.text.find(string) for string in self._stop_strings]
        return min((at for at in found if at >= 0), default=None)

    def _hand(self, *, whole: bool) -> None:
        """Hands on the text that cannot change any more."""
        if self._hand_on is None:
            return
        end = len(self.text)
        if not whole:
            end -= len(self.text) - len(self.text.rstrip(_HALF))
            end = min(end, *(self._held_from(string) for string in self._stop_strings), end)
        if end > self._handed:
            self._hand_on(self.text[self._handed : end])
            self._handed = end

    def _held_from(self, string: str) -> int:
        """Returns where the text may be the beginning of a stop string."""
        for size in range(min(len(string) - 1, len(self.text)), 0, -1):
            if self.text.endswith(string[:size]):
                return len(self.text) - size
        return len(self.text)


def _decoded(tokenizer: Tokenizer, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens))
