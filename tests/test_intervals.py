"""Intervals are percentiles over resampled sentences, as computed by hand; another seed
gives another interval.
"""

import numpy as np
import pytest
from transformers import AutoTokenizer

from jmat import models
from jmat.data.examples import Split
from jmat.maps.from_moments import Linearity
from jmat.metrics.r2 import usual_coordinates
from jmat.models.flops import exit_flops
from jmat.studies.early_exit.curves import LEVELS, saved_rows
from jmat.studies.early_exit.rows import METRICS, Reading, exit_rows
from jmat.studies.early_exit.thresholds import Outcome
from jmat.studies.evaluation import metric_rows
from jmat.studies.linearity.measure import Measured, PerToken, step_pairs
from jmat.studies.linearity.rows import difference_rows, linearity_rows, resampled
from jmat.studies.probe.classifiers import probe_rows
from jmat.studies.prune.measure import Sums, quality_rows
from jmat.studies.r2 import Target, resamples
from jmat.studies.tasks import choices
from jmat.studies.tasks import scoring as tasks
from jmat.studies.tasks.questions import Question
from tests.empty import empty_model
from tests.intervals import by_hand
from tests.test_reference import REFERENCE

L, N = 4, 60
# Twenty sentences with 1 to 5 examples each, in no order.
SENTENCES = (
    np.random.default_rng(0)
    .permutation(np.repeat(np.arange(20), [1, 2, 3, 4, 5] * 4))
    .astype(np.int32)
)


def near(sentence_effect: float, seed: int, shape: tuple[int, ...] = (N,)) -> np.ndarray:
    """Random numbers that are alike within a sentence, so that groups matter."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=(20, *shape[1:]))[SENTENCES]
    return sentence_effect * common + rng.normal(size=shape)


def split_of_sentences() -> Split:
    lengths = np.full(20, 6, np.int32)
    positions = np.random.default_rng(1).integers(6, size=N).astype(np.int32)
    return Split(
        tokens=np.zeros(120, np.int32), lengths=lengths, positions=positions, rows=SENTENCES
    )


def mean_of(values):
    return lambda chosen: values[chosen].mean(0)


def exits(seed):
    """Early exit's rows at two settings."""
    config = models.config_from_hf(
        {"model_type": "gpt2", "n_layer": L, "n_embd": 8, "n_head": 2, "vocab_size": 50}
    )
    split, layers = split_of_sentences(), np.random.default_rng(2).integers(1, L + 1, (2, N))
    read = Reading({name: near(1.0, k, (N, L + 1)) for k, name in enumerate(METRICS)}, {})
    rows = exit_rows(
        config, "mat", read, layers, [{"lambda": 0.1}, {"lambda": 0.2}], split, words=7, seed=seed
    )
    flops = exit_flops(config, layers, split.positions + 1, words=7)
    full = exit_flops(config, np.full((1, N), L), split.positions + 1, check_every=L).mean()
    known = {}
    for s, value in enumerate((0.1, 0.2)):
        columns = {name: read.metrics[name][np.arange(N), layers[s]] for name in METRICS}
        columns |= {"layers": layers[s], "flops": flops[s], "flops_ratio": flops[s] / full}
        known |= {(value, name): mean_of(column) for name, column in columns.items()}
    mine = [row for row in rows if (row["lambda"], row["metric"]) in known]
    assert len(mine) == len(known)
    assert {row["n"] for row in mine} == {N}
    return [(row, known[row["lambda"], row["metric"]], SENTENCES, 1000) for row in mine]


def blocks_at(outcome, level, chosen):
    """Mean blocks where mean precision first reaches the level, on the line between the
    two settings around it.
    """
    points = sorted(
        (outcome.layers[s, chosen].mean(), outcome.hits[s, chosen].mean())
        for s in range(len(outcome.hits))
    )
    before = None
    for layers, precision in points:
        if precision >= level:
            if before is None:
                return layers
            return before[0] + (layers - before[0]) * (level - before[1]) / (precision - before[1])
        before = (layers, precision if before is None else max(precision, before[1]))
    return points[-1][0]


def saved(seed):
    """The share of the blocks that early exit saves, by maps, and the paired
    difference.
    """
    layers = np.stack([np.full(N, k) for k in (4, 1, 3, 2)])
    outcomes = {}
    for name, ease in (("mat", 1.2), ("id", 0.2)):
        easy = near(1.0, 5 if name == "mat" else 6)
        hits = [easy > 1.3 - ease * k if k < 4 else np.ones(N, bool) for k in (4, 1, 3, 2)]
        outcomes[name, "gap"] = ((0.0, 1.0, 2.0, 3.0), Outcome(layers, np.asarray(hits, float)))
    rows = saved_rows(outcomes, 5, SENTENCES, seed=seed)

    def share(name, level):
        return lambda chosen: 1 - blocks_at(outcomes[name, "gap"][1], level, chosen) / 5

    def difference(level):
        return lambda chosen: share("mat", level)(chosen) - share("id", level)(chosen)

    cases = []
    for row in rows:
        level = next(level for level in LEVELS if row["metric"] == f"layers_saved@{level:.2f}")
        statistic = difference(level) if row["map"] == "mat - id" else share(row["map"], level)
        cases.append((row, statistic, SENTENCES, 1000))
    assert len(cases) == 3 * len(LEVELS)
    return cases


