"""Compares kinds of maps from every layer to the final one: what each predicts, and
what it costs.
"""

import dataclasses
from collections.abc import Sequence

from jaxtyping import Shaped
from numpy import ndarray

from jmat.capture.future import future_sums
from jmat.data.encoding import Tokenizer
from jmat.data.examples import Examples, Split, target_tokens
from jmat.maps.kinds import MAT, parse_kinds
from jmat.maps.weighting import EQUAL, WEIGHTS
from jmat.metrics.predictions import Predictions
from jmat.models.config import ModelConfig
from jmat.models.family import Transformer
from jmat.models.flops import block_flops
from jmat.models.sites import stream_sites
from jmat.report.notes import noted
from jmat.report.results import Results
from jmat.report.rows import Row
from jmat.report.tables import format_table
from jmat.runtime.annotations import Keywords
from jmat.runtime.checks import check_choice, chosen_layers
from jmat.studies.evaluation import evaluate, metric_rows
from jmat.studies.fitting import FitSettings, fit_split, read_statistics
from jmat.studies.map_zoo.fits import fit_seconds, fit_zoo
from jmat.studies.map_zoo.jacobians import jacobian_rows, read_jacobians
from jmat.studies.map_zoo.plots import plot_bytes, plot_layers
from jmat.studies.map_zoo.rows import (
    COSTS,
    cost_rows,
    difference,
    front,
    paired_rows,
    r2_rows,
    r2_scores,
    with_weights,
)
from jmat.studies.r2 import resamples
from jmat.studies.settings import Say, read_subject, report

