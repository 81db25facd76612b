"""Makes rows of results.json on kinds of maps: the mean over source layers of each kind
that was fitted on one corpus and evaluated on another, and how far it is from the map
of the same kind that was fitted on the evaluation corpus itself.

That difference is taken at the same examples, so its interval is paired.
"""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Int, Shaped
from numpy import ndarray

from jmat.metrics.bootstrap import percentiles
from jmat.metrics.r2 import Resampled, varying
from jmat.models.sites import Site
from jmat.report.notes import DOES_NOT_VARY, estimate
from jmat.report.rows import Row
from jmat.studies.evaluation import mean_fields
from jmat.studies.r2 import resamples

KL, R2 = "kl", "r2"
PREDICTED = ("precision@1", "precision@5", "precision@10", "surprisal", KL)
MINUS_OWN = "_minus_own"  # less that of the map fitted on the evaluation corpus

ByKey = dict[str, dict[str, Float[ndarray, " _"]]]  # by fit, then by metric


def mean_rows(
    values: Mapping[tuple[str, int], Mapping[str, Shaped[ndarray, " N"]]],
    shortcuts: Mapping[tuple[str, int], tuple[Site, Float[ndarray, "N D"]]],
    target: Float[ndarray, "N D"],
    labels: Mapping[str, Row],
    *,
    groups: Int[ndarray, " N"] | None,
    seed: int,
) -> list[Row]:
    """Returns rows without a `layer`: means over the source layers, and what they are
    above the map fitted on the evaluation corpus (`_minus_own`).

    Args:
      values: of every fit and layer, example by example.
      shortcuts: map and source stream of every fit and layer.
      target: h_L at the same examples.
      labels: what rows say of every fit: `map`, `fit_corpus`, `eval_corpus`, `n_fit`.
      groups: the sentence of each example; None: each example is one.
      seed: draws the resamples.
    """
    drawn = resamples(np.ones(len(target), np.int32), groups, seed=seed)
    scored, counts = Resampled(target, drawn.everywhere), drawn.everywhere[1:]
    predicted, scores = _means(values, shortcuts, scored)
    varies = bool(varying(target).any())
    rows: list[Row] = []
    for key, label in labels.items():
        row = {**label, "n": len(target)}
        for fields in (predicted[key], _less(predicted, key, labels)):
            found = mean_fields(fields, groups=groups, seed=seed)
            rows += [{**row, "metric": metric, **figure} for metric, figure in found.items()]
        for metric, drawn_values in (scores[key] | _less(scores, key, labels)).items():
            figure: Row = {"value": None, "note": DOES_NOT_VARY}
            if varies:
                figure = estimate(drawn_values[0], *percentiles(drawn_values[1:], counts))
            rows.append({**row, "metric": metric, **figure})
    return rows


def _means(
    values: Mapping[tuple[str, int], Mapping[str, Shaped[ndarray, " N"]]],
    shortcuts: Mapping[tuple[str, int], tuple[Site, Float[ndarray, "N D"]]],
    scored: Resampled,
) -> tuple[ByKey, ByKey]:
    """Returns means over the layers: of the predictions' metrics at every example, and of
    r2 under every resample.
    """
    by_layer: dict[str, list[Mapping[str, Float[ndarray, " N"]]]] = {}
    r2: dict[str, list[Float[ndarray, " S"]]] = {}
    for key, read in values.items():
        shortcut, stream = shortcuts[key]
        by_layer.setdefault(key[0], []).append(
            {metric: np.asarray(read[metric], np.float64) for metric in PREDICTED}
        )
        output = np.broadcast_to(np.asarray(shortcut(stream)), scored.target.shape)
        r2.setdefault(key[0], []).append(scored.r2(output)[R2])
    predicted = {
        name: {metric: np.mean([each[metric] for each in layers], axis=0) for metric in PREDICTED}
        for name, layers in by_layer.items()
    }
    return predicted, {name: {R2: np.mean(each, axis=0)} for name, each in r2.items()}


def _less(means: ByKey, key: str, labels: Mapping[str, Row]) -> dict[str, Float[ndarray, " _"]]:
    """Returns the means of a fit less those of the same kind, fitted on as many examples
    of the evaluation corpus; nothing for that fit itself, and where there is none.
    """
    wanted = {**labels[key], "fit_corpus": labels[key]["eval_corpus"]}
    own = next((name for name, label in labels.items() if label == wanted), key)
    if own == key:
        return {}
    with np.errstate(invalid="ignore"):  # infinity less infinity
        return {f"{m}{MINUS_OWN}": values - means[own][m] for m, values in means[key].items()}
