"""Linearity against the formulas of the paper in float64, and what is reported of it."""

import json

import jax
import numpy as np
import pytest
import scipy.stats

from jmat.capture.stream import all_positions, packed_batches
from jmat.data.examples import Split
from jmat.report.names import short_paths
from jmat.report.results import write_results
from jmat.runtime.checks import chosen, chosen_layers
from jmat.studies.linearity import intrinsic, study
from jmat.studies.linearity import rows as study_rows
from jmat.studies.linearity.measure import Measured, PerToken, measure, part_pairs, step_pairs
from tests.families import BY_NAME
from tests.hf import CASES, ours
from tests.scripts import on, rows_of, run
from tests.test_reference import REFERENCE
from tests.test_streaming import in_memory

CASE = {case.name: case for case in CASES} | BY_NAME
FAMILIES = ("gpt2-plain", "bert-plain", "llama-plain", "gpt_neox-parallel", "opt-350m")


def random_split(vocab, sentences, seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 13, sentences).astype(np.int32)
    tokens = rng.integers(0, vocab, lengths.sum()).astype(np.int32)
    return Split(tokens=tokens, lengths=lengths, positions=np.zeros(sentences, np.int32))


def batches_of(split, read=None):
    read = all_positions(split) if read is None else read
    return packed_batches(split, read, tokens_per_batch=512, row_multiple=jax.local_device_count())


def least_squares(x, y):
    """W, b of the affine fit, in float64."""
    X = np.column_stack([x, np.ones(len(x))]).astype(np.float64)
    scale = np.linalg.norm(X, axis=0)
    full = np.linalg.lstsq(X / scale, y.astype(np.float64), rcond=1e-6)[0] / scale[:, None]
    return full[:-1], full[-1]


def centred_square(values):
    wide = values.astype(np.float64)
    return ((wide - wide.mean(0)) ** 2).sum()


def direct(x, y, error_of=None):
    """Both scores as PROTOCOL 7 defines them: for the fit's own text, or for a map (W,
    b).
    """
    x, y = x.astype(np.float64), y.astype(np.float64)
    W, b = least_squares(x, y) if error_of is None else error_of
    error = ((y - x @ W - b) ** 2).sum()
    return 1 - error / centred_square(y), 1 - error / centred_square(y - x)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_the_formula(name):
    model = ours(CASE[name])
    L, D = model.config.layers, model.config.width
    fit, held_out = (random_split(37, count, seed) for seed, count in ((1, 80), (2, 30)))
    labels = step_pairs(L, all_pairs=True) | part_pairs(L)
    measured = measure(model, batches_of(fit), batches_of(held_out), labels)
    figures = study_rows.resampled(measured, held_out, labels, samples=20)
    sites = dict.fromkeys(site for pair in labels for site in pair)
    acts, other = (
        in_memory(model, split, all_positions(split), sites) for split in (fit, held_out)
    )
    n = len(fit.tokens)
    for pair in labels:
        x, y = (acts[site] for site in pair)
        found = measured.in_sample[pair]
        score, without = direct(x, y)
        assert found.score == pytest.approx(score, abs=3e-6), pair
        assert found.without_residual == pytest.approx(without, abs=3e-6 * max(1, abs(without))), (
            pair
        )
        assert found.adjusted(found.score) == pytest.approx(
            1 - (1 - score) * (n - 1) / (n - D - 1), abs=3e-6
        ), pair
        score, without = direct(other[pair[0]], other[pair[1]], least_squares(x, y))
        assert figures[pair, "linearity_held_out"][0] == pytest.approx(score, abs=1e-4), pair
        got = figures[pair, "linearity_without_residual_held_out"][0]
        assert got == pytest.approx(without, abs=1e-4 * max(1, abs(without))), pair
    pair = ("embed", "block.0")
    x, y = (other[site].astype(np.float64) for site in pair)
    norms = np.linalg.norm(x, axis=1), np.linalg.norm(y, axis=1)
    assert figures[pair, "cosine"][0] == pytest.approx(
        ((x * y).sum(1) / norms[0] / norms[1]).mean(), abs=1e-5
    )
    ratio = (np.linalg.norm(y - x, axis=1) / norms[0]).mean()
    assert figures[pair, "contribution_norm"][0] == pytest.approx(ratio, rel=1e-5)
    s = np.linalg.svd(
        acts["embed"].astype(np.float64) - acts["embed"].mean(0, dtype=np.float64), compute_uv=False
    )
    assert measured.anisotropy[0] == pytest.approx(s[0] ** 2 / (s**2).sum(), rel=1e-5)


