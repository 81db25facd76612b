"""The benchmark runs, its contenders compute the same things, and costs on paper are
those of real arrays.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from experiments.benchmarking import maps, memory, rivals
from experiments.benchmarking.peak import matmul_chain
from experiments.benchmarking.rows import (
    Goal,
    format_errors,
    format_ratios,
    missing_row,
    paired_row,
)
from experiments.benchmarking.setup import (
    Bench,
    random_model,
    random_sentences,
    random_streams,
    sentences_of,
    shape_config,
)
from jmat.capture.activations import capture
from jmat.capture.moments import zeros
from jmat.capture.reading import reading_batches
from jmat.capture.stream import stream_moments
from jmat.checkpoint import parameters
from jmat.maps.jumps import fit_jumps, fit_jumps_to_moments
from jmat.models import build, cost
from jmat.models.flops import block_flops
from jmat.models.sites import stream_sites
from jmat.runtime.timing import in_turn
from jmat.studies.linearity.measure import step_pairs, stored_linearity
from tests.scripts import rows_of, run

TINY = shape_config("tiny")
L, D = TINY.layers, TINY.width


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return folder, random_model("tiny", folder, dtype="float32")


# --- the script -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_script_measures_every_part(tmp_path):
    printed, _ = run("benchmark", "--shape=tiny", "--smoke", "--repeats=1", f"--out={tmp_path}")
    rows = rows_of(tmp_path)
    by_part = {row["map"] for row in rows}
    assert by_part == {
        "streaming",
        "cost",
        "capture",
        "early_exit",
        "suite",
        "fit",
        "linearity",
        "decoding 1",
        "decoding 16",
        "jacobian",
        "condition",
    }
    same = [row["value"] for row in rows if row["metric"] == "same_tokens"]
    assert len(same) == 2
    assert min(same) > 0.5
    assert {row["map"] for row in rows if "goal" in row} == by_part - {"cost"}
    assert not any("met" in row for row in rows)  # so small sizes say nothing
    assert "MISSED" not in printed
    for part in by_part:
        assert part in printed
    seconds = {(row["map"], row["of"]): row for row in rows if row["metric"] == "seconds"}
    ratios = {row["map"]: row for row in rows if row["metric"] == "ratio"}
    for part, other in (("fit", "scikit-learn"), ("linearity", "SVD per pair")):
        per_pair = [
            seconds[part, name]["value"] / seconds[part, name]["pairs"] for name in (other, "jmat")
        ]
        assert ratios[part]["value"] == pytest.approx(per_pair[0] / per_pair[1])
    (agree,) = [row for row in rows if (row["map"], row["metric"]) == ("jacobian", "difference")]
    assert agree["value"] < 1e-5
    config = json.loads((tmp_path / "results.json").read_text())["config"]
    assert (config["shape"], config["num_fit"], config["positions"]) == ("tiny", 200, 500)


def test_script_refuses_unknown_parts(tmp_path):
    _, said = run("benchmark", "--shape=tiny", "--parts=fit,speed", f"--out={tmp_path}", code=1)
    assert "speed" in said
    assert "linearity" in said


# --- rows -----------------------------------------------------------------------------------------


def test_a_miss_is_shown_as_a_miss():
    taken = {"jmat": [2.0, 1.0], "other": [2.0, 3.0]}
    missed = paired_row("fit", taken, "other", Goal(5), scale=2)
    assert missed["value"] == 4
    assert (missed["low"], missed["high"]) == (2, 6)
    assert not missed["met"]
    reached = paired_row("fit", taken, "other", Goal(4, at_most=True), scale=2)
    assert reached["met"]
    absent = missing_row("capture", "ratio", Goal(1.1), "torch is not installed.")
    lines = format_ratios(
        [missed, reached, absent, {"map": "fit", "metric": "seconds", "value": 1.0}]
    ).splitlines()
    assert len(lines) == 4
    assert lines[1].endswith("MISSED")
    assert lines[2].endswith("yes")
    assert "not installed" in lines[3]
    assert "yes" not in lines[3]


def test_contenders_take_turns():
    order = []
    taken = in_turn({name: lambda name=name: order.append(name) for name in "ab"}, 3)
    assert order == list("ababab")
    assert [len(values) for values in taken.values()] == [3, 3]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_matmul_chain_counts_its_work(dtype):
    work, flops = matmul_chain([(8, 3, 5), (2, 4, 6)], dtype)
    products = work()
    assert [p.shape for p in products] == [(8, 5), (2, 6)]
    assert {str(p.dtype) for p in products} == {dtype}
    assert flops == 2 * (8 * 3 * 5 + 2 * 4 * 6)


# --- what is measured -----------------------------------------------------------------------------


def test_random_sentences_have_the_lengths_of_sentences():
    split = random_sentences(2000, 211, seed=0)
    assert 20 < np.median(split.lengths) < 28
    assert split.lengths.min() >= 1
    assert len(set(split.lengths.tolist())) > 30
    assert split.tokens.max() < 211
    share = (split.positions / split.lengths).mean()
    assert 0.4 < share < 0.5  # uniform over the sentence, the first position included
    again = random_sentences(2000, 211, seed=0)
    np.testing.assert_array_equal(split.tokens, again.tokens)


@pytest.mark.parametrize("tokens", [1, 50, 4096])
def test_sentences_of_hold_so_many_tokens(tokens):
    split = sentences_of(tokens, 211, seed=0)
    assert len(split.tokens) == split.lengths.sum() == tokens


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_transformers_reads_the_same_streams(saved, attention):
    folder, model = saved
    split = random_sentences(40, TINY.vocab_size, seed=0)
    ours = capture(model, split, stream_sites(L), tokens_per_batch=256)
    batches = reading_batches(TINY, split, 256, alone=True)
    theirs = rivals.torch_streams(folder, batches, attention, "float32")()
    # transformers' last one is normed
    for site, stream in list(zip(ours, theirs, strict=True))[:-1]:
        np.testing.assert_allclose(ours[site], stream, atol=1e-5)


def test_every_way_to_linearity_and_to_maps_agrees():
    streams = random_streams(600, TINY, seed=0)
    scores = stored_linearity(streams)
    fitted, _ = fit_jumps(streams)
    assert set(scores) == {(i, j) for i in range(L) for j in range(i + 1, L + 1)}
    for i, j in scores:
        X, Y = (torch.from_numpy(streams[k]) for k in (i, j))
        assert scores[i, j] == pytest.approx(rivals.svd_linearity(X, Y), abs=1e-4)
        theirs = maps.predictions(streams[i], rivals.sklearn_map(streams[i], streams[j]))
        assert (
            maps.relative(maps.predictions(streams[i], np.asarray(fitted[i, j].W)), theirs) < 1e-4
        )
    assert scores[0, L] < scores[0, 1] < 0.9999


def test_hard_problem_is_as_hard_as_it_says():
    X, Y = maps.hard_problem(400, 50, 1e4, noise=0.0)
    assert np.linalg.cond(X.astype(np.float64)) == pytest.approx(1e4, rel=0.05)
    exact = maps.predictions(X, np.linalg.lstsq(X.astype(np.float64), Y.astype(np.float64))[0])
    errors = {
        name: maps.relative(maps.predictions(X, W), exact)
        for name, W in maps.solutions(X, Y).items()
    }
    assert errors["jmat moments, float64"] < 1e-8
    assert errors["jmat QR, float32"] < 1e-4
    assert not errors["float32 normal equations"] < 1e-2


def test_outlier_coordinates_cost_lstsq_its_digits_and_qr_none(saved, monkeypatch):
    X, _ = maps.outlier_problem(50, 6, noise=0.0)
    spread = X.std(0)
    assert (spread[:3] > 1000).all()
    assert (spread[3:] < 2).all()
    # of one shape with the other problem: nothing is compiled twice
    monkeypatch.setattr(maps, "CONDITIONS", (1e3,))
    monkeypatch.setattr(
        maps, "hard_problem", lambda N, D, condition, noise: maps.outlier_problem(4000, D, noise)
    )
    folder, model = saved
    few = random_sentences(2, TINY.vocab_size, seed=0)
    bench = Bench(
        model,
        folder,
        "float32",
        few,
        few,
        num_fit=4000,
        positions=1,
        tokens_per_batch=1,
        sampled=1,
        repeats=1,
    )
    rows = maps.condition_rows(bench)
    errors = {
        row["method"]: row["value"]
        for row in rows
        if row.get("outliers") == 3 and row["noise"] == 0.1
    }
    assert errors["jnp.linalg.lstsq"] > 0.5  # its cut-off, eps N, leaves the outliers alone
    assert 1e-5 < errors["jnp.linalg.lstsq, rcond=0"] < 5e-3
    assert errors["jmat QR, float32"] < 2e-6
    assert errors["jmat moments, float64"] < 1e-9
    verdict = next(row for row in rows if row["metric"] == "error of 3 x 3000")
    both = [
        row["value"] for row in rows if row.get("outliers") and row["method"] == verdict["jmat"]
    ]
    assert verdict["value"] == max(both)
    table = format_errors([row for row in rows if row["metric"] == "prediction_error"]).splitlines()
    assert table[0].split()[-4:] == ["1e+03", "3", "x", "3000"]
    line = next(line for line in table[len(table) // 2 :] if "rcond=0" in line)  # the noisy half
    assert line.split()[-1] == f"{errors['jnp.linalg.lstsq, rcond=0']:.1e}"


# --- cost on paper --------------------------------------------------------------------------------


def test_work_on_paper_is_what_the_compiler_counts():
    tokens, context = 64, 16
    assert cost.capture_flops(TINY, tokens, context) == L * block_flops(TINY, tokens, context)
    product = jax.jit(lambda x, y: x.T @ y).lower(jnp.ones((tokens, D)), jnp.ones((tokens, D)))
    one = product.cost_analysis()["flops"]
    assert cost.statistics_flops(TINY, tokens, "final") == pytest.approx(2 * L * one)
    assert cost.statistics_flops(TINY, tokens, "all") == pytest.approx((L + L * (L + 1) / 2) * one)
    per_pair = cost.moments_fit_flops(TINY, "all") - cost.moments_fit_flops(TINY, "final")
    assert per_pair == pytest.approx(3 * 2 * D**3 * (L * (L + 1) / 2 - L))
    with pytest.raises(ValueError, match="targets='some'"):
        cost.pair_count(TINY, "some")


@pytest.mark.parametrize("targets", ["final", "all"])
def test_bytes_on_paper_are_those_of_the_arrays(saved, targets):
    _, model = saved
    assert cost.parameter_count(TINY) == sum(leaf.size for leaf in parameters(model).values())
    streams = stream_sites(L)
    pairs = [
        pair for pair in step_pairs(L, all_pairs=True) if targets == "all" or pair[1] == streams[-1]
    ]
    moments = zeros(pairs, dict.fromkeys(streams, D))
    assert cost.statistics_bytes(TINY, targets) == sum(
        leaf.nbytes for leaf in jax.tree.leaves(moments)
    )


def test_cost_scales_with_chips_and_targets():
    one, many = (
        cost.streaming_cost(TINY, 10_000, cost.Machine("", 1e12, 1e11, 1e9, chips=chips))
        for chips in (1, 4)
    )
    assert many.seconds["capture"] == pytest.approx(one.seconds["capture"] / 4)
    assert many.seconds["statistics"] == pytest.approx(one.seconds["statistics"] / 4)
    assert many.seconds["fit"] == one.seconds["fit"]
    assert many.bytes["statistics"] == one.bytes["statistics"]
    assert many.bytes["batch"] == pytest.approx(one.bytes["batch"] / 4, rel=0.01)
    final = cost.streaming_cost(TINY, 10_000, cost.Machine("", 1e12, 1e11, 1e9), targets="final")
    assert final.memory < one.memory
    assert final.flops["statistics"] < one.flops["statistics"]


def test_streaming_reads_every_token(saved):
    _, model = saved
    batches = memory.plan(TINY, 700, 256)
    moments = stream_moments(model, batches, list(step_pairs(L, all_pairs=True)))
    assert float(moments.count["embed"]) == 700
    maps, _ = fit_jumps_to_moments(moments, L)
    assert set(maps) == {(i, j) for i in range(L) for j in range(i + 1, L + 1)}
    assert build(TINY, nnx.Rngs(0)).config == model.config
