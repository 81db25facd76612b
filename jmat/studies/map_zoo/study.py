"""Compares kinds of maps between layers, by default from every layer to the final one,
or of the parts of blocks: what each predicts, and what it costs.
"""

import dataclasses
from collections.abc import Callable, Sequence

from jaxtyping import Float
from matplotlib.figure import Figure
from numpy import ndarray

from jmat.capture.future import future_sums
from jmat.data.encoding import Tokenizer
from jmat.data.examples import Examples, Split
from jmat.maps.kinds import MAT, Kind, parse_kinds
from jmat.maps.weighting import EQUAL, WEIGHTS
from jmat.models.config import ModelConfig
from jmat.models.family import Transformer
from jmat.models.flops import block_flops
from jmat.models.sites import stream_sites
from jmat.report.results import Results
from jmat.report.rows import Row
from jmat.report.tables import format_table
from jmat.runtime.annotations import Keywords
from jmat.runtime.checks import check_choice
from jmat.studies.fitting import fit_split, read_statistics
from jmat.studies.kind_settings import KindSettings, routed
from jmat.studies.map_zoo.fits import fit_seconds, fit_zoo
from jmat.studies.map_zoo.jacobians import jacobian_rows, read_jacobians
from jmat.studies.map_zoo.jumps import SITES, STREAM, Jump, chosen_jumps, fitted_kinds
from jmat.studies.map_zoo.plots import plot_bytes, plot_layers, plot_pairs
from jmat.studies.map_zoo.predictions import prediction_rows, predictions_of
from jmat.studies.map_zoo.rows import (
    COSTS,
    LINEARITY,
    cost_rows,
    difference,
    front,
    of_kinds,
    r2_rows,
    r2_scores,
    with_weights,
)
from jmat.studies.r2 import resamples
from jmat.studies.settings import Say, Subject, read_subject, report

