"""All maps and all scores from stored activations, against one pair after another; and
how exact the maps are.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from numpy import ndarray

from experiments.benchmarking import rivals
from experiments.benchmarking.rows import Goal, Row, missing_row, paired_row, seconds_rows
from experiments.benchmarking.setup import Bench, random_streams
from jmat.capture.moments import Moments, update, zeros
from jmat.maps.from_moments import fit
from jmat.maps.jumps import fit_jumps, jump_pairs
from jmat.maps.least_squares import lstsq
from jmat.models import cost
from jmat.models.sites import stream_sites
from jmat.runtime.annotations import Keywords
from jmat.runtime.timing import in_turn, seconds
from jmat.studies.linearity.measure import stored_linearity

Problem = tuple[Float[ndarray, "N D"], Float[ndarray, "N D"]]  # X and Y

FIT_GOAL, LINEARITY_GOAL, CONDITION_GOAL = Goal(5), Goal(5), Goal(1e-5, at_most=True)
_ROWS = 4096  # of stored activations at a time: so many are held in float64
CONDITIONS = (1e2, 1e3, 1e4, 1e5, 1e6)
OUTLIERS, TIMES = 3, 3000  # so many coordinates are so many times as large as the rest


def fit_rows(bench: Bench) -> list[Row]:
    """All L(L + 1)/2 maps from N activations by `fit_jumps`, against scikit-learn's
    LinearRegression pair by pair.
    """
    streams = random_streams(bench.num_fit, bench.config, seed=1)
    by_pair = None
    if rivals.installed("sklearn"):
        rivals.sklearn_map(streams[0][:100], streams[1][:100])  # imports take seconds
        by_pair = lambda i, j: rivals.sklearn_map(streams[i], streams[j])  # noqa: E731
    rows = _against_pairs(
        "fit", bench, lambda: fit_jumps(streams), "scikit-learn", by_pair, FIT_GOAL
    )
    if by_pair is not None:
        i, j = _sample(bench)[0]
        theirs = streams[i].astype(np.float64) @ by_pair(i, j)
        ours = streams[i].astype(np.float64) @ np.asarray(fit_jumps(streams[: j + 1])[0][i, j].W)
        rows.append({"map": "fit", "metric": "difference", "value": relative(ours, theirs)})
    return rows


def linearity_rows(bench: Bench) -> list[Row]:
    """Linearity of all pairs of layers by `stored_linearity`, against the public steps:
    an SVD of X for each pair.
    """
    streams = random_streams(bench.num_fit, bench.config, seed=2)
    by_pair = None
    if rivals.installed("torch"):
        import torch

        tensors = [torch.from_numpy(stream) for stream in streams]
        rivals.svd_linearity(tensors[0][:100], tensors[1][:100])
        by_pair = lambda i, j: rivals.svd_linearity(tensors[i], tensors[j])  # noqa: E731
    work = lambda: stored_linearity(streams)  # noqa: E731
    rows = _against_pairs("linearity", bench, work, "SVD per pair", by_pair, LINEARITY_GOAL)
    if by_pair is not None:
        ours = work()
        worst = max(abs(ours[i, j] - by_pair(i, j)) for i, j in _sample(bench))
        rows.append({"map": "linearity", "metric": "difference", "value": float(worst)})
    return rows


def _against_pairs(
    part: str,
    bench: Bench,
    work: Callable[[], Any],
    other: str,
    by_pair: Callable[[int, int], Any] | None,
    goal: Goal,
) -> list[Row]:
    """Compares a computation for all pairs of layers at once with a rival that takes
    some of them one by one.

    `by_pair` is None where the rival is not installed.
    """
    first = seconds(work)
    pairs, count = _sample(bench), cost.pair_count(bench.config, "all")
    works = {"jmat": work} | (
        {} if by_pair is None else {other: lambda: [by_pair(i, j) for i, j in pairs]}
    )
    taken = in_turn(works, bench.repeats)
    rows = seconds_rows(part, {"jmat": taken["jmat"]}, examples=bench.num_fit, pairs=count)
    rows.append(
        {"map": part, "metric": "compile_seconds", "value": max(first - min(taken["jmat"]), 0.0)}
    )
    if by_pair is None:
        return [*rows, missing_row(part, "ratio", goal, f"what {other} needs is not installed.")]
    rows += seconds_rows(part, {other: taken[other]}, examples=bench.num_fit, pairs=len(pairs))
    words = f" ({count} pairs, from {len(pairs)} timed)"
    return [*rows, paired_row(part, taken, other, goal, scale=count / len(pairs), words=words)]


def stored_moments(streams: Sequence[Float[ndarray, "N D"]]) -> Moments:
    """Moments of all pairs of stored activations h_0 .. h_L."""
    names = stream_sites(len(streams) - 1)
    moments = zeros(
        jump_pairs(len(streams) - 1),
        {name: stream.shape[1] for name, stream in zip(names, streams, strict=True)},
    )
    N = len(streams[0])
    for start in range(0, N, _ROWS):
        part = {
            name: jnp.asarray(x[start : start + _ROWS])
            for name, x in zip(names, streams, strict=True)
        }
        moments = update(moments, part, jnp.ones(min(_ROWS, N - start)))
    return moments


def _sample(bench: Bench) -> list[tuple[int, int]]:
    """Pairs of layers, spread evenly over all of them."""
    L = bench.config.layers
    pairs = [(i, j) for i in range(L) for j in range(i + 1, L + 1)]
    where = np.linspace(0, len(pairs) - 1, min(bench.sampled, len(pairs))).round().astype(int)
    return [pairs[k] for k in where]


# --- exactness ------------------------------------------------------------------------------------


def condition_rows(bench: Bench) -> list[Row]:
    """Returns relative errors in predictions against float64 least squares, by method
    and noise.

    The problems: X of rising condition number (`condition` in a row), all directions
    mattering alike; and X with a few coordinates that are thousands of times larger
    than the rest (`outliers` and `times`), as real streams have, from as many examples
    as maps are fitted on.
    """
    D = min(bench.config.width, 256)
    rows: list[Row] = []
    for noise in (0.0, 0.1):
        problems: list[tuple[Row, Problem]] = [
            ({"condition": condition}, hard_problem(8 * D, D, condition, noise))
            for condition in CONDITIONS
        ]
        label = {"outliers": OUTLIERS, "times": TIMES}
        problems.append((label, outlier_problem(max(bench.num_fit, 8 * D), D, noise)))
        for label, (X, Y) in problems:
            exact = predictions(X, np.linalg.lstsq(X.astype(np.float64), Y.astype(np.float64))[0])
            for name, W in solutions(X, Y).items():
                value = relative(predictions(X, W), exact)
                row = {"map": "condition", "metric": "prediction_error", "method": name, **label}
                row |= {"noise": noise, "value": value if np.isfinite(value) else None}
                row |= {} if np.isfinite(value) else {"note": "the solution is not finite"}
                rows.append(row)
    return [*rows, *_condition_verdict(rows)]


def hard_problem(N: int, D: int, condition: float, noise: float, seed: int = 0) -> Problem:
    """X with singular values from 1 down to 1/condition, and targets to which all its
    directions matter alike; float32.

    Without noise the map itself then has X's condition number: the hardest case.
    """
    rng = np.random.default_rng(seed)
    U, _ = np.linalg.qr(rng.standard_normal((N, D)))
    V, _ = np.linalg.qr(rng.standard_normal((D, D)))
    X = U * np.logspace(0, -np.log10(condition), D) @ V.T
    Y = U @ rng.standard_normal((D, D))
    Y += noise * Y.std() * rng.standard_normal(Y.shape)
    return X.astype(np.float32), Y.astype(np.float32)


def outlier_problem(N: int, D: int, noise: float, seed: int = 0) -> Problem:
    """Returns normal X with its first `OUTLIERS` coordinates `TIMES` as large, and
    targets to which all coordinates matter alike; float32.
    """
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((N, D))
    Y = X @ rng.standard_normal((D, D))
    Y += noise * Y.std() * rng.standard_normal(Y.shape)
    X[:, :OUTLIERS] *= TIMES
    return X.astype(np.float32), Y.astype(np.float32)


def solutions(
    X: Float[ndarray, "N D"], Y: Float[ndarray, "N D"]
) -> dict[str, Float[ndarray, "D D"]]:
    """W of `y = x @ W` by several methods, in the precision that each gives."""
    x, y = jnp.asarray(X), jnp.asarray(Y)
    found: Keywords = {}
    with jax.default_matmul_precision("highest"):
        found["float32 normal equations"] = jnp.linalg.solve(x.T @ x, x.T @ y)
        found["jnp.linalg.lstsq"] = jnp.linalg.lstsq(x, y)[0]
        found["jnp.linalg.lstsq, rcond=0"] = jnp.linalg.lstsq(x, y, rcond=0)[0]
    found["jmat QR, float32"] = lstsq(x, y).weights
    maps, solution = fit(stored_moments([X, Y]), "embed", ["block.0"])
    found["jmat moments, float64"] = solution.weights
    found["jmat moments, float32 map"] = maps["block.0"].W
    return {name: np.asarray(W) for name, W in found.items()}


def predictions(X: Float[ndarray, "N D"], W: Float[ndarray, "D E"]) -> Float[ndarray, "N E"]:
    """X W, multiplied in float64."""
    return X.astype(np.float64) @ W.astype(np.float64)


def relative(value: ndarray, exact: ndarray) -> float:
    """`||value − exact|| / ||exact||`."""
    return float(np.linalg.norm(value - exact) / np.linalg.norm(exact))


def _condition_verdict(rows: Sequence[Row]) -> list[Row]:
    """Returns rows of the largest errors: of the streaming solution at the hardest
    condition number, with its goal, and without one of its float32 map there and of QR
    with outliers.
    """
    hardest = _worst_errors(row for row in rows if row.get("condition") == CONDITIONS[-1])
    outliers = _worst_errors(row for row in rows if "outliers" in row)
    best = min(error for method, error in hardest.items() if not method.startswith("jmat"))
    usual = f"best of the usual: {best:.1e}"
    plain, no_cutoff = (outliers[f"jnp.linalg.lstsq{words}"] for words in ("", ", rcond=0"))
    lstsq_words = f"jnp.linalg.lstsq: {plain:.1e}, with rcond=0 {no_cutoff:.1e}"
    verdicts = []
    for errors, method, problem, other, goal in (
        (hardest, "jmat moments, float64", f"at {CONDITIONS[-1]:.0e}", usual, CONDITION_GOAL),
        (hardest, "jmat moments, float32 map", f"at {CONDITIONS[-1]:.0e}", usual, None),
        (outliers, "jmat QR, float32", f"of {OUTLIERS} x {TIMES}", lstsq_words, None),
    ):
        row: Row = {"map": "condition", "metric": f"error {problem}", "value": errors[method]}
        row |= {"jmat": method, "other": other}
        verdicts.append(
            row if goal is None else row | {"goal": str(goal), "met": goal.met(errors[method])}
        )
    return verdicts


def _worst_errors(rows: Iterable[Row]) -> dict[str, float]:
    """Returns the largest error of each method; infinity where its solution is not
    finite.
    """
    worst: dict[str, float] = {}
    for row in rows:
        error = np.inf if row["value"] is None else row["value"]
        worst[row["method"]] = max(worst.get(row["method"], 0.0), error)
    return worst