def in_nats(row):
    """A row of perplexity as one of the cross entropy that it is the exponential of."""
    return row | {end: np.log(row[end]) for end in ("value", "low", "high")}


def jumps(seed):
    """Rows of shortcuts, with perplexity where the text's own tokens are known."""
    names = (
        "precision@1",
        "precision@5",
        "precision@10",
        "recall@1",
        "recall@5",
        "recall@10",
        "surprisal",
        "kl",
    )
    values = {name: near(1.0, k) for k, name in enumerate(names)}
    values["cross_entropy"] = np.where(np.arange(N) % 7 == 0, np.nan, near(1.0, 20))
    known = ~np.isnan(values["cross_entropy"])
    cases = []
    for row in metric_rows({("mat", 1): values}, L, groups=SENTENCES, seed=seed):
        assert (row["map"], row["layer"], row["target"]) == ("mat", 1, L)
        if row["metric"] == "perplexity":
            nats = values["cross_entropy"][known]
            cases.append((in_nats(row), mean_of(nats), SENTENCES[known], 1000))
        else:
            cases.append((row, mean_of(values[row["metric"]]), SENTENCES, 1000))
    assert len(cases) == len(names) + 1
    return cases


def r2_by_hand(target, predicted, coordinates, weighted=False):
    def statistic(chosen):
        y, p = target[chosen][:, coordinates], predicted[chosen][:, coordinates]
        error, spread = ((y - p) ** 2).sum(0), ((y - y.mean(0)) ** 2).sum(0)
        return 1 - error.sum() / spread.sum() if weighted else (1 - error / spread).mean()

    return statistic


def r2(seed):
    """Held-out r2 in its four variants."""
    target = near(1.0, 7, (N, 5)) * np.array([1, 1, 2, 1, 40])
    predicted = target + near(0.5, 8, (N, 5))
    positions = split_of_sentences().positions
    later, every = positions > 0, np.full(5, True)
    usual = usual_coordinates(target)
    assert usual.sum() == 4
    statistics = {
        "r2": (r2_by_hand(target, predicted, every), SENTENCES),
        "r2_weighted": (r2_by_hand(target, predicted, every, weighted=True), SENTENCES),
        "r2_no_outliers": (r2_by_hand(target, predicted, usual), SENTENCES),
        "r2_no_first": (r2_by_hand(target[later], predicted[later], every), SENTENCES[later]),
    }
    rows = Target(target, resamples(positions, SENTENCES, seed=seed)).rows({}, predicted)
    assert {row["metric"]: row["n"] for row in rows} == {
        name: int(later.sum()) if name == "r2_no_first" else N for name in statistics
    }
    return [(row, *statistics[row["metric"]], 200) for row in rows]


def probes(seed):
    """A feature that is the label at the fit examples, and often not at the others."""
    fit = np.repeat([[-1.0], [1.0]], 10, axis=0)
    labels = {
        "fit": np.repeat(["down", "up"], [10, 10]),
        "eval": np.where(near(1.0, 9) > 0.5, "up", "down"),
    }
    labels["fit"][:3] = "up"  # the majority; the probe still follows the feature
    feature = np.where(near(1.0, 10) > 0, 1.0, -1.0)
    right = (np.where(feature > 0, "up", "down") == labels["eval"]).astype(float)
    rows = probe_rows({2: fit}, {2: feature[:, None]}, labels, groups=SENTENCES, seed=seed)
    majority = (labels["eval"] == "up").astype(float)
    assert majority.mean() < 0.5  # it is that of the fit examples
    assert [row["map"] for row in rows] == ["ridge", "majority"]
    return [
        (row, mean_of(hits), SENTENCES, 1000)
        for row, hits in zip(rows, (right, majority), strict=True)
    ]


def pruned(seed):
    """Sums over sentences of unequal numbers of predictions: a ratio, and no mean of
    ratios.
    """
    rng = np.random.default_rng(11)
    predictions = rng.integers(1, 9, 20).astype(float)
    sums = Sums(predictions, *(predictions * rng.gamma(2.0, size=20) for _ in range(3)))
    nats, kl, agree = (
        lambda chosen, values=values: values[chosen].sum() / predictions[chosen].sum()
        for values in sums[1:]
    )
    statistics = {"perplexity": nats, "kl": kl, "precision@1": agree}
    rows = quality_rows({"k": sums}, {"k": {"removed": 1}}, seed=seed)
    assert {(row["n"], row["sentences"], row["removed"]) for row in rows} == {
        (int(predictions.sum()), 20, 1)
    }
    rows = [in_nats(row) if row["metric"] == "perplexity" else row for row in rows]
    return [(row, statistics[row["metric"]], np.arange(20), 1000) for row in rows]


