"""Fits several kinds of maps to the final layer from some examples of one corpus, and
shows how far each kind travels and how much text it takes.
"""

from collections.abc import Iterable, Sequence
from typing import Unpack

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from jmat.maps.kinds import IDENTITY, Kind
from jmat.models.family import Transformer
from jmat.models.sites import stream_sites
from jmat.report.axes import nats_axis
from jmat.report.drawing import Drawing, Panel, draw, key, line
from jmat.report.names import metric_name, readable
from jmat.report.plots import map_looks
from jmat.report.rows import Content, Row
from jmat.report.tables import format_table
from jmat.runtime.progress import track
from jmat.studies.cross_corpus.means import KL, MINUS_OWN, R2
from jmat.studies.cross_corpus.plots import (
    corpora_in,
    corpus_labels,
    curve_layout,
    draw_pairs,
    size_axis,
)
from jmat.studies.cross_corpus.rows import Fit, Streams, over_layers
from jmat.studies.map_zoo.fits import fit_zoo
from jmat.studies.map_zoo.jumps import stream_jumps

_CURVES = (KL, "precision@1", R2)
_NOTHING_FITTED = "–"


def fit_kinds(
    model: Transformer,
    corpus: str,
    streams: Streams,
    kinds: Sequence[Kind],
    sizes: Iterable[int],
    *,
    seed: int = 0,
    progress: str | None = None,
) -> list[Fit]:
    """Fits every kind from every layer to the last, from so many examples each; the fewer
    are among the more, and the same for all kinds.
    """
    final = max(streams)
    order = np.random.default_rng(seed).permutation(len(streams[final]))
    sites = stream_sites(final)
    jumps = stream_jumps(final, sorted(streams.keys() - {final}), [final])
    fits: list[Fit] = []
    for n in track(list(sizes), progress):
        acts = {sites[layer]: stream[order[:n]] for layer, stream in streams.items()}
        found = fit_zoo(model, acts, kinds, jumps, seed=seed)
        for kind in map(str, kinds):
            maps = {jump.layer: found.maps[kind, jump] for jump in jumps}
            fits.append(Fit(corpus, n, maps, "", kind))
    return fits


def kinds_table(rows: Sequence[Row]) -> str:
    """Returns tables of means over the layers: KL of every kind by corpora, its difference
    from the map fitted on the evaluation corpus, and KL over the examples fitted on.
    """
    means = [
        {**row, "fit_corpus": row["fit_corpus"] or _NOTHING_FITTED} for row in over_layers(rows)
    ]
    most = max(row["n_fit"] for row in means)
    largest = [row for row in means if row["n_fit"] in (0, most)]
    tables = [
        f"KL in nats, mean over layers; fitted on {most} examples; evaluation corpus, fit corpus\n"
        + _by_corpora(largest, KL)
    ]
    if any(row["metric"] == KL + MINUS_OWN for row in means):
        tables.append(
            "its difference from the map of the kind that is fitted on the evaluation corpus\n"
            + _by_corpora(largest, KL + MINUS_OWN)
        )
    for corpus in corpora_in(means):
        at_home = [
            row
            for row in means
            if row["eval_corpus"] == corpus and row["fit_corpus"] in (corpus, _NOTHING_FITTED)
        ]
        tables.append(
            f"KL on {corpus} over its examples fitted on (0: none are)\n"
            + format_table(at_home, index="map", columns=("n_fit",), metrics=(KL,), intervals=True)
        )
    return "\n\n".join(tables)


def _by_corpora(rows: Sequence[Row], metric: str) -> str:
    return format_table(
        rows,
        index="map",
        columns=("eval_corpus", "fit_corpus"),
        metrics=(metric,),
        intervals=True,
    )


def plot_kind_pairs(results: Content, **drawing: Unpack[Drawing]) -> Figure:
    """Draws heat maps of precision@1, a panel a kind: fit corpus down, evaluation corpus
    across, mean over the layers. The panels are called as the kinds.
    """
    rows = [row for row in over_layers(results["rows"]) if row["metric"] == "precision@1"]
    fitted = [row for row in rows if row["map"] != IDENTITY]
    panels = {
        kind: (readable(kind), [row for row in rows if row["map"] in (kind, IDENTITY)])
        for kind in dict.fromkeys(row["map"] for row in fitted)
    }
    return draw_pairs(panels, **drawing)


def plot_kind_curves(results: Content, **drawing: Unpack[Drawing]) -> Figure:
    """Draws means over layers against the examples fitted on: a panel a metric and
    corpus, a line a kind, fitted and evaluated on that corpus.

    The panels are called by metric and corpus, such as "kl on docs".
    """
    rows = [row for row in over_layers(results["rows"]) if row["value"] is not None]
    fitted = [row for row in rows if row["fit_corpus"] == row["eval_corpus"]]
    corpora = corpora_in(rows)
    labels, looks = corpus_labels(corpora), map_looks(fitted)
    dotted = Line2D([], [], color="0.5", linestyle=":", label=readable(IDENTITY))
    keys = [*(key(readable(kind), look) for kind, look in looks.items()), dotted]

    def panel(corpus: str, metric: str) -> Panel:
        def fill(ax: Axes) -> None:
            mine = [r for r in rows if r["eval_corpus"] == corpus and r["metric"] == metric]
            for kind, look in looks.items():
                curve = [r for r in mine if (r["map"], r["fit_corpus"]) == (kind, corpus)]
                curve.sort(key=lambda row: row["n_fit"])
                line(ax, [r["n_fit"] for r in curve], curve, look)
            for row in (r for r in mine if r["map"] == IDENTITY):
                ax.axhline(row["value"], color="0.5", linestyle=":")
            if metric == KL:
                nats_axis(ax)
                ax.set_ylabel("nats")
            if metric == R2:
                ax.set_ylim(max(ax.get_ylim()[0], -1), 1.02)
            ax.set_title(f"{metric_name(metric)}\non {labels[corpus]}")
            size_axis(ax, rows)

        return Panel(fill, keys)

    panels = {
        f"{metric} on {labels[corpus]}": panel(corpus, metric)
        for corpus in corpora
        for metric in _CURVES
    }
    return draw(panels, curve_layout(len(_CURVES)), **drawing)
