"""Names the types of what results.json holds."""

from collections.abc import Mapping, Sequence
from typing import Any, Required, TypedDict

from jmat.runtime.annotations import Fields

# A row of results.json, or some fields of one: text, numbers and None, by key.
Row = Mapping[str, Any]


class Content(TypedDict, total=False):
    """Holds what results.json holds; a figure is drawn from its rows and its config.

    Attributes:
      experiment: name of the study, such as "layer_jump".
      config: the settings, with `model`, the model's name.
      environment: versions and devices.
      model_hash: fingerprint of the model's weights, or of several models by name.
      text: what was read: its source, and fingerprints of what was fitted and evaluated
        on.
      rows: one flat dict a figure.
      rows_sha256: fingerprint of the rows.
    """

    experiment: str
    config: Required[Fields]
    environment: Fields
    model_hash: str | Mapping[str, str] | None
    text: Fields | None
    rows: Required[Sequence[Row]]
    rows_sha256: str