@pytest.fixture(scope="module")
def bundled(gpt2, gpt2_examples):
    """The reference GPT-2, measured on a few sentences."""
    splits = []
    for split, count in ((gpt2_examples.fit, 60), (gpt2_examples.eval, 40)):
        lengths = split.lengths[:count]
        splits.append(
            Split(
                tokens=split.tokens[: lengths.sum()],
                lengths=lengths,
                positions=split.positions[:count],
            )
        )
    labels = step_pairs(4, all_pairs=True) | part_pairs(4)
    batches = [batches_of(split, all_positions(split, skip_first=1)) for split in splits]
    return labels, splits[1], measure(gpt2, *batches, labels)


def all_rows(labels, held_out, measured):
    figures = study_rows.resampled(measured, held_out, labels, samples=50, seed=3)
    rows = study_rows.linearity_rows(measured, labels, figures) + study_rows.error_rows(
        measured, labels
    )
    rows += study_rows.token_rows(measured, held_out, labels, str)
    rows += [
        row | {"checkpoint": "step-1"}
        for row in study_rows.linearity_rows(measured, labels, figures)
    ]
    difference = study_rows.difference_rows(labels, figures, figures, len(measured.tokens))
    return rows + [row | {"against": "other"} for row in difference]


def test_rows_and_figures(bundled, tmp_path):
    labels, _, measured = bundled
    rows = all_rows(*bundled)
    results = json.loads(json.dumps(write_results(tmp_path, "linearity", {}, rows)))
    own = [row for row in results["rows"] if not {"checkpoint", "against"} & row.keys()]
    scores = [
        f"linearity{a}{b}"
        for a in ("", "_without_residual")
        for b in ("", "_adjusted", "_held_out")
    ]
    for label in labels.values():
        mine = [
            row
            for row in own
            if label.items() <= row.items() and ("target" in label or "target" not in row)
        ]
        assert {row["metric"] for row in mine} >= set(scores)
    for row in own:
        assert "low" not in row or row["low"] <= row["value"] <= row["high"]
        assert ("low" in row) == (
            row["metric"].endswith("held_out") or row["metric"] in ("contribution_norm", "cosine")
        )
    step = {
        row["metric"]: row["value"]
        for row in own
        if (row.get("layer"), row.get("target")) == (1, 2)
    }
    assert step["linearity_adjusted"] < step["linearity"] > step["linearity_held_out"]
    assert step["linearity_without_residual"] < step["linearity"] < 1
    assert [row["layer"] for row in own if row["metric"] == "anisotropy"] == [0, 1, 2, 3, 4]
    shares = [
        row["value"] for row in own if row["metric"] == "token_error_share" and row["layer"] == 2
    ]
    assert sum(shares) == pytest.approx(1)
    differences = [row for row in results["rows"] if row["metric"].endswith("_difference")]
    assert {row["value"] for row in differences} == {row["low"] for row in differences} == {0.0}
    assert len(measured.tokens) == next(
        row["n"] for row in own if row["metric"] == "linearity_held_out"
    )


def test_the_table_of_differences_is_of_steps(bundled):
    rows = [row | {"value": row["target"], "low": 0, "high": 9} if "against" in row and "target" in row else row
            for row in all_rows(*bundled)]  # fmt: skip
    table = study.table(rows).partition("held-out linearity of the step")[2]
    found = [
        line.split()[1]
        for line in table.splitlines()
        if line.split()[:1] in (["0"], ["1"], ["2"], ["3"])
    ]
    assert found == 2 * ["1.000", "2.000", "3.000", "4.000"]  # with the residual and without


