"""The early-exit experiment's figures: curves, layers saved, calibration and measured
time, as rows of results.json.
"""

from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from jmat.capture.sweep import stored_rows, sweep
from jmat.data.examples import Split
from jmat.forward import logits
from jmat.metrics.confidence import CONFIDENCES
from jmat.models.config import ModelConfig
from jmat.models.family import Transformer
from jmat.models.sites import Site
from jmat.report.notes import estimate, with_note
from jmat.report.rows import Row
from jmat.runtime import hosts
from jmat.runtime.mesh import local_mesh, place, row_by_row
from jmat.runtime.timing import medians
from jmat.studies.early_exit.rows import exit_rows, reading, thresholds_of
from jmat.studies.early_exit.stopping import ExitRule, run_fully, run_until_sure
from jmat.studies.early_exit.thresholds import (
    ID_LAMBDAS,
    LAMBDAS,
    Outcome,
    calibrate,
    exit_layers,
    fixed_exit,
    layers_saved,
    outcome,
)

# (map, confidence) → grid, effect
Outcomes = dict[tuple[str, str], tuple[Sequence[float], Outcome]]
LEVELS = (0.95, 0.90)
_LENGTHS = 16  # a timed batch's length is a multiple of this, so that few programs are compiled


def top_words(
    model: Transformer, final: Float[ndarray, "N D"], count: int, *, per_batch: int = 256
) -> Int[ndarray, " W"]:
    """Returns the words that the full model has in its top 10 most often at the fit
    examples: a list for cheap checks.
    """
    V, mesh = model.config.vocab_size, local_mesh()
    model = place(model, mesh)

    best = row_by_row(lambda scores: jax.lax.top_k(scores, min(10, V))[1], mesh)
    plan = stored_rows(len(final), per_batch, mesh=mesh)
    tops = sweep(
        plan, lambda x: best(logits(model, x)), inputs=lambda rows: rows.take(final), mesh=mesh
    )
    frequency = np.bincount(tops.ravel(), minlength=V)
    return np.sort(np.argsort(-frequency, kind="stable")[: min(count, V)])


def curve_rows(
    config: ModelConfig,
    values: Mapping[tuple[str, int], Mapping[str, ndarray]],
    split: Split,
    protocol: str,
    cheap: Mapping[str, int],
    *,
    seed: int = 0,
) -> tuple[list[Row], Outcomes]:
    """Returns the rows of every threshold of every confidence, the cheap check
    (`gap_cheap`) and the fixed exit, for `mat` and `id`.
    """
    rows: list[Row] = []
    outcomes: Outcomes = {}
    reads = {name: reading(values, name, config) for name in ("mat", "id")}
    for kind in (*CONFIDENCES, "gap_cheap"):
        for name, read in reads.items():
            source, cost = ("short_gap", dict(cheap)) if kind == "gap_cheap" else (kind, {})
            lambdas = ID_LAMBDAS if name == "id" else LAMBDAS
            label, grid, thresholds = thresholds_of(
                source, lambdas, split.positions, config, protocol
            )
            every = cost.get("check_every", 1)
            exits = exit_layers(
                read.confidence[source][:, : config.layers], thresholds, check_every=every
            )
            # The paper's rule is the one that `lambda` alone stands for; the others are told apart
            # by their threshold's name.
            name_of = label if kind != "gap_cheap" else "lambda_cheap"
            labels = [{name_of: float(value), "confidence": kind} for value in grid]
            rows += exit_rows(config, name, read, exits, labels, split, seed=seed, **cost)
            outcomes[name, kind] = grid, outcome(exits, read.metrics["precision@1"])
    for name, read in reads.items():
        fixed = fixed_exit(read.metrics["precision@1"])
        labels = [{"layer": l, "confidence": "fixed"} for l in range(config.layers + 1)]
        rows += exit_rows(
            config, name, read, fixed.layers, labels, split, check_every=config.layers, seed=seed
        )
        outcomes[name, "fixed"] = tuple(range(config.layers + 1)), fixed
    return rows, outcomes


def saved_rows(
    outcomes: Outcomes, blocks: int, sentences: Int[ndarray, " N"], *, seed: int = 0
) -> list[Row]:
    """Returns the share of the blocks saved at 95 % and 90 % precision@1, with
    intervals; `mat - id` is the paired difference.
    """
    rows: list[Row] = []
    for kind in dict.fromkeys(kind for _, kind in outcomes):
        pair = {name: result for (name, of), (_, result) in outcomes.items() if of == kind}
        for level in LEVELS:
            for name, (value, low, high) in layers_saved(
                pair, blocks, level, groups=sentences, seed=seed
            ).items():
                n = next(iter(pair.values())).hits.shape[1]
                row = {
                    "map": name,
                    "confidence": kind,
                    "metric": f"layers_saved@{level:.2f}",
                    "n": n,
                }
                row |= estimate(value, low, high)
                ends = f" [{low:.1%}, {high:.1%}]" if "low" in row else ""
                note = f"{name} ({kind}): saves {value:.1%}{ends} of the blocks at {level:.0%}"
                if name not in pair:  # a difference of two shares is in points
                    ends = f" [{100 * low:.1f}, {100 * high:.1f}]" if "low" in row else ""
                    note = (
                        f"{name} ({kind}): a difference of {100 * value:.1f} points{ends} at "
                        f"{level:.0%}"
                    )
                rows.append(with_note(row, note) if kind == "gap" else row)
    return rows


