"""Pruned models side by side: rows of results.json, and the figure."""

from collections.abc import Mapping, Sequence
from typing import Unpack

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jmat.data.text import Text
from jmat.metrics.predictions import Predictions
from jmat.models.family import Transformer
from jmat.report.axes import perplexity_axis, share_axis
from jmat.report.drawing import Drawing, Layout, Panel, draw, key, line
from jmat.report.names import METHODS, readable
from jmat.report.notes import noted
from jmat.report.rows import Content, Row
from jmat.runtime.errors import NothingToDrawError
from jmat.studies.prune.measure import compare_on_text, cost, quality_rows, time_per_token
from jmat.studies.prune.merge import fold
from jmat.studies.prune.plans import Pruned, Scored
from jmat.studies.prune.stand_ins import Stretch, label, stand_ins

METRICS = ("perplexity", "kl", "precision@1", "parameters", "flops", "microseconds_per_token")

_PANELS = {"perplexity": "perplexity", "kl": "KL (nats)", "precision@1": "precision@1"}
_LOOKS = {
    "delete": ("#D55E00", "s"),
    "map": ("#0072B2", "o"),
    "distil": ("#009E73", "^"),
    "merge": ("#CC79A7", "D"),
}


def pruned_rows(
    model: Transformer,
    text: Text,
    pruned: Mapping[str, Sequence[Pruned]],
    *,
    tokens_per_batch: int = 4096,
    seed: int = 0,
    progress: str | None = None,
) -> list[Row]:
    """Returns `METRICS` for every method and number of removed blocks, the whole model
    (0) included.

    A row names its blocks, 0-based: `blocks` as `2,5-6`, `order` as they went, `5,6,2`.
    FLOPs and microseconds are per token of the text.

    Args:
      model: the whole model.
      text: held-out sentences.
      pruned: method → pruned models, each with one block less than the one before.
      tokens_per_batch: padded tokens in one forward pass.
      seed: of the bootstrap.
      progress: what the progress bar says; None shows none.
    """
    plans = {
        (method, k): p for method, of in pruned.items() for k, p in enumerate([Pruned((), {}), *of])
    }
    labels = {
        (method, k): {
            "method": method,
            "removed": k,
            "blocks": label(p.removed),
            "order": ",".join(map(str, p.removed)),
        }
        for (method, k), p in plans.items()
    }
    sites = {(method, k): p.sites(model, method) for (method, k), p in plans.items()}
    predictions = Predictions()
    sums = compare_on_text(
        model,
        text,
        sites,
        tokens_per_batch=tokens_per_batch,
        predictions=predictions,
        progress=progress,
    )
    # A merged model does not compute what is merged a second time: time it as it will be used.
    timed = {
        (method, k): (fold(model, p.maps), stand_ins(model, "delete", p.removed, {}))
        if method == "merge"
        else (model, sites[method, k])
        for (method, k), p in plans.items()
    }
    seconds = time_per_token(model, text, timed)
    context = _mean_context(text, causal=model.config.causal)
    rows = noted(quality_rows(sums, labels, seed=seed), predictions.note())
    for (method, k), p in plans.items():
        saved = cost(model, method, p.removed, p.maps, context)
        saved["microseconds_per_token"] = seconds[method, k]
        rows += [
            {**labels[method, k], "metric": metric, "value": value}
            for metric, value in saved.items()
        ]
    return rows


def score_rows(method: str, score: str, scored: Sequence[Scored]) -> list[Row]:
    """Returns the scores behind each choice: from `layer` to `target`, after `step`
    blocks had been removed.
    """
    rows: list[Row] = []
    for of in dict.fromkeys((choice.after, tuple(choice.scores.items())) for choice in scored):
        for (layer, target), value in of[1]:
            row = {
                "method": method,
                "score": score,
                "step": len(of[0]),
                "layer": layer,
                "target": target,
            }
            rows.append(row | {"metric": "score", **_finite(value)})
    return rows


def block_score_rows(scores: Mapping[str, Mapping[Stretch, float]]) -> list[Row]:
    """Returns `block_score` of every block, from `layer` to `target`, by every score of
    `block_scores`.
    """
    return [
        {
            "metric": "block_score",
            "score": score,
            "layer": layer,
            "target": target,
            **_finite(value),
        }
        for score, of_score in scores.items()
        for (layer, target), value in of_score.items()
    ]


def _finite(score: float) -> Row:
    """Returns a score as a row's value; one that overflows is None, with a note."""
    if np.isfinite(score):
        return {"value": score}
    return {"value": None, "note": "without these blocks the scores overflow"}


def plot_prune(results: Content, **drawing: Unpack[Drawing]) -> Figure:
    """Draws perplexity, KL and top-1 agreement by the blocks that were removed, one
    line a method.

    Every set of blocks has a tick of its own, from few blocks to many: methods share a
    tick only where they removed the same blocks. The panels are called as the metrics.

    Raises:
      NothingToDrawError: there is nothing to draw.
    """
    rows = [row for row in results["rows"] if "removed" in row and row["metric"] in _PANELS]
    rows = [row for row in rows if row["value"] is not None]
    if not rows:
        raise NothingToDrawError("no rows of pruned models: nothing to draw")
    methods = [method for method in _LOOKS if any(row["method"] == method for row in rows)]
    rows.sort(key=lambda row: (row["removed"], methods.index(row["method"])))
    place = {blocks: x for x, blocks in enumerate(dict.fromkeys(row["blocks"] for row in rows))}
    names = [blocks.replace(",", ", ").replace("-", "–") for blocks in place]
    upright = sum(map(len, names)) > 30  # too many letters to stand side by side
    keys = [key(readable(method, METHODS), _LOOKS[method]) for method in methods]

    def panel(metric: str) -> Panel:
        def fill(ax: Axes) -> None:
            for method in methods:
                mine = [row for row in rows if (row["method"], row["metric"]) == (method, metric)]
                line(ax, [place[row["blocks"]] for row in mine], mine, _LOOKS[method])
            ax.set(title=_PANELS[metric], xlabel="blocks removed")
            ax.set_xticks(range(len(names)), names, rotation=90 if upright else 0)
            if metric == "perplexity":
                perplexity_axis(ax)
            else:
                if metric == "precision@1":
                    share_axis(ax)
                else:
                    ax.set_ylim(bottom=0)

        return Panel(fill, keys)

    # A tick's letters stand upright in a line of 9 points, or side by side.
    layout = Layout(
        panel=(max(2.6, 0.4 + 0.25 * len(names)), 3.0 if upright else 2.5),
        narrowest=max(1.9, 0.6 + (0.14 * len(names) if upright else 0.07 * sum(map(len, names)))),
        ratio=0.8 if upright else 0.65,
    )
    return draw({metric: panel(metric) for metric in _PANELS}, layout, **drawing)


def _mean_context(text: Text, *, causal: bool) -> float:
    """Returns how many tokens a token of the text looks at, on average."""
    lengths = text.split.lengths.astype(np.float64)
    seen = lengths * (lengths + 1) / 2 if causal else lengths**2
    return float(seen.sum() / lengths.sum())
