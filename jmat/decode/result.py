"""Defines `Generated`: what `jmat.generate` returns."""

import dataclasses
import html

import numpy as np
from jaxtyping import Float32, Int32
from numpy import ndarray

from jmat.decode.coloured import chips, counted, legend
from jmat.decode.draft import DraftCounts
from jmat.decode.exits import TokenExits
from jmat.runtime.errors import printable

_MOST_TEXTS, _MOST_CHARACTERS = 8, 300  # that are shown


@dataclasses.dataclass(frozen=True, eq=False)
class Generated:
    """Holds texts that a model wrote, one for each prompt.

    Attributes:
      prompts: token ids of each prompt, special tokens included.
      tokens: new token ids of each text, with the stop token where one ended it.
      reasons: why each text ended: "stop token", "stop string" or "length".
      texts: the new text behind each prompt, without the stop token or the stop string;
        None without a tokenizer.
      prompt_texts: the prompts as the model read them; None without a tokenizer.
      scores: the natural logarithm of each new token's probability in the model, before
        temperature and the like; None where they were not asked for.
      drafts: how often each text was checked, how many tokens were drafted, and how
        many of these accepted; None where nothing was drafted.
      exits: at which layer each token left; None where none could.
    """

    prompts: tuple[Int32[ndarray, " _"], ...]
    tokens: tuple[Int32[ndarray, " _"], ...]
    reasons: tuple[str, ...]
    texts: tuple[str, ...] | None = None
    prompt_texts: tuple[str, ...] | None = None
    scores: tuple[Float32[ndarray, " _"], ...] | None = None
    drafts: DraftCounts | None = None
    exits: TokenExits | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def sequences(self) -> tuple[Int32[ndarray, " _"], ...]:
        """Returns the token ids of each prompt and its new text, as `jmat.run` reads
        them.
        """
        pairs = zip(self.prompts, self.tokens, strict=True)
        return tuple(np.concatenate(pair) for pair in pairs)

    def __repr__(self) -> str:
        """Returns the texts, each behind the end of its prompt."""
        lines = [f"Generated: {self._size()}"]
        for row in range(min(len(self), _MOST_TEXTS)):
            prompt, text = self._shown(row)
            lines.append(
                f"  {row}: {printable(prompt, lines=False)}▸{printable(text, lines=False)}"
            )
            lines.append(f"     ({self._end(row)})")
        return "\n".join(lines + self._left_out())

    def _repr_html_(self) -> str:
        """Returns the same for a notebook: prompts grey, new text black, or coloured where
        tokens left early; all is escaped.
        """
        rows = []
        for row in range(min(len(self), _MOST_TEXTS)):
            prompt, text = (html.escape(printable(part)) for part in self._shown(row))
            if self.exits is not None:
                text = chips(self.exits, row, self._pieces(row), _MOST_CHARACTERS)
            rows.append(
                '<p style="white-space: pre-wrap; margin: 0.4em 0">'
                f'<span style="opacity: 0.55">{prompt}</span><b style="font-weight: 600">{text}</b>'
                f' <small style="opacity: 0.55">({html.escape(self._end(row))})</small></p>'
            )
        more = "".join(f"<p>{html.escape(line)}</p>" for line in self._left_out())
        key = "" if self.exits is None else f"<p>{legend(self.exits)}</p>"
        return f"<div><small>{html.escape(self._size())}</small>{key}{''.join(rows)}{more}</div>"

    def _size(self) -> str:
        count = sum(len(tokens) for tokens in self.tokens)
        texts = "1 text" if len(self) == 1 else f"{len(self)} texts"
        size = f"{texts}, {count:,} new token{'' if count == 1 else 's'}"
        if self.exits is not None:
            return f"{size}, which left after {self.exits.mean_layer:.1f} blocks on average"
        if self.drafts is None:
            return size
        cycles, drafted, accepted = (int(part.sum()) for part in self.drafts)
        checks = "1 check" if cycles == 1 else f"{cycles:,} checks"
        return f"{size} in {checks}; {accepted:,} of {drafted:,} drafted tokens accepted"

    def _shown(self, row: int) -> tuple[str, str]:
        """Returns the end of a prompt, and the beginning of its new text; ids where
        there is no text.
        """
        if self.texts is None or self.prompt_texts is None:
            prompt, text = (
                " ".join(map(str, ids.tolist())) for ids in (self.prompts[row], self.tokens[row])
            )
            prompt += " "
        else:
            prompt, text = self.prompt_texts[row], self.texts[row]
        prompt = prompt if len(prompt) <= _MOST_CHARACTERS else f"…{prompt[-_MOST_CHARACTERS:]}"
        return prompt, text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"

    def _pieces(self, row: int) -> tuple[str, ...]:
        """Returns what each token adds to a text; its id where there is no text."""
        if self.exits is not None and self.exits.pieces is not None:
            return self.exits.pieces[row]
        return tuple(f"{token} " for token in self.tokens[row])

    def _end(self, row: int) -> str:
        words = f"{len(self.tokens[row])} tokens, {self.reasons[row]}"
        if self.exits is not None:
            words += f"; {counted(self.exits, row)}"
        if self.scores is None or not len(self.scores[row]):
            return words
        return f"{words}, mean log-probability {self.scores[row].mean():.2f}"

    def _left_out(self) -> list[str]:
        more = len(self) - _MOST_TEXTS
        return [f"  … and {more} more"] if more > 0 else []
