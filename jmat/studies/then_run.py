"""Evaluates stand-ins inside a model: the blocks behind a jump between two layers, or
behind a part of a block, run on, and their predictions are held against those of the
whole model.
"""

from collections.abc import Mapping

import jax
from jaxtyping import Float
from numpy import ndarray

from jmat.capture.sweep import sweep
from jmat.data.batches import Batch
from jmat.maps.types import Identity, Linear
from jmat.metrics.predictions import Predictions
from jmat.models.sites import Site
from jmat.report.notes import noted
from jmat.report.rows import Row
from jmat.runtime.mesh import local_mesh, place, replicate, usual_batch
from jmat.runtime.progress import track
from jmat.studies.evaluation import evaluate, metric_rows
from jmat.studies.settings import Subject
from jmat.studies.submodules.ablation import run_from, sentence_rows, streams_of

StandIns = Mapping[tuple[str, int], Site]  # by the map's name and its source layer, or block


def finals_behind(
    subject: Subject,
    stand_ins: StandIns,
    end: int,
    *,
    part: str | None = None,
    tokens_per_batch: int | None = None,
    progress: str | None = None,
) -> dict[tuple[str, int], Float[ndarray, "N D"]]:
    """Returns h_L at the held-out examples when a map stands in, and the blocks behind
    it run. Each stands in alone, at every token of a sentence, since the blocks behind
    it look at all.

    Args:
      subject: model and examples.
      stand_ins: maps by name and source layer.
      end: layer that the maps lead to; below L.
      part: a part of block `end`, such as `attn`, for which the maps stand in; None:
        for the blocks between source and `end`.
      tokens_per_batch: padded tokens in one forward pass; None: the usual number.
      progress: label of the progress bar; by default none is shown.
    """
    mesh = local_mesh()
    plan = sentence_rows(subject.model, subject.as_read.eval, tokens_per_batch or usual_batch())
    placed = place(subject.model, mesh)
    held = {key: replicate(mesh, stand_in) for key, stand_in in stand_ins.items()}
    last = max(layer for _, layer in stand_ins)

    def finals(batch: Batch) -> list[jax.Array]:
        streams = streams_of(placed, batch, last)
        if part is None:
            return [
                run_from(placed, jump(streams[i]), end, {}, batch) for (_, i), jump in held.items()
            ]
        site = f"block.{end}.{part}"
        return [run_from(placed, streams[end], end, {site: jump}, batch) for jump in held.values()]

    return dict(zip(held, sweep(plan, finals, mesh=mesh, progress=progress), strict=True))


def rows_of_inner_jumps(
    subject: Subject,
    maps: Mapping[tuple[int, int], Linear],
    final: Float[ndarray, "N D"],
    *,
    seed: int,
    tokens_per_batch: int | None,
) -> list[Row]:
    """Returns the rows of `mat` and `id` from every layer i to every layer j < L, after
    which blocks j .. L − 1 run.

    There are the figures of `layer_jump` for each pair: precision@k, recall@k,
    surprisal and KL.

    Args:
      subject: model and examples.
      maps: by (i, j), as `jmat.maps.jumps.fit_jumps` returns them.
      final: h_L of the whole model at the held-out examples.
      seed: draws the resamples.
      tokens_per_batch: padded tokens in one forward pass; None: the usual number.
    """
    model, held_out = subject.model, subject.examples.eval
    rows = list[Row]()
    for j in track(range(1, model.config.layers), subject.bar("jump, then run")):
        stand_ins = {
            (name, i): stand_in
            for i in range(j)
            for name, stand_in in (("mat", maps[i, j]), ("id", Identity()))
        }
        outcomes = finals_behind(subject, stand_ins, j, tokens_per_batch=tokens_per_batch)
        read = {key: (Identity(), h) for key, h in outcomes.items()}
        predictions = Predictions()
        values = evaluate(model, final, read, predictions=predictions)
        rows += noted(metric_rows(values, j, groups=held_out.rows, seed=seed), predictions.note())
    return rows
