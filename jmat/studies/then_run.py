"""Evaluates jumps between any two layers: the blocks behind the jump run on, and their
predictions are held against those of the whole model.
"""

from collections.abc import Mapping

import jax
from jaxtyping import Float
from numpy import ndarray

from jmat.capture.sweep import sweep
from jmat.data.batches import Batch
from jmat.maps.types import Identity, Linear
from jmat.metrics.predictions import Predictions
from jmat.report.notes import noted
from jmat.report.rows import Row
from jmat.runtime.mesh import local_mesh, place, replicate, usual_batch
from jmat.runtime.progress import track
from jmat.studies.evaluation import evaluate, metric_rows
from jmat.studies.settings import Subject
from jmat.studies.submodules.ablation import run_from, sentence_rows, streams_of


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

    The jump is taken at every token of a sentence, since the blocks behind it look at
    all. There are the figures of `layer_jump` for each pair: precision@k, recall@k,
    surprisal and KL.

    Args:
      subject: model and examples.
      maps: by (i, j), as `jmat.maps.jumps.fit_jumps` returns them.
      final: h_L of the whole model at the held-out examples.
      seed: draws the resamples.
      tokens_per_batch: padded tokens in one forward pass; None: the usual number.
    """
    model, held_out = subject.model, subject.examples.eval
    L, mesh = model.config.layers, local_mesh()
    plan = sentence_rows(model, subject.as_read.eval, tokens_per_batch or usual_batch())
    placed, rows = place(model, mesh), list[Row]()
    for j in track(range(1, L), subject.bar("jump, then run")):
        held = {i: replicate(mesh, maps[i, j]) for i in range(j)}
        stand_ins = [(name, i) for i in held for name in ("mat", "id")]

        def finals(batch: Batch, j: int = j, held: Mapping[int, Linear] = held) -> list[jax.Array]:
            streams = streams_of(placed, batch, j - 1)
            return [
                run_from(placed, jump(streams[i]), j, {}, batch)
                for i, linear in held.items()
                for jump in (linear, Identity())
            ]

        outcomes = sweep(plan, finals, mesh=mesh)
        read = {key: (Identity(), h) for key, h in zip(stand_ins, outcomes, strict=True)}
        predictions = Predictions()
        values = evaluate(model, final, read, predictions=predictions)
        rows += noted(metric_rows(values, j, groups=held_out.rows, seed=seed), predictions.note())
    return rows
