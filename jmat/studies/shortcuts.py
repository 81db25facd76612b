"""Evaluates shortcuts of one's own on texts: `jmat.evaluate`."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jmat.capture.activations import capture
from jmat.capture.reading import mask_token_of, predictions_in
from jmat.checkpoint import parameters
from jmat.data.batches import Batch
from jmat.data.encoding import Tokenizer
from jmat.data.examples import Split, fingerprint, mask_positions, target_tokens
from jmat.maps.shortcut import Shortcut
from jmat.maps.types import Identity
from jmat.metrics.predictions import Predictions
from jmat.models.context import NeedsContext
from jmat.models.edits import apply_site
from jmat.models.family import Transformer, check_model
from jmat.models.sites import Site, stream_sites
from jmat.models.stack import model_dtype
from jmat.report.notes import noted
from jmat.report.results import Results
from jmat.report.rows import Row
from jmat.report.tables import format_table
from jmat.runtime.checks import check_seed
from jmat.runtime.digests import model_hash
from jmat.studies.evaluation import evaluate as compare
from jmat.studies.evaluation import metric_rows

METRICS = ("precision@1", "surprisal", "kl", "perplexity")


def evaluate(
    model: Transformer,
    inputs: Sequence[str] | Split | Batch,
    shortcuts: Mapping[str, Shortcut],
    *,
    tokenizer: Tokenizer | None = None,
    seed: int = 0,
    progress: str | None = None,
) -> Results:
    """Compares what a model predicts through shortcuts with what it predicts as a
    whole.

    Args:
      model: as `jmat.load` returns it.
      inputs: texts or a batch: a causal model is read at every token, a masked one at
        one position of each text, drawn by `seed`, under its mask. Or a `Split`, read
        at its examples. Give text that the shortcuts were not fitted on.
      shortcuts: name → shortcut.
      tokenizer: reads texts; masked models need it.
      seed: draws positions, and the resamples of intervals.
      progress: label of the progress bar; by default none is shown.

    Returns:
      Rows by shortcut: precision@k, recall@k, surprisal and KL (nats) against the whole
      model, and perplexity of the text's own next tokens, with 95 % intervals over
      texts.

    Raises:
      ValueError: a model without a head or a mask token; a shortcut beyond the last
        layer, or whose map does not fit the stream.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> texts = [f"Entry {i} holds a list of {i % 7} values." for i in range(40)]
      >>> shortcut = jmat.Shortcut(7, 8, jmat.Identity())
      >>> results = jmat.evaluate(model, texts, {"id": shortcut}, tokenizer=tokenizer)
      >>> sorted({row["metric"] for row in results.rows})[:3]
      ['kl', 'perplexity', 'precision@1']
    """
    check_model(model)
    check_seed(seed)
    if not isinstance(shortcuts, Mapping):
        raise ValueError(
            f"shortcuts is {type(shortcuts).__name__}; expected a dict from names to jmat.Shortcut."
        )
    L = model.config.layers
    if isinstance(shortcuts, Shortcut):
        raise ValueError(
            "expected a dict from names to shortcuts, such as "
            '{"mat": jmat.Shortcut(source, target, map)}; got one '
            "jmat.Shortcut without a name."
        )
    wrong = [name for name, shortcut in shortcuts.items() if not isinstance(shortcut, Shortcut)]
    if wrong or not shortcuts:
        got = (
            f"{wrong[0]!r} is of type {type(shortcuts[wrong[0]]).__name__}"
            if wrong
            else "there are none"
        )
        raise ValueError(f"expected a jmat.Shortcut(source, target, map) for each name; {got}.")
    if beyond := [name for name, shortcut in shortcuts.items() if shortcut.target > L]:
        raise ValueError(
            f"shortcut {beyond[0]!r} leads to layer {shortcuts[beyond[0]].target}; the last one is "
            f"{L}."
        )
    for name, shortcut in shortcuts.items():
        _check_map(name, shortcut, model)
    split = predictions_in(model, inputs, tokenizer, seed=seed)
    targets = target_tokens(split, masked=not model.config.causal)
    split = mask_positions(split, mask_token_of(model, tokenizer))
    streams, names = stream_sites(L), {shortcut.source for shortcut in shortcuts.values()} | {L}
    acts = capture(model, split, [streams[l] for l in sorted(names)], progress=progress)
    predictions, rows = Predictions(), list[Row]()
    for name, shortcut in shortcuts.items():
        stand_in: tuple[Site, np.ndarray] = (shortcut.map, acts[streams[shortcut.source]])
        # what reads the whole text
        if shortcut.target < L or isinstance(shortcut.map, NeedsContext):
            stand_in = (
                Identity(),
                capture(model, split, streams[L:], sites=shortcut, progress=progress)[streams[L]],
            )
        key = {(name, shortcut.source): stand_in}
        values = compare(model, acts[streams[L]], key, targets=targets, predictions=predictions)
        figures = metric_rows(values, shortcut.target, groups=split.rows, seed=seed)
        rows += [{**row, "target": shortcut.target} for row in figures]
    rows = noted(rows, predictions.note())
    text = {"source": "texts", "eval": fingerprint(split)}
    weights = model_hash(parameters(model))
    return Results(
        "evaluate", rows, {"model": model.name, "seed": seed}, weights, text, tables=table
    )


def _check_map(name: str, shortcut: Shortcut, model: Transformer) -> None:
    """Raises ValueError for a map that does not take a model's stream, or does not
    return one.
    """
    if isinstance(shortcut.map, NeedsContext):
        return
    dtype = model_dtype(model)

    def change(stand_in: Site, x: jax.Array) -> jax.Array:
        return apply_site(f"block.{shortcut.source}", stand_in, lambda: x, x, x.shape, dtype, None)

    try:
        jax.eval_shape(change, shortcut.map, jax.ShapeDtypeStruct((2, model.config.width), dtype))
    except ValueError as error:
        raise ValueError(f"shortcut {name!r}: {error}") from error


def table(rows: Sequence[Row]) -> str:
    """Returns a table of the shortcuts by metric."""
    return format_table(rows, index="map", columns=("metric",), metrics=METRICS, intervals=True)
