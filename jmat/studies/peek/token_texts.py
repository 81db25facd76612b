"""Names tokens for readers: byte-level pieces as text, spaces and single bytes visible."""

import math
from typing import Any

import tokenizers.decoders
from jaxtyping import Array, Float, Int
from numpy import ndarray

from jmat.data.encoding import Tokenizer, token_name

# The K most probable tokens, most probable first: [token, probability]; [NOTHING, None] where there
# are none.
Top = list[list[Any]]
NOTHING = "—"  # where a reading is no distribution: NaN or infinity in its logits
_SIGNS = {" ": "·", "\n": "⏎", "\t": "⇥"}


class TokenTexts:
    """Names tokens: ` the` for GPT-2's `Ġthe`, `\\xe2` for a byte that alone is no
    text, `##ing` as BERT has it.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids)
        self._bytes = _byte_letters() if _is_byte_level(tokenizer) else None
        self._known: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._name(token)
        return self._known[token]

    def top(
        self, ids: Int[Array | ndarray, " K"], probabilities: Float[Array | ndarray, " K"]
    ) -> Top:
        """Returns tokens with their probabilities, to six digits."""
        shares = [rounded(p, 6) for p in probabilities.tolist()]
        return [
            [NOTHING if share is None else self(token), share]
            for token, share in zip(ids.tolist(), shares, strict=True)
        ]

    def _name(self, token: int) -> str:
        piece = token_name(token, self._tokenizer)
        if not piece:  # the embedding has more rows than the tokenizer has tokens
            return f"[token {token}]"
        if token in self._special:
            return piece
        if self._bytes is not None and all(letter in self._bytes for letter in piece):
            return bytes(self._bytes[letter] for letter in piece).decode(
                "utf-8", "backslashreplace"
            )
        return piece.replace("▁", " ")  # SentencePiece's space


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)  # of a fast tokenizer
    return isinstance(getattr(backend, "decoder", None), tokenizers.decoders.ByteLevel)


def _byte_letters() -> dict[str, int]:
    """Returns GPT-2's letter for each byte: itself where that is visible in Latin-1,
    else the next free one from U+0100 on.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {
        chr(0x100 + n): byte for n, byte in enumerate(hidden)
    }


def visible(token: str) -> str:
    """Returns a token as people can see it: signs for spaces and ends of lines, escapes
    for what has no glyph.
    """
    letters = (
        _SIGNS.get(c) or (c if c.isprintable() else c.encode("unicode_escape").decode())
        for c in token
    )
    return "".join(letters) or "(empty)"


def rounded(value: float, digits: int) -> float | None:
    """Returns a value to some digits; None where it is not finite, since JSON has no
    such numbers.
    """
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None
