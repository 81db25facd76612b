"""Evaluates what the maps of every jump make the model predict."""

from collections.abc import Mapping

from jaxtyping import Float, Int, Shaped
from numpy import ndarray

from jmat.data.examples import target_tokens
from jmat.maps.compact import Map
from jmat.maps.types import Identity
from jmat.metrics.predictions import Predictions
from jmat.models.sites import stream_sites
from jmat.report.notes import noted
from jmat.report.rows import Row
from jmat.studies.evaluation import evaluate, metric_rows
from jmat.studies.map_zoo.jumps import STREAM, Jump
from jmat.studies.map_zoo.rows import Values, paired_rows
from jmat.studies.settings import Subject
from jmat.studies.then_run import finals_behind


def predictions_of(
    subject: Subject,
    maps: Mapping[tuple[str, Jump], Map],
    acts: Mapping[str, Float[ndarray, "N _"]],
    *,
    then_run: bool,
    tokens_per_batch: int | None,
) -> tuple[dict[tuple[str, Jump], dict[str, Shaped[ndarray, " N"]]], str | None]:
    """Returns the figures of every map's predictions by example, and a note where the
    whole model's do not depend on the text.

    The head reads the output of maps to the final stream. The others have figures with
    `then_run` alone: the blocks behind them run on their outputs.

    Args:
      subject: model and examples.
      maps: by kind and jump.
      acts: by site, at the held-out examples.
      then_run: whether to run the blocks behind maps that end before the final stream.
      tokens_per_batch: padded tokens in one forward pass; None: the usual number.
    """
    model, held_out = subject.model, subject.examples.eval
    final = stream_sites(model.config.layers)[-1]
    targets = target_tokens(held_out, masked=not model.config.causal)
    predictions, values = Predictions(), dict[tuple[str, Jump], dict[str, Shaped[ndarray, " N"]]]()
    note = None
    for jump in dict.fromkeys(jump for _, jump in maps):
        of_jump = {(kind, jump.layer): each for (kind, at), each in maps.items() if at == jump}
        words = f"{jump.part} of block" if jump.part != STREAM else "layer"
        if jump.target == final and jump.part == STREAM:
            read = {key: (stand_in, acts[jump.source]) for key, stand_in in of_jump.items()}
        elif then_run:
            outcomes = finals_behind(
                subject,
                of_jump,
                jump.end,
                part=None if jump.part == STREAM else jump.part,
                tokens_per_batch=tokens_per_batch,
                progress=subject.bar(f"run behind {words} {jump.end}"),
            )
            read = {key: (Identity(), h) for key, h in outcomes.items()}
        else:
            continue
        found = evaluate(
            model,
            acts[final],
            read,
            targets=targets,
            predictions=predictions if not values else None,
            progress=subject.bar(f"evaluate {words} {jump.layer}"),
        )
        note = predictions.note() if not values else note
        values |= {(kind, jump): by_metric for (kind, _), by_metric in found.items()}
    return values, note


def prediction_rows(
    values: Values, note: str | None, *, groups: Int[ndarray, " N"], seed: int
) -> list[Row]:
    """Returns the rows of every map's predictions, and of every kind's.

    Args:
      values: by kind and jump, example by example.
      note: on the whole model's predictions; None: there is none.
      groups: the sentence of each example; sentences are drawn whole.
      seed: draws the resamples.
    """
    rows: list[Row] = []
    for jump in dict.fromkeys(jump for _, jump in values):
        of_jump = {(kind, jump.layer): each for (kind, at), each in values.items() if at == jump}
        found = metric_rows(of_jump, jump.end, groups=groups, seed=seed)
        rows += [{**row, **jump.label} for row in found]
    return noted([*rows, *paired_rows(values, groups=groups, seed=seed)], note)