def calibration_rows(
    outcomes: Outcomes, sentences: Int[ndarray, " N"], delta: float, epsilon: float
) -> list[Row]:
    """Returns λ calibrated on the even sentences, its disagreement and saving measured
    on the odd ones.

    One example a sentence counts, its first: the bound needs independent ones.
    """
    rows: list[Row] = []
    first = np.unique(sentences, return_index=True)[1]
    even, odd = first[::2], first[1::2]
    for name in ("mat", "id"):
        if len(odd) == 0:
            note = (
                f"{name}: one sentence is too few to calibrate a lambda on one half and to verify "
                "it on the other"
            )
            label = {"map": name, "confidence": "gap", "delta": delta, "epsilon": epsilon}
            rows.append({**label, "metric": "calibrated_lambda", "value": None, "note": note})
            continue
        grid, result = outcomes[name, "gap"]
        fitted = Outcome(result.layers[:, even], result.hits[:, even])
        lam = calibrate(fitted, grid, delta=delta, epsilon=epsilon)
        label = {"map": name, "confidence": "gap", "delta": delta, "epsilon": epsilon}
        if lam is None:
            note = (
                f"{name}: no lambda keeps disagreement under {delta:g} with confidence "
                f"{1 - epsilon:g}"
            )
            rows.append({**label, "metric": "calibrated_lambda", "value": None, "note": note})
            continue
        k = list(grid).index(lam)
        layers, risk = result.layers[k, odd].mean(), 1 - result.hits[k, odd].mean()
        n = len(odd)
        note = (
            f"{name}: lambda {lam:g} keeps disagreement under {delta:g} with confidence "
            f"{1 - epsilon:g}; on other sentences it is {risk:.3f}, with {layers:.2f} blocks run"
        )
        rows.append(
            {
                **label,
                "metric": "calibrated_lambda",
                "value": float(lam),
                "n": fitted.hits.shape[1],
                "note": note,
            }
        )
        rows.append({**label, "metric": "disagreement", "value": float(risk), "n": n})
        rows.append({**label, "metric": "layers", "value": float(layers), "n": n})
    return rows


def timing_rows(
    model: Transformer,
    maps: Mapping[int, Site],
    words: Int[ndarray, " W"],
    check_every: int,
    outcomes: Outcomes,
    sample: tuple[Split, int],
    protocol: str,
    *,
    level: float = 0.95,
) -> list[Row]:
    """Measures the wall clock of passes that truly stop, at the λ that keeps `level`,
    against the full pass; one example at a time and in batches.
    """
    split, count = sample
    L = model.config.layers
    tokens, lengths, positions = padded(split, count, causal=model.config.causal)
    plans = {
        "naive": ("gap", ExitRule({l: maps[l] for l in range(1, L)})),
        "cheap": (
            "gap_cheap",
            ExitRule({l: maps[l] for l in range(1, L) if l % check_every == 0}, words),
        ),
    }
    rows: list[Row] = []
    for size in (1, count):
        groups = []
        for start in range(0, count, size):
            rows_of = slice(start, start + size)
            # its own, not the longest sentence's
            T = -(-int(lengths[rows_of].max()) // _LENGTHS) * _LENGTHS
            groups.append((rows_of, tokens[rows_of, :T], lengths[rows_of], positions[rows_of]))

        def full(groups=groups):
            for _, *inputs in groups:
                run_fully(model, *inputs)

        passes = {"full": full}
        for name, (kind, rule) in plans.items():
            lam = lowest_keeping(outcomes["mat", kind], level)
            thresholds = thresholds_of("gap", [lam], split.positions, model.config, protocol)[2][0][
                :count
            ]

            def early(groups=groups, rule=rule, thresholds=thresholds):
                for rows_of, inputs, length, position in groups:
                    run_until_sure(model, inputs, length, position, thresholds[rows_of], rule)

            passes[name] = early
        seconds = _seconds(passes)
        for name, value in seconds.items():
            label = {"map": "mat", "check": name, "batch": size, "level": level}
            rows.append(
                {**label, "metric": "seconds_per_example", "value": value / count, "n": count}
            )
        for name in plans:
            ratio = seconds[name] / seconds["full"]
            note = (
                f"wall clock, batch {size}, {name} check at {level:.0%}: {ratio:.2f} x the full "
                "pass"
            )
            rows.append(
                {
                    **{"map": "mat", "check": name, "batch": size, "level": level},
                    "metric": "time_ratio",
                    "value": ratio,
                    "n": count,
                    "note": note,
                }
            )
    return rows


def _seconds(passes: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Returns the median seconds of each pass on the first process, to all processes."""
    measured = list(medians(passes).values()) if hosts.is_first() else []
    return dict(zip(passes, hosts.gather(np.array(measured, np.float64))[0].tolist(), strict=True))


def lowest_keeping(curve: tuple[Sequence[float], Outcome], level: float) -> float:
    """Returns the lowest threshold whose precision@1 is at least `level`; the highest
    of all where there is none.
    """
    grid, result = curve
    kept = [value for value, hits in zip(grid, result.hits, strict=True) if hits.mean() >= level]
    return float(min(kept, default=max(grid)))


def padded(
    split: Split, count: int, *, causal: bool
) -> tuple[Int[ndarray, "B T"], Int[ndarray, " B"], Int[ndarray, " B"]]:
    """Returns the first examples as one padded batch: tokens, lengths, positions. A
    causal model's sentences end where they are read.
    """
    positions = split.positions[:count]
    starts, whole = split.starts[split.rows[:count]], split.lengths[split.rows[:count]]
    lengths = positions + 1 if causal else whole
    T = -(-int(lengths.max()) // 8) * 8
    tokens = np.zeros((len(positions), T), np.int32)
    for k, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        tokens[k, :length] = split.tokens[start : start + length]
    return tokens, lengths, positions
