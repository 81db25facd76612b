"""Ways to write text, each as the arguments of `jmat.generate`."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from jaxtyping import Int
from numpy import ndarray

from jmat.decode.draft import Draft
from jmat.decode.exits import Exits
from jmat.decode.lookup import Lookup
from jmat.maps.carry import Carry
from jmat.maps.compact import Map
from jmat.report.rows import Row
from jmat.runtime.annotations import Keywords

PLAIN, DRAFT, CARRY, LOOKUP, EXIT = "plain", "draft", "carry", "lookup", "exit"
WAYS = (DRAFT, CARRY, LOOKUP, EXIT)  # beside plain text


@dataclasses.dataclass(frozen=True)
class Method:
    """Holds one way to write text.

    Attributes:
      name: of the method in tables, such as `affine.6 x 2`.
      label: the fields that its rows have beside the name.
      arguments: of `jmat.generate`.
    """

    name: str
    label: Row
    arguments: Keywords

    @property
    def fields(self) -> Row:
        """Returns the fields that tell the method's rows from those of others."""
        return {"method": self.name, **self.label}


def plain_method() -> Method:
    """Returns the method in which the whole model writes each token."""
    return Method(PLAIN, {"way": PLAIN}, {})


def draft_methods(
    maps: Mapping[tuple[str, int], Map | Carry],
    layers: Iterable[int],
    tokens: Sequence[int],
    *,
    way: str = DRAFT,
    words: Int[ndarray, " W"] | None = None,
) -> list[Method]:
    """Returns drafts of every kind, from every layer, of every length.

    Args:
      maps: to the last layer, by kind and source layer.
      layers: from which to draft.
      tokens: lengths of drafts.
      way: `draft` or `carry`.
      words: that are drafted; None: all.
    """
    kinds = list(dict.fromkeys(kind for kind, _ in maps))
    return [
        Method(
            f"{kind}.{layer} x {length}",
            {"way": way, "map": kind, "layer": layer, "tokens": length},
            {"draft": Draft(layer, maps[kind, layer], tokens=length, words=words)},
        )
        for kind in kinds
        for layer in layers
        for length in tokens
    ]


def lookup_methods(tokens: Sequence[int]) -> list[Method]:
    """Returns drafts that are copied from the text, of every length."""
    return [
        Method(
            f"{LOOKUP} x {length}",
            {"way": LOOKUP, "map": LOOKUP, "tokens": length},
            {"draft": Lookup(tokens=length)},
        )
        for length in tokens
    ]


def exit_methods(
    fitted: Mapping[tuple[str, str], Exits], thresholds: Sequence[float | int]
) -> list[Method]:
    """Returns early exits of every kind and fill, with every threshold.

    Args:
      fitted: exits by kind of map and fill.
      thresholds: of their confidence.
    """
    return [
        Method(
            f"{EXIT} {kind} {fill} > {threshold:g}",
            {"way": EXIT, "map": kind, "fill": fill, "threshold": float(threshold)},
            {"exits": dataclasses.replace(exits, threshold=threshold)},
        )
        for (kind, fill), exits in fitted.items()
        for threshold in thresholds
    ]
