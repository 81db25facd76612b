"""Ways to write text, each as the arguments of `jmat.generate`."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from jmat.decode.draft import Draft
from jmat.maps.compact import Map
from jmat.report.rows import Row
from jmat.runtime.annotations import Keywords

PLAIN = "plain"


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
    return Method(PLAIN, {}, {})


def draft_methods(
    maps: Mapping[tuple[str, int], Map], layers: Iterable[int], tokens: Sequence[int]
) -> list[Method]:
    """Returns drafts of every kind, from every layer, of every length.

    Args:
      maps: to the last layer, by kind and source layer.
      layers: from which to draft.
      tokens: lengths of drafts.
    """
    kinds = list(dict.fromkeys(kind for kind, _ in maps))
    return [
        Method(
            f"{kind}.{layer} x {length}",
            {"map": kind, "layer": layer, "tokens": length},
            {"draft": Draft(layer, maps[kind, layer], tokens=length)},
        )
        for kind in kinds
        for layer in layers
        for length in tokens
    ]