def test_checkpoints_are_told_apart():
    assert short_paths(["a/steps/000100", "a/steps/000200", "--model"], 1) == [
        "000100",
        "000200",
        "--model",
    ]
    assert short_paths(["runs/a/model", "runs/b/model", "--model"], 1) == [
        "a/model",
        "b/model",
        "--model",
    ]
    assert short_paths(["runs/a/model"], 2) == ["a/model"]
    assert short_paths(["x/a/model", "x/b/model"], 1) == ["a/model", "b/model"]
    assert short_paths(["x/a/p/model", "x/b/p/model"], 2) == ["a/p/model", "b/p/model"]


def test_least_and_most_linear_tokens(bundled):
    labels, held_out, measured = bundled
    rows = study_rows.token_rows(measured, held_out, labels, lambda token: f"<{token}>")
    least = [row for row in rows if row["extreme"] == "least_linear"]
    most = [row for row in rows if row["extreme"] == "most_linear"]
    assert least[0]["value"] >= least[-1]["value"] >= most[-1]["value"] >= most[0]["value"]
    ids = held_out.tokens[measured.tokens]
    steps = [pair for pair, label in labels.items() if label.get("target") == label["layer"] + 1]
    error = np.mean(
        [measured.per_token[p].error / measured.per_token[p].total.mean() for p in steps], axis=0
    )
    for row in rows:
        here = ids == row["token_id"]
        assert (row["token"], row["n"]) == (f"<{row['token_id']}>", here.sum())
        assert row["value"] == pytest.approx(error[here].mean(), rel=1e-5)
        assert row["n"] >= 10


def test_sentences_are_resampled_whole():
    """Tokens of a sentence that all err alike are one observation, not ten."""
    rng = np.random.default_rng(0)
    lengths = np.full(30, 10, np.int32)
    split = Split(tokens=np.zeros(300, np.int32), lengths=lengths, positions=np.zeros(30, np.int32))
    ones = np.ones(300, np.float32)
    labels = step_pairs(1)
    widths = []
    for error in (np.repeat(rng.random(30), 10), rng.random(300)):
        each = PerToken(error.astype(np.float32), ones, ones, ones, ones, 0.0, 0.0)
        measured = Measured({}, {}, dict.fromkeys(labels, each), np.arange(300), [])
        values = study_rows.resampled(measured, split, labels)[
            next(iter(labels)), "linearity_held_out"
        ]
        assert values[0] == pytest.approx(1 - error.mean(), abs=1e-6)
        widths.append(values[1:].std())
    assert widths[0] > 2 * widths[1]


def test_what_has_no_value_says_why(bundled):
    labels, held_out, measured = bundled
    flat = PerToken(*[np.zeros(len(measured.tokens), np.float32)] * 5, 0.0, 0.0)
    broken = Measured(measured.in_sample, {}, dict.fromkeys(labels, flat), measured.tokens, [])
    figures = study_rows.resampled(broken, held_out, labels, samples=5)
    rows = [
        row
        for row in study_rows.linearity_rows(broken, labels, figures)
        if row["metric"].endswith("held_out")
    ]
    assert {(row["value"], row["note"]) for row in rows} == {(None, "the target does not vary")}


def test_what_is_named_twice_counts_once():
    assert chosen("method", ["map", "delete", "map"], ("delete", "map")) == ["map", "delete"]
    assert chosen_layers(["3", "1", "3"], 4) == [3, 1]


def cut_examples(path, family, sentences):
    """The first sentences of the reference examples."""
    arrays = {}
    for part, count in zip(("fit", "eval"), sentences, strict=True):
        full = np.load(REFERENCE / family / "examples.npz")
        lengths = full[f"{part}_lengths"][:count]
        arrays[f"{part}_lengths"] = lengths
        arrays[f"{part}_tokens"] = full[f"{part}_tokens"][: lengths.sum()]
        arrays[f"{part}_positions"] = full[f"{part}_positions"][:count]
    np.savez(path, **arrays)
    return arrays


