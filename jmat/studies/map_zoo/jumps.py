"""Names the jumps that maps are fitted for: from one layer to another, or from the
input of a part of every block to its output.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jmat.maps.kinds import Kind
from jmat.models.sites import SUBMODULES, stream_sites
from jmat.report.rows import Row
from jmat.runtime.checks import check_several, chosen_layers

STREAM, ALL = "stream", "all"
SITES = (STREAM, *SUBMODULES)
_PAIR = re.compile(r"(\d{1,6})-(\d{1,6})", re.ASCII)


class Jump(NamedTuple):
    """Holds what a map reads and what it predicts.

    Attributes:
      source: site.
      target: site.
      layer: of the source stream, from 0; of a part, its block.
      end: layer of the target stream; of a part, its block, too.
      part: `stream`, or the part of the block: `ln_1`, `attn`, `ln_2` or `ffn`.
    """

    source: str
    target: str
    layer: int
    end: int
    part: str = STREAM

    @property
    def label(self) -> Row:
        """Returns the fields by which rows of results.json name the jump."""
        return {"layer": self.layer, "target": self.end, **self._part}

    @property
    def group(self) -> Row:
        """Returns the fields of rows on all jumps to one layer, or of one part.

        Figures are averaged over such a group, and a pooled kind has one map for it.
        """
        return self._part or {"target": self.end}

    @property
    def _part(self) -> Row:
        return {} if self.part == STREAM else {"site": self.part}

    def map_name(self, kind: str) -> str:
        """Returns the name of a map in files: `mat.3.8`, or `mat.attn.3` of a part."""
        if self.part == STREAM:
            return f"{kind}.{self.layer}.{self.end}"
        return f"{kind}.{self.part}.{self.layer}"

    def takes(self, kind: Kind, layers: int) -> bool:
        """Returns whether there is a map of a kind for this jump in a model of so many
        layers: one that reads the head leads to the final stream alone.
        """
        return not kind.entry.needs_head or self.target == stream_sites(layers)[-1]


def stream_jumps(layers: int, sources: Iterable[int], ends: Iterable[int]) -> list[Jump]:
    """Returns the jumps from each source layer to each later one among `ends`, in the
    order of `ends`.
    """
    names, held = stream_sites(layers), list(sources)
    return [Jump(names[i], names[j], i, j) for j in ends for i in held if i < j]


def chosen_jumps(
    layers: int, *, pairs: Sequence[str] = (), sources: Sequence[int | str] = (), site: str = STREAM
) -> list[Jump]:
    """Returns the jumps that settings name.

    Args:
      layers: L of the model.
      pairs: `all` for every layer and every later one, or pairs such as `0-4`; none:
        every layer and the final one.
      sources: source layers, or blocks of a part; none: all.
      site: `stream`, or a part of every block.

    Raises:
      ValueError: a layer that the model does not have, a pair that is none, pairs of
        parts, or pairs beside source layers that they name already.
    """
    if site != STREAM:
        if pairs:
            raise ValueError(
                f"pairs are of layers, and the maps of site={site!r} stay inside a block: leave "
                "out one of the two."
            )
        return [
            Jump(f"block.{i}.{site}.in", f"block.{i}.{site}", i, i, site)
            for i in chosen_layers(sources, layers - 1)
        ]
    check_several("pairs", pairs)
    if not pairs or list(pairs) == [ALL]:
        return stream_jumps(
            layers, chosen_layers(sources, layers - 1), range(1, layers + 1) if pairs else [layers]
        )
    if sources:
        raise ValueError("pairs name their source layers: leave out layers, or give pairs=all.")
    named = dict.fromkeys(_pair(text, layers) for text in pairs)
    names = stream_sites(layers)
    return [Jump(names[i], names[j], i, j) for i, j in sorted(named, key=lambda pair: pair[::-1])]


def _pair(text: str, layers: int) -> tuple[int, int]:
    match = _PAIR.fullmatch(str(text).strip())
    i, j = (int(match[1]), int(match[2])) if match else (0, 0)
    if not i < j <= layers:
        raise ValueError(
            f"pairs has {text!r}; expected two layers of 0 .. {layers}, the first one before the "
            f"other, such as 0-{layers}, or {ALL} alone."
        )
    return i, j


def fitted_kinds(kinds: Sequence[Kind], jumps: Sequence[Jump], layers: int) -> list[Kind]:
    """Returns the kinds of which there are maps for some jump.

    Raises:
      ValueError: there is none.
    """
    fitted = [kind for kind in kinds if any(jump.takes(kind, layers) for jump in jumps)]
    if not fitted:
        raise ValueError(
            f"kind {str(kinds[0])!r} leads to the final stream of a model with a head, and no "
            "jump ends there: give other kinds, or other pairs."
        )
    return fitted


def grouped(jumps: Iterable[Jump]) -> list[list[Jump]]:
    """Returns the jumps to each layer, or of each part, each jump once."""
    groups: dict[str, list[Jump]] = {}
    for jump in dict.fromkeys(jumps):
        groups.setdefault(str(jump.group), []).append(jump)
    return list(groups.values())
