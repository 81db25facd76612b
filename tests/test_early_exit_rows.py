"""Early exit's figures from a reading of all layers, worked out example by example in
plain Python.
"""

import numpy as np
import pytest
from flax import nnx

from jmat import models
from jmat.data.examples import Split
from jmat.maps.types import Constant
from jmat.metrics.confidence import CONFIDENCES
from jmat.models.flops import block_flops, head_flops, map_flops
from jmat.studies.early_exit import curves
from jmat.studies.early_exit.curves import (
    calibration_rows,
    curve_rows,
    lowest_keeping,
    padded,
    timing_rows,
)
from jmat.studies.early_exit.rows import METRICS, PROBABILITIES, reading, thresholds_of
from jmat.studies.early_exit.thresholds import ID_LAMBDAS, LAMBDAS, Outcome

L, N, V, WORDS, EVERY = 5, 40, 50, 7, 2
CONFIG = models.config_from_hf(
    {"model_type": "gpt2", "n_layer": L, "n_embd": 8, "n_head": 2, "vocab_size": V}
)
BERT = models.config_from_hf(
    {
        "model_type": "bert",
        "num_hidden_layers": L,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "vocab_size": V,
    }
)


@pytest.fixture(scope="module")
def split():
    rng = np.random.default_rng(0)
    lengths = rng.integers(4, 20, 15).astype(np.int32)
    rows = np.sort(rng.integers(15, size=N)).astype(np.int32)
    tokens = rng.integers(1, V, lengths.sum()).astype(np.int32)
    return Split(tokens, lengths, rng.integers(lengths[rows]).astype(np.int32), rows)


@pytest.fixture(scope="module")
def values():
    """What every shortcut of both kinds predicts, at random; the full model is right."""
    rng, read = np.random.default_rng(1), {}
    for name in ("mat", "id"):
        for layer in range(L + 1):
            hits = np.sort(rng.random((3, N)) < 0.2 * layer, axis=0).astype(float)
            read[name, layer] = {
                **{f"precision@{k}": hit for k, hit in zip((1, 5, 10), hits, strict=True)},
                "surprisal": rng.gamma(1.0, size=N),
                "gap": rng.random(N),
                "short_gap": rng.random(N),
                "max_probability": rng.random(N),
                "entropy": rng.random(N) * np.log(V),
                "top_1": rng.integers(2, size=N),
            }
    return read


def confidence_by_hand(values, name, kind, layer, example):
    read = values[name, layer]
    if kind == "patience":
        run = 0
        while (
            layer > run
            and values[name, layer - run - 1]["top_1"][example] == read["top_1"][example]
        ):
            run += 1
        return run
    if kind == "entropy":
        return 1 - read["entropy"][example] / np.log(V)
    return read["short_gap" if kind == "gap_cheap" else kind][example]


def exit_by_hand(values, name, kind, example, sure):
    """The first layer at which a check finds the shortcut sure enough."""
    for layer in range(1, L):
        looked_at = kind != "gap_cheap" or layer % EVERY == 0
        if looked_at and sure(confidence_by_hand(values, name, kind, layer, example)):
            return layer
    return L


def flops_by_hand(layer, position, kind, name, *, token=False):
    """Blocks over all tokens, or over the last alone, then checks: with a short list
    the whole head once more.
    """
    context = position + 1 if token else np.mean([t + 1 for t in range(position + 1)])
    work = layer * block_flops(CONFIG, 1 if token else position + 1, context)
    jump = map_flops(CONFIG) if name == "mat" else 0  # `id` maps nothing
    if kind == "fixed":
        return work + head_flops(CONFIG) + (jump if layer < L else 0)
    every, words = (EVERY, WORDS) if kind == "gap_cheap" else (1, None)
    checks = len([l for l in range(1, L) if l <= layer and l % every == 0])
    at_end = head_flops(CONFIG) if layer == L or words else 0
    return work + checks * (jump + head_flops(CONFIG, words)) + at_end


