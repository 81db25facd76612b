"""Removed blocks, and what stands in for them, as the `sites` of `jmat.run`.

Consecutive removed blocks form one *stretch* (start, stop): blocks start .. stop − 1,
which turn h_start into h_stop. What stands in for a stretch is one map:

| method | stands in for the stretch | |
|---|---|---|
| `delete` | `h_start` | no map |
| `map`, `distil` | `h_start @ W (+ b)` | `W [D, D]` |
| `merge` | `h_start + a @ C (+ c)`, a: neurons of the FFN before it | `C [F, D]`; see `merge` |
"""

import dataclasses
import functools
from collections.abc import Collection, Mapping

from jaxtyping import Array, Float

from jmat.maps.types import Identity, Linear
from jmat.models.family import Transformer
from jmat.models.layers import FeedForward
from jmat.models.sites import Site
from jmat.runtime.annotations import Leaf
from jmat.runtime.pytrees import register_dataclass

METHODS = ("delete", "map", "distil", "merge")

Stretch = tuple[int, int]  # the first block removed, and the first one after it that is kept


@functools.partial(register_dataclass, data_fields=["ffn", "extra"], meta_fields=[])
@dataclasses.dataclass(frozen=True, eq=False)
class FfnPlus:
    """Computes a feed-forward part whose hidden activations are read once more:
    `ffn(x) + extra(hidden(x))`.
    """

    ffn: Leaf[FeedForward]
    extra: Linear

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        hidden = self.ffn.hidden(x)
        return self.ffn.down(hidden) + self.extra(hidden)


def stretches(removed: Collection[int]) -> list[Stretch]:
    """Returns the removed blocks, in any order, as stretches, rising: {5, 2, 6} → [(2,
    3), (5, 7)].
    """
    found: list[Stretch] = []
    for block in sorted(removed):
        if found and found[-1][1] == block:
            found[-1] = (found[-1][0], block + 1)
        else:
            found.append((block, block + 1))
    return found


def label(removed: Collection[int]) -> str:
    """Returns the removed blocks as people read them: `2,5-6`; `none`."""
    parts = [
        f"{start}" if stop == start + 1 else f"{start}-{stop - 1}"
        for start, stop in stretches(removed)
    ]
    return ",".join(parts) or "none"


def stand_ins(
    model: Transformer, method: str, removed: Collection[int], maps: Mapping[Stretch, Linear]
) -> dict[str, Site]:
    """Returns the `sites` with which `jmat.run` leaves the removed blocks out. Any
    choice of blocks runs the same programs.

    Args:
      model: the whole model.
      method: one of `METHODS`.
      removed: 0-based blocks.
      maps: of every stretch; none for `delete`.
    """
    sites: dict[str, Site] = {f"block.{i}": Identity() for i in sorted(removed)}
    for (start, _), linear in maps.items():
        if method == "merge":
            sites[f"block.{start - 1}.ffn"] = FfnPlus(model.blocks[start - 1].ffn, linear)
        else:
            sites[f"block.{start}"] = linear
    return sites


def first_changed(sites: Mapping[str, Site], layers: int) -> int:
    """Returns the first block that differs from the whole model's; L where none does."""
    return min((int(name.split(".")[1]) for name in sites), default=layers)