def questions(seed):
    """Whole and per-character answers that differ."""
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE / "gpt2")
    rng = np.random.default_rng(12)
    asked = [Question("x", ("a", "b", "c")[: 2 + k % 2], int(rng.integers(2))) for k in range(30)]
    given = rng.integers(2, size=(2, 30))
    sizes = [len(q.choices) for q in asked]
    scores = tuple(
        [-1.0 * (np.arange(k) != best) for k, best in zip(sizes, kind, strict=True)]
        for kind in given
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choices, "choice_scores", lambda *_, **__: scores)
        rows = choices.task_rows(empty_model(), tokenizer, "task", asked, seed=seed)
    right = given == np.array([q.answer for q in asked])
    assert right[0].mean() != right[1].mean()
    assert [row["metric"] for row in rows] == ["accuracy", "accuracy_norm", "chance"]
    assert rows[2]["value"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    return [
        (row, mean_of(hits.astype(float)), np.arange(30), 1000)
        for row, hits in zip(rows, right, strict=False)
    ]


def lines(seed):
    """Perplexity of a text, line by line, with lines of unequal numbers of tokens, one
    of them in two pieces.
    """
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE / "gpt2")
    text = ["the value " * (1 + k % 4) for k in range(19)] + ["the value " * 20]
    model, read = empty_model(num_positions=32), []
    rng = np.random.default_rng(14)

    def log_likelihoods(_, passages, **__):
        read.extend(passages)
        return -rng.gamma(2.0, size=len(passages)) * [len(passage.tokens) for passage in passages]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "log_likelihoods", log_likelihoods)
        [row] = tasks.text_rows(model, tokenizer, "text", text, seed=seed)
    rng = np.random.default_rng(14)
    nats = rng.gamma(2.0, size=len(read)) * [len(passage.tokens) for passage in read]
    counts = np.array([len(passage.tokens) - passage.scored_from for passage in read])
    line = np.minimum(np.arange(len(read)), 19)
    assert len(read) > 20
    assert (row["n"], row["lines"]) == (counts.sum(), 20)
    nats, counts = (np.bincount(line, values) for values in (nats, counts))
    return [
        (
            in_nats(row),
            lambda chosen: nats[chosen].sum() / counts[chosen].sum(),
            np.arange(20),
            1000,
        )
    ]


def held_out(seed):
    """Linearity on sentences of 6 tokens, 3 to 5 of which are read; two models, and
    their paired difference.
    """
    tokens = np.flatnonzero(np.arange(120) % 6 > np.arange(120) // 6 % 3)
    sentence = tokens // 6
    split = split_of_sentences()
    labels = step_pairs(1)
    [pair] = labels
    figures, cases, statistics = [], [], []
    for k in range(2):
        numbers = np.random.default_rng([13, k]).gamma(2.0, size=(5, len(tokens))) * (
            1 + sentence % 5
        )
        error, total, change, ratio, cosine = numbers.astype(np.float32).astype(np.float64)
        each = PerToken(*numbers.astype(np.float32), off_total=30.0, off_change=20.0)
        measured = Measured({}, {}, {pair: each}, tokens, [])
        figures.append(resampled(measured, split, labels, seed=seed))
        statistics.append({
            "linearity_held_out": share_of(error, total, 30.0),
            "linearity_without_residual_held_out": share_of(error, change, 20.0),
            "contribution_norm": mean_of(ratio),
            "cosine": mean_of(cosine),
        })  # fmt: skip
        in_sample = {pair: Linearity(residual=1.0, total=2.0, contribution=3.0, n=9, dimensions=2)}
        rows = linearity_rows(Measured(in_sample, {}, {pair: each}, tokens, []), labels, figures[k])
        known = [row for row in rows if row["metric"] in statistics[k]]
        assert len(known) == 4
        cases += [(row, statistics[k][row["metric"]], sentence, 200) for row in known]
    for row in difference_rows(labels, *figures, len(tokens)):
        name = row["metric"].removesuffix("_difference")
        cases.append((row, difference(*(of[name] for of in statistics)), sentence, 200))
    assert len(cases) == 12
    return cases


def share_of(error, whole, off):
    """1 − Σ error / Σ (whole about the evaluation text's own mean)."""
    return lambda chosen: (
        1 - error[chosen].sum() / (whole[chosen].sum() - off * len(chosen) / len(whole))
    )


def difference(first, second):
    return lambda chosen: first(chosen) - second(chosen)


CASES = [exits, saved, jumps, r2, probes, pruned, questions, lines, held_out]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_intervals_are_those_of_whole_sentences_by_hand(case):
    for row, statistic, groups, samples in case(3):
        everything = np.arange(len(groups))
        assert row["value"] == pytest.approx(statistic(everything), rel=1e-9, abs=1e-12), row
        low, high = by_hand(statistic, groups, seed=3, samples=samples)
        assert (row["low"], row["high"]) == (
            pytest.approx(low, rel=1e-9),
            pytest.approx(high, rel=1e-9),
        ), row
        assert low < high


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_another_seed_gives_another_interval_and_the_same_value(case):
    for (first, *_), (second, *_) in zip(case(3), case(4), strict=True):
        assert first["value"] == second["value"]
        assert (first["low"], first["high"]) != (second["low"], second["high"]), first