def check_flops(mine, layers, positions, kind, name):
    """The rows' work, and its ratio to that of all blocks without a check, for all
    tokens and for the last alone.
    """
    for token, suffix in ((False, ""), (True, "_token")):
        given = {"name": name, "token": token}
        work = np.mean(
            [flops_by_hand(at, t, kind, **given) for at, t in zip(layers, positions, strict=True)]
        )
        full = np.mean([flops_by_hand(L, t, "fixed", **given) for t in positions])
        assert mine[f"flops_ratio{suffix}"] == pytest.approx(work / full)
        if not token:
            assert mine["flops"] == pytest.approx(work)


@pytest.mark.parametrize("kind", [*CONFIDENCES, "gap_cheap"])
@pytest.mark.parametrize("name", ["mat", "id"])
def test_curves_are_the_rule_applied_example_by_example(split, values, name, kind):
    cheap = {"check_every": EVERY, "words": WORDS}
    rows, outcomes = curve_rows(CONFIG, values, split, "jmat", cheap)
    grid, found = outcomes[name, kind]
    mean_length = np.mean([t + 1 for t in split.positions])
    label = {"gap": "lambda", "gap_cheap": "lambda_cheap"}.get(kind, "threshold")
    expected_grid = {
        "patience": [5, 4, 3, 2, 1],
        "gap": ID_LAMBDAS if name == "id" else LAMBDAS,
        "gap_cheap": ID_LAMBDAS if name == "id" else LAMBDAS,
    }.get(kind, PROBABILITIES)
    assert list(grid) == list(expected_grid)
    for k, value in enumerate(grid):
        layers = []
        for n, position in enumerate(split.positions):
            decay = 0.1 * np.exp(-4 * position / mean_length)
            sure = {
                "gap": lambda x, v=value, d=decay: x > 0.9 * v + d,
                "gap_cheap": lambda x, v=value, d=decay: x > 0.9 * v + d,
                "patience": lambda x, v=value: x >= v,
            }.get(kind, lambda x, v=value: x > v)
            layers.append(exit_by_hand(values, name, kind, n, sure))
        assert found.layers[k].tolist() == layers
        hits = [values[name, layer]["precision@1"][n] for n, layer in enumerate(layers)]
        assert found.hits[k].tolist() == hits
        mine = {row["metric"]: row for row in rows
                if (row["map"], row["confidence"], row.get(label)) == (name, kind, value)}  # fmt: skip
        for metric in METRICS:
            by_hand = np.mean([values[name, layer][metric][n] for n, layer in enumerate(layers)])
            assert mine[metric]["value"] == pytest.approx(by_hand), metric
        check_flops(
            {metric: row["value"] for metric, row in mine.items()},
            layers,
            split.positions,
            kind,
            name,
        )
        assert mine["layers"]["value"] == pytest.approx(np.mean(layers))
        assert {row["n"] for row in mine.values()} == {N}


def test_the_fixed_exit_is_every_layer_in_turn(split, values):
    rows, outcomes = curve_rows(
        CONFIG, values, split, "jmat", {"check_every": EVERY, "words": WORDS}
    )
    for name in ("mat", "id"):
        grid, found = outcomes[name, "fixed"]
        assert list(grid) == list(range(L + 1))
        for layer in grid:
            assert set(found.layers[layer]) == {layer}
            mine = {row["metric"]: row["value"] for row in rows
                    if (row["map"], row["confidence"], row.get("layer")) == (name, "fixed", layer)}  # fmt: skip
            assert mine["layers"] == layer
            assert mine["surprisal"] == pytest.approx(values[name, layer]["surprisal"].mean())
            assert found.hits[layer].mean() == pytest.approx(mine["precision@1"])
            check_flops(mine, [layer] * N, split.positions, "fixed", name)


