"""Figures that mean little carry a note: models that do not read, targets that do not
vary, a single sentence.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmat
from jmat.capture.stream import all_positions, packed_batches, stream_moments
from jmat.maps.from_moments import r2 as streaming_r2
from jmat.maps.types import Identity, Linear
from jmat.metrics.bootstrap import bootstrap_mean, bootstrap_ratio
from jmat.metrics.predictions import Predictions
from jmat.report.notes import DOES_NOT_VARY, NO_INTERVAL, OVERFLOWS, format_notes, noted
from jmat.studies import evaluation
from jmat.studies.cross_corpus import rows as travel
from jmat.studies.early_exit.curves import calibration_rows
from jmat.studies.early_exit.thresholds import Outcome, layers_saved
from jmat.studies.linearity import rows as study_rows
from jmat.studies.linearity.measure import measure, step_pairs
from jmat.studies.probe.classifiers import probe_rows
from jmat.studies.prune.measure import Sums, quality_rows
from jmat.studies.r2 import Target, resamples
from jmat.studies.tasks import choices
from jmat.studies.tasks import scoring as tasks
from jmat.studies.tasks.questions import Question, read_task
from tests.splits import make_split
from tests.test_reference import REFERENCE

SAME = "the model predicts the same at all"
RNG = np.random.default_rng(0)
VARIED = RNG.normal(size=(40, 64)).astype(np.float32)


def dead(model):
    """The model with all weights zero."""
    return jax.tree.map(jnp.zeros_like, model)


def overflowing(model):
    """The model with a norm whose epsilon is infinite in float32."""
    copy = jax.tree.map(lambda leaf: leaf, model)
    copy.final_norm.eps = float("inf")
    return copy


def note_of(*batches, real=None):
    predictions = Predictions()
    for batch in batches:
        predictions.add(batch, real)
    return predictions.note()


def test_predictions_that_differ_have_no_note():
    assert note_of(VARIED) is None
    assert note_of(VARIED[:3], VARIED[3:6]) is None
    assert note_of(VARIED[:1]) is None  # of one example nothing can be said
    lost = VARIED.copy()
    lost[0] = np.nan  # which is far from every number
    assert note_of(lost) is None
    near = np.zeros((9, 5), np.float32)
    near[:, 0], near[:, 1] = 5, np.arange(9) / 9
    assert note_of(near) is None  # nine examples can have one most likely token by chance


@pytest.mark.parametrize(
    "batches", [[np.zeros((2, 5))], [np.ones((1, 5)), np.ones((30, 5))], [VARIED[:1]] * 2]
)
def test_equal_predictions_are_noted(batches):
    note = note_of(*(batch.astype(np.float32) for batch in batches))
    assert note.startswith(
        f"{SAME} {sum(map(len, batches))} places: its predictions do not depend on the text"
    )


def test_one_most_likely_token_is_noted():
    biased = VARIED.copy()
    biased[:, 7] = 50
    assert note_of(biased).startswith(
        "the model's most likely token is the same (7) at all 40 places"
    )


def test_padding_is_not_looked_at():
    logits = np.zeros((4, 3, 5), np.float32)
    logits[:, 2] = RNG.normal(size=(4, 5))
    real = np.ones((4, 3), bool)
    real[:, 2] = False
    assert note_of(logits, real=real).startswith(f"{SAME} 8 places")
    assert note_of(logits) is None
    assert note_of(logits, real=np.zeros((4, 3), bool)) is None


@pytest.mark.parametrize("spoil", [dead, overflowing])
def test_a_model_that_does_not_read_is_noted_wherever_predictions_are_compared(gpt2, spoil):
    model = spoil(gpt2)
    predictions = Predictions()
    shortcuts = {("id", 0): (Identity(), VARIED)}
    values = evaluation.evaluate(model, VARIED, shortcuts, predictions=predictions)
    rows = noted(evaluation.metric_rows(values, 4), predictions.note())
    assert {row["value"] for row in rows if row["metric"] == "precision@1"} == {1}
    assert all(SAME in row["note"] for row in rows)
    alive = Predictions()
    evaluation.evaluate(gpt2, VARIED, shortcuts, predictions=alive)
    assert alive.note() is None

    fit = travel.Fit("a", 40, {0: Linear(np.eye(64, dtype=np.float32))}, "")
    rows = travel.cross_rows(model, [fit], "a", {0: VARIED, 4: VARIED})
    assert {SAME in row.get("note", "") for row in rows if row["metric"] == "precision@1"} == {True}
    tokenizer = jmat.load(REFERENCE / "gpt2")[1]
    assert (
        SAME in tasks.text_rows(model, tokenizer, "text", ["Returns the value of it."])[0]["note"]
    )


def test_ties_of_choices_count_as_their_share():
    assert choices.best_choices(np.array([-3.0, -1.0, -1.0])).tolist() == [1, 2]
    assert choices.best_choices(np.array([-3.0, -1.0, -1.001])).tolist() == [1]


def test_equally_likely_choices_are_noted(gpt2):
    tokenizer = jmat.load(REFERENCE / "gpt2")[1]
    questions = [Question("It returns", ("the value", "the value", "zq qq zq"), 1)] * 3
    rows = {row["metric"]: row for row in choices.task_rows(gpt2, tokenizer, "task", questions)}
    assert rows["accuracy"]["value"] == 0.5
    assert (
        "in 3 of 3 questions the best of k choices are equally likely" in rows["accuracy"]["note"]
    )


def test_two_equal_choices_are_refused_in_a_file(tmp_path):
    path = tmp_path / "task.jsonl"
    path.write_text('{"context": "It is", "choices": ["so", " so "], "answer": 1}\n')
    with pytest.raises(ValueError, match=r"line 1: the choice 'so' is there twice"):
        read_task(path)


@pytest.mark.parametrize("constant", [0.0, 0.1, 1e4])
def test_r2_of_a_target_that_does_not_vary_is_none(constant):
    target = np.full((40, 64), constant, np.float32)
    drawn = resamples(np.arange(40) % 3, samples=20)
    rows = Target(target, drawn).rows({}, target + np.float32(0.5))
    assert {row["metric"] for row in rows} == {"r2", "r2_weighted", "r2_no_outliers", "r2_no_first"}
    assert {(row["value"], row["note"]) for row in rows} == {(None, DOES_NOT_VARY)}


def test_r2_says_which_coordinates_do_not_vary():
    target = VARIED.copy()
    target[:, :40] = 0.1  # whose mean is not 0.1
    predicted = target + np.float32(0.01)
    rows = {
        row["metric"]: row
        for row in Target(target, resamples(np.ones(40, int), samples=20)).rows({}, predicted)
    }
    assert "40 of 64 coordinates of the target do not vary" in rows["r2"]["note"]
    assert rows["r2"]["value"] == pytest.approx(24 / 64, abs=1e-3)
    assert rows["r2_weighted"]["value"] == pytest.approx(1, abs=1e-3)
    assert "note" not in rows["r2_weighted"]
    # the median coordinate does not vary: what is an outlier is judged by those that do
    target[:, 41] *= 1000
    rows = {
        row["metric"]: row
        for row in Target(target, resamples(np.ones(40, int), samples=20)).rows({}, target)
    }
    assert rows["r2_no_outliers"]["value"] == 1


def test_every_other_r2_of_what_does_not_vary_is_none(gpt2):
    flat = np.full((12, 64), 0.1, np.float32)
    rows = travel.cross_rows(gpt2, [], "a", {0: VARIED[:12], 4: flat})
    assert {(row["value"], row["note"]) for row in rows if row["metric"] == "r2"} == {
        (None, DOES_NOT_VARY)
    }
    means = {row["metric"]: row["value"] for row in travel.over_layers(rows)}
    assert means["r2"] is None

    model, split = dead(gpt2), make_split([9, 12, 5])
    split = dataclasses.replace(split, tokens=split.tokens % 700)
    batches = packed_batches(split, all_positions(split), tokens_per_batch=64, row_multiple=4)
    pairs = [("embed", "block.0")]
    assert np.isnan(
        [*streaming_r2(stream_moments(model, batches, pairs), *pairs[0], Identity()).values()]
    ).all()
    labels = step_pairs(4)
    measured = measure(model, batches, batches, labels)
    rows = study_rows.linearity_rows(
        measured, labels, study_rows.resampled(measured, split, labels, samples=5)
    )
    assert {row["value"] for row in rows} == {None}
    assert {row["note"] for row in rows} == {DOES_NOT_VARY, study_rows.ZERO}
    assert (
        study_rows.error_rows(measured, labels)
        == study_rows.token_rows(measured, split, labels, str)
        == []
    )


def test_one_sentence_has_values_and_no_interval():
    one, rng = np.zeros(6, int), np.random.default_rng(1)
    hits = rng.integers(2, size=6).astype(np.float64)
    assert np.isnan(bootstrap_mean(hits, groups=one)[1:]).all()
    assert np.isnan(bootstrap_mean(hits[:1])[1:]).all()
    assert np.isnan(bootstrap_ratio(hits[:1], np.ones(1), np.ones((9, 1)))[1:]).all()
    outcome = Outcome(np.array([[1] * 6, [4] * 6]), np.stack([hits, np.ones(6)]))
    assert np.isnan(layers_saved({"mat": outcome}, 4, 0.9, groups=one)["mat"][1:]).all()
    assert np.isfinite(layers_saved({"mat": outcome}, 4, 0.9)["mat"]).all()

    rows = Target(VARIED[:6], resamples(np.ones(6, int), one, samples=20)).rows({}, VARIED[:6] + 1)
    streams = {0: VARIED[:6]}
    labels = {"fit": np.array([*"aabbab"]), "eval": np.array([*"abbabb"])}
    rows += probe_rows(streams, streams, labels, groups=one)
    rows += quality_rows({0: Sums(*np.full((4, 1), 0.5))}, {0: {}})
    read = {metric: np.ones(6, np.float32) for metric in evaluation.METRICS}
    rows += evaluation.metric_rows({("mat", 0): read}, 4, groups=one)
    assert all(
        row["value"] is not None and "low" not in row and NO_INTERVAL in row["note"] for row in rows
    )


def test_calibration_on_one_sentence_says_what_it_lacks():
    outcome = Outcome(np.full((2, 3), 4), np.ones((2, 3)))
    outcomes = {(name, "gap"): ((0.0, 1.0), outcome) for name in ("mat", "id")}
    rows = calibration_rows(outcomes, np.zeros(3, int), 0.1, 0.05)
    assert [row["value"] for row in rows] == [None, None]
    assert all("one sentence is too few" in row["note"] for row in rows)


def test_an_infinite_divergence_leaves_the_other_figures():
    read = {metric: np.ones(4, np.float32) for metric in evaluation.METRICS}
    read["kl"][2] = np.inf
    rows = {row["metric"]: row for row in evaluation.metric_rows({("mat", 0): read}, 4)}
    assert (rows["kl"]["value"], rows["kl"]["note"]) == (None, OVERFLOWS)
    assert rows["precision@1"]["value"] == 1


def test_equally_likely_tokens_are_noted():
    read = {metric: np.ones(4, np.float32) for metric in evaluation.METRICS} | {
        "gap": np.array([0, 0.5, 0, 0.1])
    }
    rows = {row["metric"]: row for row in evaluation.metric_rows({("mat", 0): read}, 4)}
    assert (
        "at 2 of 4 examples the two most likely tokens are equally so"
        in rows["precision@1"]["note"]
    )


def test_equally_frequent_labels_are_averaged():
    labels = {"fit": np.array([*"aabb"]), "eval": np.array([*"aaab"])}
    rows = probe_rows({0: VARIED[:4]}, {0: VARIED[4:8]}, labels)
    assert rows[-1]["value"] == 0.5
    assert "the labels 'a', 'b' are equally frequent" in rows[-1]["note"]


def test_notes_are_printed_once():
    rows = [
        {"value": None, "note": "a"},
        {"value": None, "note": "a"},
        {"value": 1, "note": "b"},
        {"value": 2},
    ]
    assert format_notes(rows) == ["2 of 4 rows have no value: a", "b"]