LAYERS, BYTES, PAIRS = "map_zoo.png", "map_zoo_bytes.png", "map_zoo_pairs.png"
KINDS = (
    "id mean diag hadamard orthogonal njtc:8 rank:8 rank:32 rank_logit:32 one_jump:32 mat affine "
    "ridge toward_id rank:32+int8 mat+int8 affine+int8 tuned mlp:64"
).split()
_SHOWN = ("kl", difference("kl"), "precision@1", "surprisal", "r2", LINEARITY[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(KindSettings):
    """Holds the settings of the study.

    Attributes:
      layers: source layers, of 0 .. L − 1, or blocks of a part; none: all.
      pairs: layers that maps lead from and to, such as `0-4`, or `all`; none: from
        every source layer to the final one.
      site: `stream`, or a part of every block, `ln_1`, `attn`, `ln_2` or `ffn`: then
        maps lead from its input to its output.
      then_run: also evaluate the predictions of maps that end before the final stream,
        with the blocks behind them run; each takes part of a forward pass.
      weights: of the tokens in closed forms: `equal`, `norms` or `cosine`
        (`jmat.maps.weighting`).
      clock: also time the fit of each kind; then two runs differ in these rows.
    """

    kinds: Sequence[str] = tuple(KINDS)
    layers: Sequence[int | str] = ()
    pairs: Sequence[str] = ()
    site: str = STREAM
    then_run: bool = False
    weights: str = EQUAL
    clock: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for a setting that is not valid."""
        super().__post_init__()
        check_choice("weights", self.weights, WEIGHTS)
        check_choice("site", self.site, SITES)
        if self.then_run and self.site == STREAM and not self.pairs:
            raise ValueError(
                "then_run: every map ends at the final stream, behind which no block runs; give "
                "pairs or a site."
            )
        derived = [kind for kind in parse_kinds(self.kinds) if kind.entry.derive]
        if derived and self.site != STREAM:
            raise ValueError(
                f"kind {str(derived[0])!r} leads from stream to stream: leave it out, or site="
                f"{self.site!r}."
            )
        if self.weights != EQUAL and self.route == "streaming":
            raise ValueError(
                f"weights={self.weights!r} needs stored activations: leave out route='streaming'."
            )

    def check(self, config: ModelConfig) -> None:
        """Raises ValueError for a rank above the model's width, for a layer or pair that
        it does not have, and for kinds of which no map is asked for.
        """
        super().check(config)
        fitted_kinds(parse_kinds(self.kinds), self.jumps(config), config.layers)

    def jumps(self, config: ModelConfig) -> list[Jump]:
        """Returns the jumps that maps are fitted for."""
        return chosen_jumps(config.layers, pairs=self.pairs, sources=self.layers, site=self.site)


def run(
    model: Transformer,
    examples: Examples | Sequence[str],
    options: Options = Options(),
    *,
    tokenizer: Tokenizer | None = None,
    say: Say | None = None,
) -> Results:
    """Fits every kind of map for every jump, and evaluates all.

    Args:
      model: as `jmat.load` returns it.
      examples: examples, or texts, of which three quarters are fitted on.
      options: the settings.
      tokenizer: the model's; texts and masked models need it.
      say: prints what happens now, beside progress bars; None: quiet.

    Returns:
      Rows for every kind and jump: precision@k, recall@k, surprisal and KL (nats)
      against the full model, perplexity of the text's own tokens, r2 and linearity.
      Maps that end before the final stream have r2 and linearity alone, unless the
      blocks behind them are run (`then_run`). Rows without a layer: means over the jumps
      to one layer (`target`), or over the blocks of a part (`site`), and the costs of
      each kind. Metrics that end in `_minus_mat` are paired differences. The maps, such
      as `rank:32.3.8`, or `rank:32.attn.3` of a part.

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
    jumps, held_out = options.jumps(model.config), subject.examples.eval
    kinds = _kinds(subject, options, jumps)
    options = routed(options, store=options.weights != EQUAL)
    jacobians, passes = read_jacobians(subject, options, kinds, jumps)
    pairs = [(jump.source, jump.target) for jump in jumps]
    statistics = read_statistics(subject, options, pairs)
    fitting: Keywords = {"weights": options.weights, "seed": options.seed}
    given: Keywords = {"jacobians": jacobians, "future": _future(subject, options, kinds, jumps)}
    fits = fit_zoo(model, statistics, kinds, jumps, progress=subject.bar("fit"), **given, **fitting)
    seconds = {}
    if options.clock:
        seconds = fit_seconds(model, statistics, kinds, jumps, **fitting) | passes
    del statistics
    acts = _held_out(subject, jumps)
    values, note = predictions_of(
        subject,
        fits.maps,
        acts,
        then_run=options.then_run,
        tokens_per_batch=options.tokens_per_batch,
    )
    drawn = resamples(held_out.positions, held_out.rows, seed=options.seed)
    rows = prediction_rows(values, note, groups=held_out.rows, seed=options.seed)
    rows += r2_rows(r2_scores(fits.maps, acts, drawn), acts, drawn)
    block = float(block_flops(model.config, 1, _context(held_out, model.config)))
    rows += cost_rows(fits.maps, n_fit=fits.n, block=block, seconds=seconds)
    rows += jacobian_rows(jacobians, kinds)
    if options.weights != EQUAL:
        rows = with_weights(rows, kinds)
    named = {jump.map_name(kind): stand_in for (kind, jump), stand_in in fits.maps.items()}
    shown: Keywords = {"tables": table, "figures": figures(options)}
    return report("map_zoo", subject, options, rows, maps=named, n=fits.n, **shown)


def figures(options: Options) -> dict[str, Callable[..., Figure]]:
    """Returns the figures of a run by file name."""
    drawn: dict[str, Callable[..., Figure]] = {LAYERS: plot_layers, BYTES: plot_bytes}
    return drawn | {PAIRS: plot_pairs} if options.pairs else drawn


def _kinds(subject: Subject, options: Options, jumps: Sequence[Jump]) -> list[Kind]:
    """Returns the kinds of which there are maps, and prints those that cannot take every
    jump.
    """
    layers, kinds = subject.model.config.layers, parse_kinds(options.kinds)
    bound = [kind for kind in kinds if not all(jump.takes(kind, layers) for jump in jumps)]
    if bound:
        names = ", ".join(str(kind) for kind in bound)
        subject.announce(f"maps to the final layer only, since they read the head: {names}")
    return fitted_kinds(kinds, jumps, layers)


def _future(
    subject: Subject, options: Options, kinds: Sequence[Kind], jumps: Sequence[Jump]
) -> dict[str, Float[ndarray, "N _"]]:
    """Returns the sums of each target over later tokens, for kinds that are fitted to
    them; nothing where there is none.
    """
    if not any(kind.entry.sums_future for kind in kinds):
        return {}
    return {
        target: future_sums(
            subject.model,
            fit_split(subject, options),
            target,
            tokens_per_batch=options.tokens_per_batch,
            progress=subject.bar("capture what follows"),
        )
        for target in dict.fromkeys(jump.target for jump in jumps)
    }


def _held_out(subject: Subject, jumps: Sequence[Jump]) -> dict[str, Float[ndarray, "N _"]]:
    """Returns the activations of all streams, and of the parts that maps stand in for,
    at the examples to evaluate on.
    """
    parts = [site for jump in jumps if jump.part != STREAM for site in (jump.source, jump.target)]
    return subject.capture(
        subject.as_read.eval,
        (*stream_sites(subject.model.config.layers), *parts),
        progress=subject.bar("capture eval"),
    )


def _context(split: Split, config: ModelConfig) -> float:
    """Returns how many tokens an example's position looks at, on average."""
    return float((split.positions + 1 if config.causal else split.lengths[split.rows]).mean())


def table(rows: Sequence[Row]) -> str:
    """Returns a table of the kinds, means over layers or blocks beside costs, and tables
    of KL and r2 by layer; of r2 by pair where maps lead to several layers.
    """
    means = of_kinds(rows)
    metrics = {row["metric"] for row in means}
    kinds = format_table(means, index="map", columns=("metric",), metrics=_SHOWN, intervals=True)
    spent = format_table(
        means,
        index="map",
        columns=("metric",),
        metrics=[metric for metric in (*COSTS, "fit_seconds") if metric in metrics],
    )
    over = "blocks" if "site" in means[0] else f"the source layers of maps to {means[0]['target']}"
    heading = f"means over {over}; {difference('kl')} is the paired difference from {MAT}"
    tables = [f"{heading}\n{kinds}", spent]
    if best := front(rows):
        tables.append(f"No kind is both smaller and better than one of these: {', '.join(best)}.")
    return "\n\n".join([*tables, *_by_jump(rows)])


def _by_jump(rows: Sequence[Row]) -> list[str]:
    """Returns tables of single maps: by layer, or from layer to layer."""
    single = [row for row in rows if "layer" in row]
    ends = {row["target"] for row in single if "site" not in row}
    metrics = [
        m for m in ("kl", "r2", "relative_error") if any(row["metric"] == m for row in single)
    ]
    if len(ends) < 2:
        shown = [metric for metric in metrics if metric != "r2" or "kl" not in metrics]
        return [
            format_table(
                single,
                index="layer",
                columns=("metric", "map"),
                metrics=(metric,),
                intervals=metric == "relative_error",
            )
            for metric in shown
        ]
    kinds = dict.fromkeys(row["map"] for row in single)
    return [
        f"{metric} of {kind} from layer i (down) to j (across)\n"
        + format_table(of_kind, index="layer", columns=("target",), metrics=(metric,))
        for metric in metrics
        for kind in kinds
        if (of_kind := [r for r in single if (r["map"], r["metric"]) == (kind, metric)])
    ]
