"""Selects the rows of each measuring experiment that `regularizer_study` copies into
its own results.
"""

from collections.abc import Mapping, Sequence

from jmat.runtime.annotations import Fields, JsonObject

# Experiment → the rows of its results that the study reports: metric → the map that they must be
# of.
MEASURES: dict[str, dict[str, tuple[str, ...]]] = {
    "linearity": {"linearity": ("mat",), "linearity_without_residual": ("mat",)},
    "probe": {"accuracy": ("ridge",)},
    "layer_jump": {"precision@1": ("mat",)},
    "early_exit": {"layers_saved@0.95": ("mat", "id", "mat - id")},
}
BY_LAYER = ("linearity", "linearity_without_residual", "accuracy", "precision@1")


def reported(name: str, results: Fields, wanted: Mapping[str, Sequence[str]]) -> list[JsonObject]:
    """Returns the rows to report, under the variant's name; where several maps are
    wanted, with the map's too.
    """
    rows = []
    for row in results["rows"]:
        maps = wanted.get(row["metric"], ())
        if row.get("map") not in maps or row.get("confidence", "gap") != "gap":
            continue
        label = f"{name}, {row['map']}" if len(maps) > 1 else name
        target = {"target": row.get("target", row["layer"])} if "layer" in row else {}
        rows.append({**row, "map": label, "of": row.get("map"), **target})
    return rows
