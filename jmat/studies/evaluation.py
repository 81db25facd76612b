"""Evaluates shortcuts: how well what they predict agrees with what the whole model
predicts.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Shaped
from numpy import ndarray

from jmat.capture.sweep import Rows, stored_rows, sweep
from jmat.forward import logits
from jmat.metrics.bootstrap import bootstrap_mean
from jmat.metrics.predictions import (
    KS,
    Distribution,
    Predictions,
    compare_distributions,
    confidences_of,
    distribution,
    top_2_gap,
)
from jmat.models.family import Transformer
from jmat.models.sites import Site
from jmat.report.notes import OVERFLOWS, estimate, with_note
from jmat.report.rows import Row
from jmat.runtime.annotations import PyTree
from jmat.runtime.mesh import local_mesh, place, replicate

METRICS = (*(f"precision@{k}" for k in KS), *(f"recall@{k}" for k in KS), "surprisal", "kl")


def evaluate(
    model: Transformer,
    final: Float[ndarray, "N D"],
    shortcuts: Mapping[tuple[str, int], tuple[Site, Float[ndarray, "N D"]]],
    *,
    targets: Int[ndarray, " N"] | None = None,
    words: Int[ndarray, " W"] | None = None,
    predictions: Predictions | None = None,
    examples_per_batch: int = 256,
    progress: str | None = None,
) -> dict[tuple[str, int], dict[str, Shaped[ndarray, " N"]]]:
    """Holds what each shortcut predicts against what the full model predicts, example
    by example.

    Examples are shared out among the processes; all get the values of all.

    Args:
      model: its final norm and head read out both.
      final: h_L.
      shortcuts: (map's name, source layer) → (map, the stream it reads).
      targets: the tokens that the text has there, -1 where it has none: adds
        `cross_entropy` (NaN there).
      words: a short list of the vocabulary: adds `short_gap`, the confidence read over
        these words alone.
      predictions: collects what the full model predicts, to tell whether that depends
        on the text.
      examples_per_batch: logits of so many examples are held at once.
      progress: what the progress bar says; None shows none.

    Returns:
      (map's name, source layer) → name → values: the metrics of
      `jmat.metrics.predictions.compare` and the confidences of
      `jmat.metrics.predictions.confidences_of`.
    """
    mesh = local_mesh()
    model = place(model, mesh)
    maps = replicate(mesh, [shortcut for shortcut, _ in shortcuts.values()])

    def rows(batch: Rows) -> tuple[PyTree, ...]:
        now = None if targets is None else batch.take(targets)
        streams = [batch.take(stream) for _, stream in shortcuts.values()]
        return batch.examples, batch.take(final), now, streams

    def compare_rows(given: tuple[PyTree, ...]) -> list[dict[str, jax.Array]]:
        examples, final, now, streams = given
        full, values = logits(model, final), []
        read = distribution(full)
        if predictions is not None:
            predictions.add(full, examples >= 0)
        for shortcut, stream in zip(maps, streams, strict=True):
            values.append(_read(read, logits(model, _apply(shortcut, stream)), now, words))
            jax.block_until_ready(values[-2:-1])  # no more than two shortcuts' logits are in memory
        return values

    plan = stored_rows(len(final), examples_per_batch, mesh=mesh)
    values = sweep(plan, compare_rows, inputs=rows, mesh=mesh, progress=progress)
    if predictions is not None:
        predictions.meet_hosts()
    return dict(zip(shortcuts, values, strict=True))


@jax.jit
def _read(
    full: Distribution, scores: jax.Array, targets: jax.Array | None, words: jax.Array | None
) -> dict[str, jax.Array]:
    short = distribution(scores)
    values = {**compare_distributions(full, short), **confidences_of(short)}
    if targets is not None:
        nats = -short.log_p_of(jnp.maximum(targets, 0))
        values["cross_entropy"] = jnp.where(targets >= 0, nats, jnp.nan)
    if words is not None:
        values["short_gap"] = top_2_gap(scores[:, words])
    return values


def metric_rows(
    values: Mapping[tuple[str, int], Mapping[str, Shaped[ndarray, " N"]]],
    target: int,
    *,
    groups: Int[ndarray, " N"] | None = None,
    seed: int = 0,
) -> list[Row]:
    """Returns means with 95 % bootstrap intervals over the examples, or whole groups of
    them, as rows of results.json.

    Where the text's own tokens are known, `perplexity` of them is
    `exp(mean cross entropy)`. A shortcut whose logits are not finite at some example
    has no figures: the values of its rows are None, and a note says why. Notes also say
    where there is no interval, and where the shortcut's two most likely tokens are
    equally likely.
    """
    rows: list[Row] = []
    for (name, layer), read in values.items():
        if bad := np.count_nonzero(~np.isfinite(read["surprisal"])):
            note = f"the logits are not finite at {bad} of {len(read['surprisal'])} examples"
            label = {
                "map": name,
                "layer": layer,
                "target": target,
                "n": len(read["surprisal"]),
                "note": note,
            }
            rows += [{**label, "metric": metric, "value": None} for metric in METRICS]
            continue
        row = {"map": name, "layer": layer, "target": target}
        # the divergence can be infinite
        fields = mean_fields({m: read[m] for m in METRICS}, groups=groups, seed=seed)
        tied = _tie_note(read)
        for metric, figure in fields.items():
            tie_note = tied if metric.startswith(("precision", "surprisal")) else None
            rows.append(
                with_note(row | {"metric": metric, **figure, "n": len(read["kl"])}, tie_note)
            )
        if "cross_entropy" in read:
            known = ~np.isnan(read["cross_entropy"])
            rows.append(
                {
                    **row,
                    **_perplexity(
                        read["cross_entropy"][known],
                        None if groups is None else groups[known],
                        seed,
                    ),
                }
            )
    return rows


def mean_fields(
    by_metric: Mapping[str, Shaped[ndarray, " N"]], *, groups: Int[ndarray, " N"] | None, seed: int
) -> dict[str, Row]:
    """Returns the fields of a row for the mean of each metric, with its interval; a note
    in place of a mean that is not finite.

    Args:
      by_metric: values of the examples.
      groups: of the examples, which are drawn whole; None: each is one.
      seed: draws the resamples.
    """
    fields: dict[str, Row] = {metric: {"value": None, "note": OVERFLOWS} for metric in by_metric}
    finite = [metric for metric, values in by_metric.items() if np.isfinite(values).all()]
    if finite:
        columns = np.stack([by_metric[metric] for metric in finite], axis=1).astype(np.float64)
        figures = zip(*bootstrap_mean(columns, groups=groups, seed=seed), strict=True)
        fields |= {
            metric: estimate(*figure) for metric, figure in zip(finite, figures, strict=True)
        }
    return fields


def _tie_note(read: Mapping[str, Shaped[ndarray, " N"]]) -> str | None:
    """Returns a note on predictions whose two most likely tokens are equally likely, if
    there are any.
    """
    tied = np.count_nonzero(read["gap"] == 0) if "gap" in read else 0
    if not tied:
        return None
    return (
        f"at {tied} of {len(read['gap'])} examples the two most likely tokens are equally so: the "
        "lower id counts"
    )


def _perplexity(nats: Float[ndarray, " n"], groups: Int[ndarray, " n"] | None, seed: int) -> Row:
    """Returns the fields of a row for the perplexity of the text's own tokens."""
    if len(nats) == 0:
        note = "every example is the last token of its sentence"
        return {"metric": "perplexity", "value": None, "n": 0, "note": note}
    with np.errstate(over="ignore"):
        mean, low, high = np.exp(bootstrap_mean(nats.astype(np.float64), groups=groups, seed=seed))
    return {"metric": "perplexity", **estimate(mean, low, high), "n": len(nats)}


@jax.jit
def _apply(shortcut: Site, x: jax.Array) -> jax.Array:
    return shortcut(x)
