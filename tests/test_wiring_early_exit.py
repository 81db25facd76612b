"""early_exit and peek as users call them on a text: exits, cheap checks and predictions
by hand.
"""

import json

import numpy as np
import pytest
import transformers

from jmat.capture.activations import capture
from jmat.data import Split
from jmat.models.sites import stream_sites
from jmat.studies.early_exit import study
from jmat.studies.early_exit.curves import saved_rows
from jmat.studies.early_exit.thresholds import Outcome, calibrate
from tests.by_hand import Lab, compare, log_p, same
from tests.inside import call, changed_model, text
from tests.test_reference import REFERENCE

COLUMNS = ("layers", "precision@1", "flops_ratio", "flops_ratio_token")
FLAGS = {"num_fit": 100, "num_eval": 40, "seed": 3, "intercept": True}
FLAGS |= {"protocol": "jmat", "positions_per_sentence": 3, "skip_first": 2}
CHEAP = {"short_list": 60, "check_every": 3, "timing_examples": 7, "delta": 0.3, "epsilon": 0.2}


@pytest.fixture(scope="session")
def lab():
    return Lab(**FLAGS)


@pytest.fixture(scope="session")
def timed():
    """What the clock is started on."""
    return []


@pytest.fixture(scope="session")
def outcome(timed):
    """A run in which nothing is timed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "timing_rows", lambda *given: timed.append(given) or [])
        return call("early_exit", corpus=text(), **FLAGS, **CHEAP)


@pytest.fixture(scope="module")
def read(lab):
    """Map → log-probabilities of every layer's shortcut."""
    layers = range(lab.layers)
    mat = [*(lab.jump(lab.held_out[l], l) for l in layers), lab.held_out[-1]]
    return {
        name: [log_p(lab.model, x) for x in streams]
        for name, streams in (("mat", mat), ("id", lab.held_out))
    }


def gap(scores, words=None):
    """Between the two largest probabilities, of all words or of some."""
    p = np.exp(scores if words is None else scores[:, words])
    first, second = np.sort(p)[:, :-3:-1].T
    return (first - second) / p.sum(1)


def exits(lab, by_layer, lam, words=None, every=1):
    """The first of layers 1 .. L − 1 whose gap is above the paper's threshold, else L."""
    t = lab.examples.eval.positions
    threshold = 0.9 * lam + 0.1 * np.exp(-4 * t / (t + 1).mean())
    left = np.full(len(t), lab.layers)
    for l in range(lab.layers - 1, 0, -1):
        if l % every == 0:
            left[gap(by_layer[l], words) > threshold] = l
    return left


def check_exits(lab, outcome, read, label, left):
    """Blocks run and precision@1 of a setting, with their intervals."""
    for name in read:
        full = read[name][-1]
        metrics = [compare(full, scores) for scores in read[name]]
        every, chosen = np.arange(len(full)), left[name]
        for metric in ("precision@1", "precision@10", "surprisal"):
            values = np.stack([of[metric] for of in metrics])[chosen, every]
            same(outcome.one(map=name, metric=metric, **label), lab.interval(values), len(full))
        same(
            outcome.one(map=name, metric="layers", **label),
            lab.interval(chosen.astype(float)),
            tolerance=0.02,
        )


@pytest.mark.parametrize("lam", [0.1, 0.3, 0.6])
def test_exits_follow_the_papers_rule(lab, outcome, read, lam):
    left = {name: exits(lab, by_layer, lam) for name, by_layer in read.items()}
    assert len(np.unique(left["mat"])) > 1
    check_exits(lab, outcome, read, {"confidence": "gap", "lambda": lam}, left)


def test_cheap_checks_read_the_words_that_are_likeliest_at_the_fit_examples(lab, outcome, read):
    def likeliest(final):
        top = np.argsort(-log_p(lab.model, final), axis=1, kind="stable")[:, :10]
        return np.sort(np.argsort(-np.bincount(top.ravel(), minlength=768), kind="stable")[:60])

    words = likeliest(lab.fit[-1])
    assert set(words) != set(likeliest(lab.held_out[-1]))
    left = {name: exits(lab, by_layer, 0.1, words, every=3) for name, by_layer in read.items()}
    assert set(left["mat"]) == {3, 4}
    check_exits(lab, outcome, read, {"confidence": "gap_cheap", "lambda_cheap": 0.1}, left)


def test_fixed_exits_and_what_is_calibrated(lab, outcome, read):
    fixed = {name: np.full(len(lab.groups), 2) for name in read}
    check_exits(lab, outcome, read, {"confidence": "fixed", "layer": 2}, fixed)
    grid = sorted(
        {row["lambda"] for row in outcome.find(map="mat", confidence="gap") if "lambda" in row}
    )
    every, first = np.arange(len(lab.groups)), np.unique(lab.groups, return_index=True)[1]
    hits = np.stack([compare(read["mat"][-1], scores)["precision@1"] for scores in read["mat"]])
    left = np.stack([exits(lab, read["mat"], lam) for lam in grid])
    even, odd = first[::2], first[1::2]
    lam = calibrate(
        Outcome(left[:, even], hits[left, every][:, even]), grid, delta=0.3, epsilon=0.2
    )
    row = outcome.one(map="mat", metric="calibrated_lambda")
    assert (row["value"], row["delta"], row["epsilon"], row["n"]) == (lam, 0.3, 0.2, len(even))
    wrong = 1 - hits[left[grid.index(lam)], every][odd].mean()
    same(outcome.one(map="mat", metric="disagreement"), [wrong], len(odd), tolerance=1e-6)