def test_thresholds_by_protocol_and_kind():
    positions = np.array([0, 3, 9])
    paper = [[0.9 * 0.5 + 0.1 * np.exp(-4 * t / 5) for t in positions]]
    for protocol, config in (("jmat", CONFIG), ("din2023", CONFIG), ("jmat", BERT)):
        name, grid, found = thresholds_of("gap", [0.5], positions, config, protocol)
        assert (name, grid) == ("lambda", [0.5])
        np.testing.assert_allclose(found, paper)
    fixed = 0.9 * 0.5 + 0.1 * np.exp(-4 * 3 / 5)  # the released code's BERT: always position 3
    np.testing.assert_allclose(
        thresholds_of("short_gap", [0.5], positions, BERT, "din2023")[2], [[fixed] * 3]
    )
    assert thresholds_of("entropy", [], positions, BERT, "jmat")[0] == "threshold"


def test_a_reading_puts_layers_side_by_side(values):
    read = reading(values, "id", CONFIG)
    for layer in range(L + 1):
        assert (
            read.metrics["precision@5"][:, layer].tolist()
            == values["id", layer]["precision@5"].tolist()
        )
        assert read.confidence["gap"][:, layer].tolist() == values["id", layer]["gap"].tolist()
        assert (
            read.confidence["short_gap"][:, layer].tolist()
            == values["id", layer]["short_gap"].tolist()
        )


def test_the_lowest_threshold_that_keeps_the_level():
    hits = np.array([[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1.0]])
    outcome = Outcome(np.ones((4, 4), int), hits)
    assert lowest_keeping(((0.1, 0.2, 0.3, 0.4), outcome), 0.75) == 0.2  # reached is kept
    assert lowest_keeping(((0.1, 0.2, 0.3, 0.4), outcome), 0.8) == 0.3
    worse = Outcome(outcome.layers, hits * 0)
    assert lowest_keeping(((0.1, 0.2, 0.4, 0.3), worse), 0.5) == 0.4