def ratios_by_hand(points):
    """log of second over first distance of every distinct point, rising, from all
    distances.
    """
    distinct = np.array(sorted({tuple(point) for point in points.astype(np.float64).tolist()}))
    distances = np.sqrt(np.square(distinct[:, None] - distinct[None]).sum(-1))
    first, second = np.sort(distances, axis=1)[:, 1:3].T
    return np.sort(np.log(second / first))


def test_estimators_of_dimension_are_their_formulas():
    points = np.random.default_rng(1).exponential(size=(101, 4)).astype(np.float32)
    points = np.concatenate([points, points[:7]])  # equal points count once
    ratios = intrinsic.log_ratios(points)
    np.testing.assert_allclose(ratios, ratios_by_hand(points), rtol=1e-9)
    value, low, high = intrinsic.maximum_likelihood(ratios)
    assert value == pytest.approx(100 / ratios.sum())
    # Under the density, d Σ log μ has a gamma distribution of shape n.
    tails = [scipy.stats.gamma.cdf(bound * ratios.sum(), 101) for bound in (low, high)]
    assert tails == pytest.approx([0.025, 0.975])
    kept = ratios[:90]  # the largest 11 of 101 are left out
    y = [-np.log(1 - i / 101) for i in range(1, 91)]
    slope = np.linalg.lstsq(kept[:, None], np.array(y), rcond=None)[0][0]
    assert intrinsic.linear_fit(ratios) == pytest.approx(slope)
    assert slope != pytest.approx(value, rel=1e-3)


