"""Says what the page tells of each study: a heading, what was measured, figures, and
tables.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jmat.models.sites import SUBMODULES
from jmat.report.rows import Row
from jmat.studies.overview.tables import matrix, rows_table

# figures whose colours are figures: of a scale, not of lines with bands
COLOURED = ("r2", "errors")


class About(NamedTuple):
    """Holds what the page says of a study.

    Attributes:
      title: heading of its section.
      text: what is measured, and how to read it.
      figures: name of a figure → what it shows, for those who cannot see it.
      tables: returns its tables.
    """

    title: str
    text: str
    figures: Mapping[str, str]
    tables: Callable[[Sequence[Row]], str]


def _of(rows: Sequence[Row], **fields: str | tuple[str, ...]) -> list[Row]:
    """Returns the rows whose fields have these values, or one of several."""
    wanted = {key: value if isinstance(value, tuple) else (value,) for key, value in fields.items()}
    return [row for row in rows if all(row.get(key) in values for key, values in wanted.items())]


def _layer_jump(rows: Sequence[Row]) -> str:
    metrics = ("precision@1", "precision@5", "precision@10", "surprisal")
    return rows_table(rows, "Predictions by layer, with 95 % intervals", metrics=metrics)


def _r2(rows: Sequence[Row]) -> str:
    names = {"mat": "linear map", "id": "identity"}
    return "".join(
        matrix(
            _of(rows, map=kind, metric="r2"),
            f"Held-out R² of the {words}: from layer (down) to layer (across)",
        )
        for kind, words in names.items()
    )


def _submodules(rows: Sequence[Row]) -> str:
    replaced = [row for row in rows if row["map"] not in SUBMODULES]
    parts = _of(rows, map=SUBMODULES, metric="r2")
    return rows_table(
        replaced,
        "Predictions where parts are replaced from a layer on",
        metrics=("precision@1", "surprisal", "kl"),
    ) + rows_table(parts, "Held-out R² of each part's map alone, by block", columns=("map",))


def _early_exit(rows: Sequence[Row]) -> str:
    saved = ("layers_saved@0.95", "layers_saved@0.90")
    rule = [row for row in _of(rows, confidence="gap") if "lambda" in row]
    # the paper's code tries more of them for `id`
    both = {row["lambda"] for row in rule if row["map"] == "mat"}
    rule = [row for row in rule if row["lambda"] in both]
    clock = [
        {**row, "batch": f"{row['check']}, batch of {row['batch']}"}
        for row in _of(rows, metric="time_ratio")
    ]
    return (
        rows_table(
            rows, "Share of the blocks saved, by confidence", index="confidence", metrics=saved
        )
        + rows_table(
            rule,
            "The paper's rule, by its threshold",
            index="lambda",
            metrics=("layers", "precision@1", "flops_ratio", "flops_ratio_token"),
        )
        + rows_table(
            clock, "Measured time against the full pass", index="batch", columns=("metric",)
        )
    )


def _linearity(rows: Sequence[Row]) -> str:
    steps = [row for row in _of(rows, map="mat") if row.get("target") == row.get("layer", -2) + 1]
    scores = ("linearity", "linearity_adjusted", "linearity_held_out")
    without = ("linearity_without_residual", "linearity_without_residual_held_out")
    geometry = ("contribution_norm", "cosine")
    return (
        rows_table(
            steps,
            "Linearity of the step from a layer to the next",
            columns=("metric",),
            metrics=(*scores, *without),
        )
        + rows_table(
            steps, "What a block does to the stream", columns=("metric",), metrics=geometry
        )
        + rows_table(
            _of(rows, map=SUBMODULES, metric="linearity_held_out"),
            "Linearity of each part, held out, by block",
            columns=("map",),
        )
    )


def _prune(rows: Sequence[Row]) -> str:
    metrics = ("perplexity", "kl", "precision@1", "parameters", "flops", "microseconds_per_token")
    models = [{**row, "blocks": row["blocks"] or "none"} for row in rows if "blocks" in row]
    return rows_table(
        models,
        "Pruned models, by the blocks that are removed",
        index="blocks",
        columns=("metric", "method"),
        metrics=metrics,
    ) + rows_table(
        _of(rows, metric="block_score"),
        "Scores of every block of the whole model",
        columns=("score",),
    )


def _probe(rows: Sequence[Row]) -> str:
    most = "".join(
        f"<p>The most frequent label is right at {row['value']:.3f}.</p>"
        for row in rows
        if "layer" not in row
    )
    return (
        rows_table(rows, "Accuracy of the probe, by layer", metrics=("accuracy",), columns=("map",))
        + most
    )


SECTIONS: dict[str, About] = {
    "layer_jump": About(
        "What each layer already predicts",
        "A stream is read at layer l through a linear map to the last layer, or directly (logit "
        "lens). precision@k is the share of examples where the shortcut's top token is among the "
        "full model's top k.",
        {
            "layer_jump": (
                "precision@1, @5 and @10 and surprisal by layer, of the linear map and the logit "
                "lens"
            )
        },
        _layer_jump,
    ),
    "r2": About(
        "How much one layer explains of another",
        "Coefficient of determination on held-out text, averaged over the coordinates, for every "
        "pair of layers: of a fitted linear map, and of the earlier layer as it is. Below 0 the "
        "prediction is worse than the mean.",
        {
            "r2": (
                "two heat maps of R² by source and target layer, of the linear map and of the "
                "identity"
            )
        },
        _r2,
    ),
    "submodule_ablation": About(
        "Which sub-modules a linear map can stand in for",
        "From layer l on, all attentions, all feed-forward parts or all layer norms are replaced "
        "by linear maps of their inputs, fitted on the whole model; beside them the map that "
        "replaces whole blocks. Of models with more than nine blocks, ten layers are shown.",
        {
            "submodule_ablation": (
                "precision@1, @5 and @10 and surprisal by the layer from which parts are replaced"
            )
        },
        _submodules,
    ),
    "early_exit": About(
        "What an early exit saves",
        "The model stops at the first layer where the gap between the two largest probabilities is "
        "above a threshold. FLOPs count the checks; the time is that of a forward pass that truly "
        "stops, on this machine.",
        {
            "early_exit": (
                "precision@1 against blocks run and against FLOPs, of the linear map and the logit "
                "lens"
            )
        },
        _early_exit,
    ),
    "linearity": About(
        "How linear the steps are",
        "Share of the next layer's variance that an affine map explains, over all tokens: in "
        "sample as in the paper, adjusted for the number of tokens, and on held-out text; and the "
        "same of what a block adds to the stream (without residual).",
        {
            "linearity": "linearity of the step from each layer to the next, and of each sub-module",
            "geometry": "norm of what each block adds, cosine of neighbouring layers, and anisotropy, by layer",
            "errors": "histogram of the tokens' squared errors, by step",
        },
        _linearity,
    ),
    "prune": About(
        "Which blocks can go",
        "Blocks are removed in the order of a score. Each pruned model is held against the whole "
        "one on every prediction of the held-out text.",
        {
            "prune": (
                "perplexity, KL and precision@1 by the blocks that are removed, one line a method"
            )
        },
        _prune,
    ),
    "probe": About(
        "What a linear probe reads off each layer",
        "Accuracy of a linear classifier of the class of the token that the model predicts: word, "
        "piece of a word, number, punctuation, or end.",
        {"probe": "accuracy of the probe by layer, and of the most frequent label"},
        _probe,
    ),
    "peek": About(
        "Three sentences, layer by layer",
        "Each column is a token, each row a layer. A cell shows the token that is read there; the "
        "stronger its colour, the more probable. Underlined: the full model's own choice.",
        {},
        lambda rows: "",
    ),
}
