"""Shows tokens by the layer at which they left: as words for a terminal, and coloured for
a notebook.

Colours are those of peek's page. Text is dark on each of them (a contrast of 7.5 at
least), tokens of the whole model have none, and each token's title says its layer.
"""

import html
from collections.abc import Sequence

import numpy as np

from jmat.decode.exits import TokenExits
from jmat.runtime.errors import printable

_INK = "#191c22"
_COLD, _HOT = (0xFF, 0xFF, 0xFF), (0x6C, 0xB4, 0xF5)


def counted(exits: TokenExits, row: int) -> str:
    """Returns how many tokens of a text left at which layer, in words."""
    layers, times = np.unique(exits.layers[row], return_counts=True)
    pairs = [f"{layer}: {count}" for layer, count in zip(layers, times, strict=True)]
    return f"tokens by layer {', '.join(pairs)}"


def chips(exits: TokenExits, row: int, pieces: Sequence[str], most: int) -> str:
    """Returns HTML of a text's tokens, coloured, up to so many characters."""
    shown: list[str] = []
    left = most
    for piece, layer in zip(pieces, exits.layers[row].tolist(), strict=True):
        if left <= 0:
            return "".join(shown) + "…"
        left -= len(piece)
        text = html.escape(printable(piece))
        title = "whole model" if layer == exits.blocks else f"layer {layer}"
        shown.append(f'<span title="{title}"{_style(layer, exits.blocks)}>{text}</span>')
    return "".join(shown)


def legend(exits: TokenExits) -> str:
    """Returns HTML that says which colour is which layer."""
    keys = [
        f"<span{_style(layer, exits.blocks)}>&nbsp;{layer}&nbsp;</span>"
        for layer in exits.looked_at
    ]
    return f"<small>left at layer {' '.join(keys)}; not coloured: the whole model</small>"


def colour(layer: int, blocks: int) -> str:
    """Returns the colour of a layer: the fewer blocks ran, the stronger."""
    share = 1 - layer / blocks
    parts = (round(c + share * (h - c)) for c, h in zip(_COLD, _HOT, strict=True))
    return "#" + "".join(f"{part:02x}" for part in parts)


def _style(layer: int, blocks: int) -> str:
    if layer == blocks:
        return ""
    return f' style="background: {colour(layer, blocks)}; color: {_INK}"'