def test_the_public_codes_estimator_of_dimension_by_hand():
    """The lowest fifth of the ratios above 1; points without one count in F, repeated
    ones each.
    """
    points = np.random.default_rng(1).exponential(size=(101, 4))
    points = np.concatenate([points, points[:7], points[:3] + 1e-10])
    points[90:94] = 50.0 + np.eye(4)  # equally far from one another: no ratio above 1
    distances = np.sqrt(np.square(points[:, None] - points[None]).sum(-1))
    scale = np.sqrt(np.square(points - points.mean(0)).sum(1)).mean()
    ratios = []
    for k in range(len(points)):
        first, second = np.sort(np.delete(distances[k], k))[:2]
        if first >= 1e-8 * scale and second / first > 1 + 1e-8:
            ratios.append(np.log(second / first))
    n, left_out = len(points), len(points) - len(ratios)
    assert left_out > 4 + 7
    x = np.sort(ratios)[: len(ratios) // 5, None]
    y = [-np.log(1 - (left_out + i) / n) for i in range(1, len(x) + 1)]
    assert intrinsic.public_code(points) == pytest.approx(
        np.linalg.lstsq(x, np.array(y), rcond=None)[0][0]
    )
    assert intrinsic.public_code(7 * points - 3) == pytest.approx(
        intrinsic.public_code(points), rel=1e-6
    )
    with pytest.raises(ValueError, match="0 of 8 points have a second neighbour farther"):
        intrinsic.public_code(np.eye(8))


def test_estimators_find_the_dimension_of_a_surface():
    random = np.random.default_rng(0)
    for d in (1, 2, 5):
        flat = random.uniform(size=(1500, d))
        bent = np.concatenate(
            [np.cos(flat), np.sin(flat), flat**2], axis=1
        ) @ random.standard_normal((3 * d, 40))
        rows = study_rows.dimension_rows([np.concatenate([bent, bent[:100]]).astype(np.float32)])
        assert {row["estimator"]: row["metric"] for row in rows} == {
            "maximum_likelihood": "intrinsic_dimension",
            "linear_fit": "intrinsic_dimension_fit",
            "public_code": "intrinsic_dimension_public_code",
        }
        likelihood, fit, public = rows
        assert likelihood["low"] < likelihood["value"] < likelihood["high"]
        assert [row["value"] for row in rows[:2]] == pytest.approx([d, d], rel=0.12)
        assert "low" not in fit
        assert study_rows.dimension_rows([bent])[2]["value"] == pytest.approx(d, rel=0.2)
        assert public["value"] > 1.2 * d  # a hundred repeated points count in F
    # Some pairs ten thousand times closer than the rest: maximum likelihood heeds them all, the fit
    # leaves them out.
    near = np.concatenate([flat, flat[:40] + 1e-5])
    likelihood, fit, _ = (row["value"] for row in study_rows.dimension_rows([near]))
    assert likelihood < 2 < 4 < fit
    with pytest.raises(ValueError, match="3 distinct points"):
        intrinsic.log_ratios(np.eye(3)[[0, 1, 2, 2]])
    for estimate in (intrinsic.maximum_likelihood, intrinsic.linear_fit):
        with pytest.raises(ValueError, match="equally far"):
            estimate(intrinsic.log_ratios(np.eye(6)))


def test_a_layer_without_intrinsic_dimension_says_why():
    points = np.random.default_rng(0).standard_normal((50, 3))
    rows = study_rows.dimension_rows([points[[0, 1] * 25], points])
    assert [row["layer"] for row in rows] == [0, 0, 0, 1, 1, 1]
    for none, some in zip(rows[:3], rows[3:], strict=True):
        assert none["value"] is None
        assert none["note"].endswith(("needs four at least.", "needs five at least."))
        assert some["value"] > 1
        assert "note" not in some


@pytest.mark.slow
def test_script(tmp_path):
    arrays = cut_examples(tmp_path / "few.npz", "gpt2", (150, 60))
    model, out = REFERENCE / "gpt2", tmp_path / "out"
    given = {
        "examples": tmp_path / "few.npz",
        "protocol": "jmat",
        "skip_first": 2,
        "all_pairs": True,
    }
    given |= {"intrinsic_dimension": True}
    printed, said = run("linearity", *on("gpt2", out, revisions=model, against=model, **given))
    dimensions = [row for row in rows_of(out) if row["metric"] == "intrinsic_dimension"]
    assert [row["layer"] for row in dimensions] == [0, 1, 2, 3, 4]
    assert all(1 < row["low"] < row["value"] < row["high"] < 64 for row in dimensions)
    rows = rows_of(out)
    counts = {row["metric"]: row["n"] for row in rows if row["map"] == "attn"}
    assert counts["linearity"] == np.maximum(arrays["fit_lengths"] - 2, 0).sum()
    assert counts["linearity_held_out"] == np.maximum(arrays["eval_lengths"] - 2, 0).sum()
    pairs = {
        (row["layer"], row["target"]) for row in rows if row["map"] == "mat" and "layer" in row
    }
    assert pairs == {(i, j) for i in range(4) for j in range(i + 1, 5)}
    own = [
        row
        for row in rows
        if row["metric"] == "linearity" and not {"checkpoint", "against"} & row.keys()
    ]
    again = [
        row for row in rows if row["metric"] == "linearity" and row.get("checkpoint") == str(model)
    ]
    assert [row["value"] for row in own] == [row["value"] for row in again]
    assert all(row["value"] == 0 for row in rows if row["metric"].endswith("_difference"))
    for name in ("linearity", "geometry", "errors", "checkpoints", "difference", "pairs"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG"), name
    for word in ("held out", "adjusted", "least linear", "anisotropy", str(out)):
        assert word in printed, word
    assert "tokens to fit on" in said
    _, said = run("linearity", *on("gpt2", tmp_path / "no", against="gpt2-docs"), code=1)
    assert "only models of one shape" in said
    _, said = run("linearity", *on("gpt2", tmp_path / "no", against=REFERENCE / "bert"), code=1)
    assert "is a causal model" in said
    _, said = run("linearity", *on("gpt2", tmp_path / "no", skip_first=3, overwrite=True), code=1)
    assert "need --protocol=jmat" in said
    _, said = run("linearity", *on("gpt2", tmp_path / "no", revisions="steps/20"), code=1)
    assert "has no revision 'steps/20'" in said