def test_calibration_is_on_even_sentences_and_measured_on_odd_ones():
    """Sentences in turn: those of even index agree from 0.4 on, the others at 1 alone,
    where they run other layers.
    """
    S = 400
    sentences = np.repeat(np.arange(S), 2)
    grid = (0.2, 0.4, 1.0)
    even = np.repeat(np.arange(S) % 2 == 0, 2)
    odd_error = np.repeat(np.arange(S) % 8 < 4, 2) & ~even  # half of the odd ones
    hits = np.stack([~even, ~odd_error, np.ones(2 * S, bool)]).astype(float)
    hits[:, 1::2] = 0  # second examples of a sentence do not count
    layers = np.stack([np.where(even, 1, 2), np.where(even, 3, 4), np.where(even, 5, 6)])
    outcomes = {(name, "gap"): (grid, Outcome(layers, hits)) for name in ("mat", "id")}
    rows = calibration_rows(outcomes, sentences, delta=0.2, epsilon=0.01)
    for name in ("mat", "id"):
        mine = {row["metric"]: row for row in rows if row["map"] == name}
        assert mine["calibrated_lambda"]["value"] == 0.4
        assert mine["disagreement"]["value"] == pytest.approx(0.5)
        assert mine["layers"]["value"] == 4
        assert {row["n"] for row in mine.values()} == {S // 2}
        assert {(row["delta"], row["epsilon"]) for row in mine.values()} == {(0.2, 0.01)}
    # 200 sentences without an error: exp(−2 · 200 · δ²) is above ε for δ = 0.1 and below it for δ =
    # 0.11.
    for delta, expected in ((0.1, None), (0.11, 0.4)):
        lam = calibration_rows(outcomes, sentences, delta=delta, epsilon=0.01)[0]["value"]
        assert lam == expected


def test_a_threshold_that_fails_ends_the_calibration():
    hits = np.ones((3, 400))
    hits[1] = 0  # the middle one fails: the lowest, though right, is not reached
    outcomes = {
        (name, "gap"): ((0.2, 0.4, 1.0), Outcome(np.ones((3, 400), int), hits))
        for name in ("mat", "id")
    }
    assert calibration_rows(outcomes, np.arange(400), delta=0.2, epsilon=0.05)[0]["value"] == 1.0


@pytest.mark.parametrize("causal", [True, False])
def test_padded_examples_are_what_the_model_reads(split, causal):
    tokens, lengths, positions = padded(split, 12, causal=causal)
    assert tokens.shape[1] % 8 == 0
    assert positions.tolist() == split.positions[:12].tolist()
    for k, (row, position) in enumerate(zip(split.rows[:12], split.positions[:12], strict=True)):
        whole = split.tokens[split.starts[row] :][: split.lengths[row]]
        expected = whole[: position + 1] if causal else whole
        assert lengths[k] == len(expected)
        assert tokens[k].tolist() == [*expected, *[0] * (tokens.shape[1] - len(expected))]


def test_wall_clock_rows_with_a_clock_that_is_faked(split, monkeypatch):
    """Which examples run, at which thresholds, and what their seconds become."""
    count, seconds = 6, {"full": 4.0, "naive": 6.0, "cheap": 3.0}
    model, ran = models.build(CONFIG, nnx.Rngs(0)), []
    monkeypatch.setattr(
        curves, "run_fully", lambda *given: ran.append(("full", given[1:], None, None))
    )
    monkeypatch.setattr(
        curves,
        "run_until_sure",
        lambda _, *given: ran.append(("early", given[:3], given[3], given[4])),
    )
    batches = []

    def medians(passes):
        assert list(passes) == ["full", "naive", "cheap"]
        for name, run in passes.items():
            ran.clear()
            run()
            batches.append((name, list(ran)))
        return seconds

    monkeypatch.setattr(curves, "medians", medians)
    hits = np.array([[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1.0]])
    layers = np.ones((3, 4), int)
    outcomes = {
        ("mat", "gap"): ((0.1, 0.2, 0.3), Outcome(layers, hits)),
        ("mat", "gap_cheap"): ((0.5, 0.6, 0.7), Outcome(layers, hits[[1, 2, 2]])),
        ("id", "gap"): ((0.8, 0.9, 1.0), Outcome(layers, hits)),
    }
    maps = {l: Constant(np.full(1, float(l))) for l in range(L + 1)}
    words = np.array([3, 4])
    rows = timing_rows(model, maps, words, EVERY, outcomes, (split, count), "jmat", level=0.75)

    mean_length = np.mean(split.positions + 1)
    whole, lengths, positions = padded(split, count, causal=True)
    for (name, calls), size in zip(batches, [1] * 3 + [count] * 3, strict=True):
        assert len(calls) == count // size
        for k, (kind, (tokens, length, position), thresholds, rule) in enumerate(calls):
            mine = slice(k * size, (k + 1) * size)
            T = tokens.shape[1]
            assert T % 16 == 0
            assert lengths[mine].max() <= T < lengths[mine].max() + 16
            cut = min(T, whole.shape[1])
            np.testing.assert_array_equal(tokens[:, :cut], whole[mine, :cut])
            assert (length.tolist(), position.tolist()) == (
                lengths[mine].tolist(),
                positions[mine].tolist(),
            )
            assert kind == ("full" if name == "full" else "early")
            if name != "full":
                lam, layers = (0.2, [1, 2, 3, 4]) if name == "naive" else (0.5, [2, 4])
                expected = [0.9 * lam + 0.1 * np.exp(-4 * t / mean_length) for t in positions[mine]]
                np.testing.assert_allclose(thresholds, expected)
                assert dict(rule.maps) == {l: maps[l] for l in layers}
                assert rule.words is (None if name == "naive" else words)
    for size in (1, count):
        mine = [row for row in rows if row["batch"] == size]
        taken = {
            row["check"]: row["value"] for row in mine if row["metric"] == "seconds_per_example"
        }
        assert taken == {name: value / count for name, value in seconds.items()}
        ratios = {row["check"]: row["value"] for row in mine if row["metric"] == "time_ratio"}
        assert ratios == {"naive": 1.5, "cheap": 0.75}
        assert {(row["n"], row["level"], row["map"]) for row in mine} == {(count, 0.75, "mat")}
