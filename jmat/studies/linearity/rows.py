"""Reports a linearity run: rows of results.json with intervals, and figures drawn from
these rows alone.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from jmat.capture.moments import Pair
from jmat.data.examples import Split
from jmat.metrics.bootstrap import bootstrap_counts
from jmat.report.notes import DOES_NOT_VARY, estimate
from jmat.report.rows import Row
from jmat.studies.linearity.intrinsic import linear_fit, log_ratios, maximum_likelihood, public_code
from jmat.studies.linearity.measure import Labels, Measured, PerToken

# What a step does to the stream, metric → how a figure says it.
GEOMETRY = {
    "contribution_norm": r"$\|h_{l+1} - h_l\| \,/\, \|h_l\|$",
    "cosine": r"$\cos\,(h_l, h_{l+1})$",
    "anisotropy": "anisotropy",
}
ANGLE = "angle"  # between h_l and h_{l+1}, in degrees: how strong the jump of a block is
# Estimator of the intrinsic dimension → its metric.
DIMENSIONS = {
    "maximum_likelihood": "intrinsic_dimension",
    "linear_fit": "intrinsic_dimension_fit",
    "public_code": "intrinsic_dimension_public_code",
}
# The share of tokens by their error, from `10^a` to `10^b` times the mean spread of the target.
ERROR_BINS = np.arange(-6.0, 2.01, 0.25)
ZERO = "the stream is zero at every token"
_ROUNDING = 1e-6  # of sums of squares that were rounded to float32, token by token
# Kinds of token that occur less often say little about their mean error.
_OFTEN = 10


def resampled(
    measured: Measured,
    split: Split,
    labels: Labels,
    *,
    samples: int = 200,
    seed: int = 0,
    angles: bool = False,
) -> dict[tuple[Pair, str], Float[ndarray, " S"]]:
    """Returns held-out figures of every pair under bootstrap resamples of the
    sentences; number 0 is the data itself.

    Sentences and not tokens are drawn, since tokens of one sentence are alike. The same
    seed draws the same sentences for every model, so differences of models are paired.
    NaN where a target does not vary, and in all resamples of a single sentence. With
    `angles`, there is the mean angle of neighbouring layers, too.
    """
    _, sentence = np.unique(
        np.repeat(np.arange(split.num_sentences), split.lengths)[measured.tokens],
        return_inverse=True,
    )
    S, N = int(sentence.max()) + 1, len(sentence)
    # one sentence: nothing to resample
    known = np.ones(1 + samples, bool) if S > 1 else np.arange(1 + samples) == 0
    counts = np.concatenate([np.ones((1, S)), bootstrap_counts(S, samples=samples, seed=seed)])

    def total(values: ndarray) -> Float[ndarray, " S"]:
        return counts @ np.bincount(sentence, values.astype(np.float64), minlength=S)

    n = total(np.ones(N))
    found = {}
    for pair, each in measured.per_token.items():
        error, fitted = total(each.error), measured.in_sample.get(pair)
        for metric, values, off, score in (
            ("linearity_held_out", each.total, each.off_total, fitted and fitted.score),
            (
                "linearity_without_residual_held_out",
                each.change,
                each.off_change,
                fitted and fitted.without_residual,
            ),
        ):
            whole = total(values) - off * n / N
            # What is left of the squares beside float32's rounding of them, and of what varied on
            # the fit text.
            varies = (whole > _ROUNDING * total(values)) & np.isfinite(score or 0.0)
            found[pair, metric] = np.where(
                varies & known, 1 - error / np.where(varies, whole, 1), np.nan
            )
        if labels[pair]["map"] == "mat":
            geometry = {"contribution_norm": each.ratio, "cosine": each.cosine}
            if angles:
                geometry[ANGLE] = np.degrees(np.arccos(np.clip(each.cosine, -1, 1)))
            for metric, values in geometry.items():
                zero = not (each.ratio.any() or each.cosine.any())
                found[pair, metric] = np.where(known & (not zero), total(values) / n, np.nan)
    return found


def linearity_rows(
    measured: Measured, labels: Labels, held_out: Mapping[tuple[Pair, str], Float[ndarray, " S"]]
) -> list[Row]:
    """Returns the rows of every pair's in-sample, adjusted and held-out scores, with
    intervals of the latter; anisotropy of every layer.

    Metrics: `linearity` and `linearity_without_residual`, each also with `_adjusted`
    and `_held_out`; for steps from layer to layer `contribution_norm`, the mean over
    tokens of `||y − x|| / ||x||`, their mean `cosine` and, where it is asked for, `angle`.
    """
    rows: list[Row] = []
    for pair, label in labels.items():
        found = measured.in_sample[pair]
        for name, score in (
            ("linearity", found.score),
            ("linearity_without_residual", found.without_residual),
        ):
            rows.append(_row(label, name, score, found.n))
            few = "no more tokens than dimensions" if np.isfinite(score) else DOES_NOT_VARY
            rows.append(_row(label, f"{name}_adjusted", found.adjusted(score), found.n, note=few))
        for (of, metric), values in held_out.items():
            if of == pair:
                rows.append(_interval_row(label, metric, values, len(measured.tokens)))
    n = next(iter(measured.in_sample.values())).n
    rows += [
        _row({"map": "stream", "layer": layer}, "anisotropy", share, n)
        for layer, share in enumerate(measured.anisotropy)
    ]
    return rows


def difference_rows(
    labels: Labels,
    mine: Mapping[tuple[Pair, str], Float[ndarray, " S"]],
    theirs: Mapping[tuple[Pair, str], Float[ndarray, " S"]],
    n: int,
) -> list[Row]:
    """Returns held-out figures of one model minus those of another on the same
    sentences: `METRIC_difference`, paired.
    """
    return [
        _interval_row(labels[pair], f"{metric}_difference", values - theirs[pair, metric], n)
        for (pair, metric), values in mine.items()
    ]


def dimension_rows(streams: Iterable[Float[ndarray, "N D"]]) -> list[Row]:
    """Returns the intrinsic dimension of h_0, h_1, … by every estimator of
    `jmat.studies.linearity.intrinsic`, or why there is none: `intrinsic_dimension` by
    maximum likelihood, with its interval, `intrinsic_dimension_fit` by the linear fit,
    `intrinsic_dimension_public_code`.
    """
    rows: list[Row] = []
    for layer, points in enumerate(streams):
        for estimator, metric in DIMENSIONS.items():
            label = {"map": "stream", "layer": layer, "metric": metric, "estimator": estimator}
            try:
                found = _dimension(estimator, points)
            except ValueError as error:
                found = {"value": None, "note": str(error)}
            rows.append({**label, "n": len(points), **found})
    return rows


def _dimension(estimator: str, points: Float[ndarray, "N D"]) -> Row:
    if estimator == "public_code":
        return {"value": public_code(points)}
    ratios = log_ratios(points)
    if estimator == "linear_fit":
        return {"value": linear_fit(ratios)}
    return dict(zip(("value", "low", "high"), maximum_likelihood(ratios), strict=True))


def error_rows(measured: Measured, labels: Labels) -> list[Row]:
    """Returns a histogram of each step's errors: `token_error_share` of the tokens
    whose squared error is between `error_from` and `error_to` times the mean spread of
    the target; what lies beyond the ends is in the first or last bin.
    """
    rows: list[Row] = []
    edges = 10.0**ERROR_BINS
    for pair in _varying_steps(measured, labels):
        error = np.clip(_relative(measured.per_token[pair]), edges[0], edges[-1] * (1 - 1e-9))
        counts, _ = np.histogram(error, bins=edges)
        for k in np.flatnonzero(counts):
            bounds = {"error_from": float(edges[k]), "error_to": float(edges[k + 1])}
            rows.append(
                _row(
                    {**labels[pair], **bounds},
                    "token_error_share",
                    counts[k] / len(error),
                    len(error),
                )
            )
    return rows


def token_rows(
    measured: Measured,
    split: Split,
    labels: Labels,
    decode: Callable[[int], str],
    *,
    count: int = 20,
) -> list[Row]:
    """Returns the kinds of token that are least and most linear: `token_error`, mean
    over their occurrences and all steps of the squared error against the mean spread of
    the target. Rare ones, of fewer than 10 occurrences, are left out.
    """
    steps = _varying_steps(measured, labels)
    if not steps:
        return []
    error = np.mean([_relative(measured.per_token[pair]) for pair in steps], axis=0)
    ids, kind, often = np.unique(
        split.tokens[measured.tokens], return_inverse=True, return_counts=True
    )
    means = np.bincount(kind, error) / often
    known = np.flatnonzero(often >= min(_OFTEN, often.max()))
    order = known[np.argsort(means[known], kind="stable")]
    half = len(order) // 2  # no kind is at both ends
    least, most = order[half:][::-1][:count], order[:half][:count]
    rows: list[Row] = []
    for extreme, chosen in (("least_linear", least), ("most_linear", most)):
        for k in chosen:
            token = {
                "map": "mat",
                "extreme": extreme,
                "token": decode(int(ids[k])),
                "token_id": int(ids[k]),
            }
            rows.append(_row(token, "token_error", means[k], int(often[k])))
    return rows


def _next_steps(labels: Labels) -> list[Pair]:
    return [
        pair
        for pair, label in labels.items()
        if label["map"] == "mat" and label["target"] == label["layer"] + 1
    ]


def _varying_steps(measured: Measured, labels: Labels) -> list[Pair]:
    """Returns the steps whose target varies, on the text of the fit and on that of the
    evaluation.
    """
    steps = _next_steps(labels)
    fitted = {
        pair: measured.in_sample[pair].score if pair in measured.in_sample else 0.0
        for pair in steps
    }
    return [
        pair for pair in steps if np.isfinite(fitted[pair]) and measured.per_token[pair].total.any()
    ]


def _relative(each: PerToken) -> Float[ndarray, " N"]:
    """Returns the error of each token against the mean spread: the mean is 1 −
    linearity.
    """
    return each.error.astype(np.float64) / each.total.mean(dtype=np.float64)


def _interval_row(label: Row, metric: str, values: Float[ndarray, " S"], n: int) -> Row:
    row = _row(
        label, metric, values[0], n, note=ZERO if metric in (*GEOMETRY, ANGLE) else DOES_NOT_VARY
    )
    if row["value"] is None:
        return row
    ends = np.percentile(values[1:], [2.5, 97.5]) if np.isfinite(values).all() else (np.nan, np.nan)
    return {**row, **estimate(values[0], *ends)}


def _row(
    label: Row, metric: str, value: float | int | np.number, n: int, note: str = DOES_NOT_VARY
) -> Row:
    row = {**label, "metric": metric, "value": float(value), "n": n}
    return row if np.isfinite(value) else row | {"value": None, "note": note}


def own_rows(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of the model itself: not those of checkpoints, of another model,
    or of differences.
    """
    return [row for row in rows if not {"checkpoint", "against"} & row.keys()]


def step_rows(rows: Sequence[Row]) -> list[Row]:
    """Returns the model's rows of steps from a layer to the next."""
    return next_steps(own_rows(rows))


def next_steps(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of steps from a layer to the next, of whatever model or
    difference.
    """
    return [
        row for row in rows if row["map"] == "mat" and row.get("target") == row.get("layer", 0) + 1
    ]