def test_the_clock_runs_on_the_fitted_maps_and_the_cheap_checks(lab, outcome, timed):
    ((model, maps, words, check_every, outcomes, sample, protocol),) = timed
    assert model.config == lab.model.config
    wanted = lab.jump(lab.held_out[1], 1)
    np.testing.assert_allclose(maps[1](lab.held_out[1]), wanted, atol=1e-3 * np.abs(wanted).max())
    assert (len(words), check_every, protocol) == (60, 3, "jmat")
    for row in saved_rows(outcomes, 4, lab.groups, seed=3):
        found = outcome.one(**{key: row[key] for key in ("map", "confidence", "metric")})
        ends = [row[end] for end in ("value", "low", "high")]
        assert [found[end] for end in ("value", "low", "high")] == ends
        if row["confidence"] == "gap":
            value, low, high = (f"{100 * end:.1f}" for end in ends)
            share, points = (
                f"saves {value}% [{low}%, {high}%] of",
                f"{value} points [{low}, {high}] at",
            )
            assert (points if row["map"] == "mat - id" else share) in found["note"]
    assert (sample[0].tokens.tolist(), *sample[1:]) == (lab.examples.eval.tokens.tolist(), 7)


def test_maps_are_kept_and_figures_printed(lab, outcome):
    maps, info = outcome.maps
    assert set(maps) == {f"mat.{l}.4" for l in range(4)}
    assert (info.n, info.seed) == (len(lab.fit[0]), 3)
    wanted = lab.jump(lab.held_out[2], 2)
    np.testing.assert_allclose(
        maps["mat.2.4"](lab.held_out[2]), wanted, atol=1e-3 * np.abs(wanted).max()
    )
    table = [line.split() for line in outcome.printed.splitlines()]
    (line,) = [line for line in table if line[:1] == ["0.3"]]
    shown = [
        outcome.one(**{"map": name, "metric": metric, "confidence": "gap", "lambda": 0.3})["value"]
        for metric in ("layers", "precision@1", "flops_ratio", "flops_ratio_token")
        for name in ("mat", "id")
    ]
    assert line[1:] == [f"{value:.3f}" for value in shown]
    (figure,) = outcome.figures
    assert figure.get_suptitle().endswith("reference/gpt2: early exit")


# --- peek -----------------------------------------------------------------------------------------

SENTENCES = ("Returns the name of the file.", "The default value")


def check_peek(outcome, lab, layers, jump, top):
    """Every cell of results.json and peek.json."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(REFERENCE / "gpt2")
    ids = [np.asarray(tokenizer(sentence)["input_ids"], np.int32) for sentence in SENTENCES]
    rows = np.repeat(np.arange(len(ids)), [len(each) for each in ids]).astype(np.int32)
    places = np.concatenate([np.arange(len(each)) for each in ids]).astype(np.int32)
    split = Split(
        np.concatenate(ids), np.asarray([len(each) for each in ids], np.int32), places, rows
    )
    streams = list(capture(lab.model, split, stream_sites(4)).values())
    seen = 0
    for layer in layers:
        stand_ins = {
            "id": streams[layer],
            "mat": jump(streams[layer], layer) if layer < 4 else streams[4],
        }
        for name, stand_in in stand_ins.items():
            p = np.exp(log_p(lab.model, stand_in))
            for k in range(len(rows)):
                row = outcome.one(
                    map=name, layer=layer, sentence=int(rows[k]), position=int(places[k])
                )
                best = np.argsort(-p[k], kind="stable")[:top]
                said = [row[f"probability_{rank}"] for rank in range(1, top + 1)]
                assert said == pytest.approx(p[k, best].tolist(), rel=5e-3)
                assert f"top_{top + 1}" not in row
                seen += 1
    assert seen == len(outcome.rows)
    assert json.loads((outcome.out / "peek.json").read_text("utf-8"))["layers"] == layers
    assert (outcome.out / "peek.html").exists()


def test_peek_fits_maps_as_the_flags_say(lab):
    sentences = [f"--sentences={sentence}" for sentence in SENTENCES]
    outcome = call("peek", *sentences, corpus=text(), layers="0,3", top=3, **FLAGS)
    check_peek(outcome, lab, [0, 3, 4], lab.jump, top=3)
    assert [
        line.split()[0] for line in outcome.printed.splitlines() if line.strip()[:1].isdigit()
    ] == [
        "4",
        "3",
        "0",
    ] * 2


def test_peek_reads_saved_maps_instead(lab):
    saved = call("layer_jump", corpus=text(), num_fit=90, num_eval=50)
    sentences = [f"--sentences={sentence}" for sentence in SENTENCES]
    outcome = call("peek", *sentences, maps=saved.out, layers="2")
    check_peek(outcome, lab, [2, 4], Lab(num_fit=90, num_eval=50).jump, top=5)
    other = call("layer_jump", model=changed_model(), corpus=text(), num_fit=90, num_eval=50)
    with pytest.raises(ValueError, match="model"):
        call("peek", *sentences, maps=other.out)
