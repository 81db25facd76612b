"""Puts the figures of several models together, family by family."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Unpack

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jmat.maps.kinds import MAT
from jmat.report.drawing import Drawing, Layout, Panel, draw, key, titled
from jmat.report.names import plain, readable
from jmat.report.plots import map_looks
from jmat.report.results import Results
from jmat.report.rows import Content, Row
from jmat.report.tables import format_table
from jmat.runtime.annotations import Fields
from jmat.runtime.errors import NothingToDrawError
from jmat.studies.map_zoo.plots import plot_bytes
from jmat.studies.map_zoo.rows import difference, front, of_kinds, rows_of_models

MODELS, BYTES = "map_zoo.png", "map_zoo_bytes.png"
_SHOWN = ("kl", difference("kl"), "precision@1", "r2", "linearity_held_out")


class Part(NamedTuple):
    """Holds the results of one model.

    Attributes:
      family: of the model, such as `gpt2`.
      content: what its results.json holds.
    """

    family: str
    content: Content


def combined(parts: Mapping[str, Part], config: Fields) -> Results:
    """Returns the results of several models as those of one run.

    Args:
      parts: by the model's name in tables and figures.
      config: the settings of the run.

    Returns:
      The rows of all models, each with `model` and `family`; models of one family stand
      behind one another, in the order of their first ones.
    """
    families = list(dict.fromkeys(part.family for part in parts.values()))
    order = sorted(parts, key=lambda name: families.index(parts[name].family))
    rows: list[Row] = [
        {"model": name, "family": parts[name].family, **row}
        for name in order
        for row in parts[name].content["rows"]
    ]
    return Results(
        "map_zoo",
        rows,
        config,
        {name: str(parts[name].content["model_hash"]) for name in order},
        {name: parts[name].content["text"] for name in order},
        tables=table,
        figures={MODELS: plot_models, BYTES: plot_bytes},
    )


def table(rows: Sequence[Row]) -> str:
    """Returns a table of the kinds for each model, family by family, and one of KL less
    that of `mat` for all.
    """
    tables = []
    for name, own in rows_of_models(rows).items():
        means = of_kinds(own)
        best = front(own)
        tables.append(
            f"{own[0]['family']}: {name}\n"
            + format_table(means, index="map", columns=("metric",), metrics=_SHOWN, intervals=True)
            + (f"\nnone is smaller and better than: {', '.join(best)}" if best else "")
        )
    metric = difference("kl")
    apart = [row for own in rows_of_models(rows).values() for row in of_kinds(own)]
    if any(row["metric"] == metric for row in apart):
        shown = format_table(
            apart, index="map", columns=("model",), metrics=(metric,), intervals=True
        )
        tables.append(f"{metric}, the paired difference from {MAT}, of all models\n{shown}")
    return "\n\n".join(tables)


def plot_models(results: Content, **drawing: Unpack[Drawing]) -> Figure:
    """Draws KL of every kind less that of `mat`, mean over layers: kinds down, a mark a
    model with its interval. The panel is called `kl_minus_mat`.

    Raises:
      NothingToDrawError: there is nothing to draw.
    """
    metric = difference("kl")
    by_model = {
        name: {
            row["map"]: row
            for row in of_kinds(own)
            if row["metric"] == metric and row["value"] is not None
        }
        for name, own in rows_of_models(results["rows"]).items()
    }
    kinds = list(dict.fromkeys(kind for own in by_model.values() for kind in own))
    if not kinds:
        raise NothingToDrawError(f"no rows of {metric}: nothing to draw")
    looks = map_looks([{"map": name} for name in by_model])

    def fill(panel: Axes) -> None:
        panel.axvline(0, color="0.6", linewidth=0.8)
        for number, (name, own) in enumerate(by_model.items()):
            colour, marker = looks[name]
            shift = 0.5 * ((number + 0.5) / len(by_model) - 0.5)
            for kind, row in own.items():
                at = kinds.index(kind) + shift
                if "low" in row:
                    panel.hlines(at, row["low"], row["high"], color=colour, linewidth=1)
                panel.plot([row["value"]], [at], color=colour, marker=marker, markersize=4)
        panel.set_yticks(range(len(kinds)), [readable(kind) for kind in kinds])
        panel.set_ylim(len(kinds) - 0.5, -0.5)
        panel.set_xscale("symlog", linthresh=0.1)
        panel.margins(x=0.06)
        panel.set(xlabel="nats", title=f"KL less that of the {readable(MAT)}, mean over layers")

    keys = [key(plain(name), look, linestyle="none") for name, look in looks.items()]
    layout = Layout(panel=(6.5, 1.5 + 0.25 * len(kinds)), narrowest=3.0, ratio=1.0)
    panels = {metric: Panel(fill, keys)}
    return draw(panels, layout, **titled(drawing, "kinds of maps of several models"))
