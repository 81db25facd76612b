"""Settings of studies that fit several kinds of maps from one set of statistics."""

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

from jmat.maps.kinds import parse_kinds
from jmat.models.config import ModelConfig
from jmat.studies.fitting import FitSettings

Given = TypeVar("Given", bound="KindSettings")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KindSettings(FitSettings):
    """Holds the settings of a fit of several kinds from layer to layer.

    Attributes:
      kinds: kinds of maps, such as `mat`, `ridge:1e-2` or `rank:64+int8`
        (`jmat.maps.kinds`).
    """

    kinds: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Raises ValueError for a setting that is not valid."""
        super().__post_init__()
        stored = [kind for kind in parse_kinds(self.kinds) if kind.needs_activations]
        if stored and self.route == "streaming":
            raise ValueError(
                f"route='streaming' stores no activations, which kind {str(stored[0])!r} needs."
            )
        if self.solver != "qr":
            raise ValueError(
                f"solver={self.solver!r}: all kinds are fitted from one set of moments; leave it "
                "out."
            )
        if self.intercept:
            raise ValueError(
                "intercept: each kind has an intercept or none; affine is mat with one."
            )

    def check(self, config: ModelConfig) -> None:
        """Raises ValueError for a rank above the model's width."""
        for kind in parse_kinds(self.kinds):
            kind.check_width(config.width, config.width)


def routed(settings: Given, *, store: bool = False) -> Given:
    """Returns settings whose route stores activations, where it is open and a kind needs
    them, or `store` says so.
    """
    needed = store or any(kind.needs_activations for kind in parse_kinds(settings.kinds))
    if settings.route == "auto" and needed:
        return dataclasses.replace(settings, route="memory")
    return settings