LAYERS, BYTES = "map_zoo.png", "map_zoo_bytes.png"
KINDS = (
    "id mean diag hadamard orthogonal njtc:8 rank:8 rank:32 rank_logit:32 one_jump:32 mat affine "
    "ridge toward_id rank:32+int8 mat+int8 affine+int8 tuned mlp:64"
).split()
_SHOWN = ("kl", difference("kl"), "precision@1", "surprisal", "r2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(FitSettings):
    """Holds the settings of the study.

    Attributes:
      kinds: kinds of maps, such as `mat`, `ridge:1e-2` or `rank:64+int8`
        (`jmat.maps.kinds`).
      layers: source layers, of 0 .. L − 1; none: all.
      weights: of the tokens in closed forms: `equal`, `norms` or `cosine`
        (`jmat.maps.weighting`).
      clock: also time the fit of each kind; then two runs differ in these rows.
    """

    kinds: Sequence[str] = tuple(KINDS)
    layers: Sequence[int | str] = ()
    weights: str = EQUAL
    clock: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for a setting that is not valid."""
        super().__post_init__()
        check_choice("weights", self.weights, WEIGHTS)
        if self.weights != EQUAL and self.route == "streaming":
            raise ValueError(
                f"weights={self.weights!r} needs stored activations: leave out route='streaming'."
            )
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
        """Raises ValueError for a rank above the model's width, and for a layer that it
        does not have.
        """
        for kind in parse_kinds(self.kinds):
            kind.check_width(config.width, config.width)
        chosen_layers(self.layers, config.layers - 1)


def run(
    model: Transformer,
    examples: Examples | Sequence[str],
    options: Options = Options(),
    *,
    tokenizer: Tokenizer | None = None,
    say: Say | None = None,
) -> Results:
    """Fits every kind of map from every layer to the final one, and evaluates all.

    Args:
      model: as `jmat.load` returns it.
      examples: examples, or texts, of which three quarters are fitted on.
      options: the settings.
      tokenizer: the model's; texts and masked models need it.
      say: prints what happens now, beside progress bars; None: quiet.

    Returns:
      Rows for every kind and layer: precision@k, recall@k, surprisal and KL (nats)
      against the full model, perplexity of the text's own tokens, and r2. Rows without
      a layer: means over the layers, and the costs of each kind. Metrics that end in
      `_minus_mat` are paired differences. The maps, such as `rank:32.3.8`.

    Raises:
      ValueError: a kind that the model cannot have, or a layer; as
        `jmat.studies.settings.read_subject`.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> texts = [f"Entry {i} holds a list of {i % 7} values." for i in range(40)]
      >>> zoo = jmat.studies.map_zoo
      >>> options = zoo.Options(kinds=["mat", "affine", "rank:8"], layers=[2, 4])
      >>> results = zoo.run(model, texts, options, tokenizer=tokenizer)
      >>> figure, table = results.plot(), results.table()
    """
    subject = read_subject(model, examples, tokenizer, options, say=say)
    options.check(model.config)
    L, held_out = model.config.layers, subject.examples.eval
    kinds, layers = parse_kinds(options.kinds), chosen_layers(options.layers, L - 1)
    needed = options.weights != EQUAL or any(kind.needs_activations for kind in kinds)
    if options.route == "auto" and needed:
        options = dataclasses.replace(options, route="memory")
    jacobians, passes = read_jacobians(subject, options, kinds, layers)
    statistics, seed = read_statistics(subject, options, "final"), options.seed
    fitting: Keywords = {"weights": options.weights, "seed": seed}
    targets_of_kinds: Keywords = {"jacobians": jacobians, "future": None}
    if any(kind.entry.sums_future for kind in kinds):
        targets_of_kinds["future"] = future_sums(
            model,
            fit_split(subject, options),
            stream_sites(L)[-1],
            tokens_per_batch=options.tokens_per_batch,
            progress=subject.bar("capture what follows"),
        )
    bar = subject.bar("fit")
    fits = fit_zoo(model, statistics, kinds, layers, progress=bar, **targets_of_kinds, **fitting)
    seconds = {}
    if options.clock:
        seconds = fit_seconds(model, statistics, kinds, layers, **fitting) | passes
    del statistics
    streams = subject.streams("eval")
    targets = target_tokens(held_out, masked=not model.config.causal)
    predictions, values = Predictions(), dict[tuple[str, int], dict[str, Shaped[ndarray, " N"]]]()
    for layer in layers:
        from_layer = {
            key: (stand_in, streams[layer])
            for key, stand_in in fits.maps.items()
            if key[1] == layer
        }
        bar = subject.bar(f"evaluate layer {layer}")
        collected = predictions if layer == layers[0] else None
        values |= evaluate(
            model, streams[L], from_layer, targets=targets, predictions=collected, progress=bar
        )
    drawn = resamples(held_out.positions, held_out.rows, seed=options.seed)
    rows = metric_rows(values, L, groups=held_out.rows, seed=options.seed)
    rows += paired_rows(values, L, groups=held_out.rows, seed=options.seed)
    rows = noted(rows, predictions.note())
    rows += r2_rows(r2_scores(fits.maps, streams, drawn), streams[L], drawn, L)
    block = float(block_flops(model.config, 1, _context(held_out, model.config)))
    rows += cost_rows(fits.maps, L, n_fit=fits.n, block=block, seconds=seconds)
    rows += jacobian_rows(jacobians, kinds, L)
    if options.weights != EQUAL:
        rows = with_weights(rows, kinds)
    named = {f"{kind}.{layer}.{L}": stand_in for (kind, layer), stand_in in fits.maps.items()}
    figures = {LAYERS: plot_layers, BYTES: plot_bytes}
    return report(
        "map_zoo", subject, options, rows, maps=named, n=fits.n, tables=table, figures=figures
    )


def _context(split: Split, config: ModelConfig) -> float:
    """Returns how many tokens an example's position looks at, on average."""
    return float((split.positions + 1 if config.causal else split.lengths[split.rows]).mean())


def table(rows: Sequence[Row]) -> str:
    """Returns a table of the kinds, means over layers beside costs, and one of KL by
    layer.
    """
    means = [row for row in rows if "layer" not in row]
    costs = [
        metric
        for metric in (*COSTS, "fit_seconds")
        if any(row["metric"] == metric for row in means)
    ]
    kinds = format_table(means, index="map", columns=("metric",), metrics=_SHOWN, intervals=True)
    spent = format_table(means, index="map", columns=("metric",), metrics=costs)
    by_layer = format_table(rows, index="layer", columns=("metric", "map"), metrics=("kl",))
    best = f"No kind is both smaller and better than one of these: {', '.join(front(rows))}."
    derived = [row for row in rows if row["metric"] == "relative_error"]
    if derived:
        columns = format_table(
            derived,
            index="layer",
            columns=("metric", "map"),
            metrics=("relative_error",),
            intervals=True,
        )
        by_layer = f"{by_layer}\n\n{columns}"
    heading = f"means over layers; {difference('kl')} is the paired difference from {MAT}"
    return f"{heading}\n{kinds}\n\n{spent}\n\n{best}\n\n{by_layer}"
