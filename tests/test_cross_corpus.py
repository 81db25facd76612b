"""Maps that travel: what they are fitted on, what they are evaluated on, and how the
rows and figures tell.
"""

import json
import os

import numpy as np
import pytest

import jmat
from jmat.data import save_examples
from jmat.data.examples import Examples, Split
from jmat.forward import logits
from jmat.metrics.r2 import r2_score
from jmat.studies import cross_corpus
from jmat.studies.cross_corpus import plots as travel_plots
from jmat.studies.cross_corpus import rows as travel
from tests.inside import text
from tests.intervals import by_hand
from tests.scripts import on, run
from tests.test_reference import REFERENCE

D = 64  # of the reference GPT-2


def world(seed, n=150):
    """Streams of a corpus where h_4 is a linear function of h_0 and of h_2, another one
    for every seed.
    """
    turns = np.linalg.qr(np.random.default_rng(seed).normal(size=(2, D, D)))[0]
    start = np.random.default_rng([seed, n]).normal(size=(n, D))
    streams = {0: start, 2: start @ turns[0], 4: 3 * start @ turns[1]}
    return {layer: stream.astype(np.float32) for layer, stream in streams.items()}


@pytest.mark.parametrize("intercept", [False, True])
def test_fits_are_least_squares_on_nested_examples(intercept):
    streams = world(0)
    streams[4] = streams[4] + np.random.default_rng(1).normal(size=streams[4].shape).astype(
        np.float32
    )
    few, many = travel.fit_sizes("a", streams, [80, 120], intercept=intercept, seed=3)
    order = np.random.default_rng(3).permutation(150)
    for fit, n in ((few, 80), (many, 120)):
        assert (fit.corpus, fit.n, fit.problem, set(fit.maps)) == ("a", n, "", {0, 2})
        for layer, linear in fit.maps.items():
            x = streams[layer][order[:n]].astype(np.float64)
            x = np.hstack([x, np.ones((n, 1))]) if intercept else x
            expected = np.linalg.lstsq(x, streams[4][order[:n]].astype(np.float64), rcond=None)[0]
            np.testing.assert_allclose(linear.W, expected[:D], atol=1e-4)
            if intercept:
                np.testing.assert_allclose(linear.bias, expected[D], atol=1e-4)


def test_too_few_examples_are_told():
    (fit,) = travel.fit_sizes("a", world(0), [40])
    assert "layer 0: rank 40 of 64: fewer examples than dimensions" in fit.problem


@pytest.fixture(scope="module")
def rows(gpt2):
    """Two corpora, maps of both from 100 examples, and of the first from 70."""
    fits = travel.fit_sizes("a", world(0), [70, 100]) + travel.fit_sizes("b", world(1), [100])
    held_out = {"a": world(0, 200), "b": world(1, 200)}
    return [
        row
        for corpus, streams in held_out.items()
        for row in travel.cross_rows(gpt2, fits, corpus, streams)
    ]


def find(rows, **wanted):
    return [row["value"] for row in rows if all(row[key] == value for key, value in wanted.items())]


def test_rows_cover_all_pairs_sizes_layers_and_metrics(rows):
    assert len(rows) == 2 * (3 + 1) * 2 * 5  # evaluation corpora, fits and id, layers, metrics
    cells = {
        tuple(row[key] for key in ("map", "fit_corpus", "eval_corpus", "n_fit", "layer", "metric"))
        for row in rows
    }
    assert len(cells) == len(rows)
    assert {row["target"] for row in rows} == {4}
    assert {(row["map"], row["fit_corpus"], row["n_fit"]) for row in rows} == {
        ("id", None, 0),
        ("mat", "a", 70),
        ("mat", "a", 100),
        ("mat", "b", 100),
    }


def test_a_map_is_perfect_at_home_and_not_abroad(rows):
    for corpus, other in (("a", "b"), ("b", "a")):
        at_home = {"fit_corpus": corpus, "eval_corpus": corpus, "n_fit": 100}
        abroad = {"fit_corpus": other, "eval_corpus": corpus, "n_fit": 100}
        assert find(rows, **at_home, metric="precision@1") == [1, 1]
        assert np.allclose(find(rows, **at_home, metric="r2"), 1, atol=1e-4)
        assert max(find(rows, **abroad, metric="precision@1")) < 0.5
        assert max(find(rows, **abroad, metric="r2")) < 0.5
        assert (
            min(find(rows, **abroad, metric="surprisal"))
            > max(find(rows, **at_home, metric="surprisal")) + 1
        )


def test_figures_are_those_of_a_plain_computation(gpt2, rows):
    streams = world(1, 200)
    (fit,) = travel.fit_sizes("a", world(0), [70])
    for layer in (0, 2):
        where = {"eval_corpus": "b", "layer": layer}
        for name, stand_in in (
            ("id", streams[layer]),
            ("mat", np.asarray(fit.maps[layer](streams[layer]))),
        ):
            n = {"map": name, "n_fit": 70 if name == "mat" else 0}
            top, full = logits(gpt2, stand_in).argmax(-1), logits(gpt2, streams[4]).argmax(-1)
            assert find(rows, **where, **n, metric="precision@1") == [
                pytest.approx(float((top == full).mean()))
            ]
            assert find(rows, **where, **n, metric="r2") == [
                pytest.approx(r2_score(streams[4], stand_in), rel=1e-4)
            ]


def test_intervals_are_over_sentences_and_follow_the_seed(gpt2):
    streams, sentences = world(1, 200), np.repeat(np.arange(40), 5).astype(np.int32)
    fits = travel.fit_sizes("a", world(0), [70])
    full = logits(gpt2, streams[4]).argmax(-1)
    found = {}
    for seed in (3, 4):
        rows = travel.cross_rows(gpt2, fits, "b", streams, groups=sentences, seed=seed)
        found[seed] = {(r["map"], r["layer"]): r for r in rows if r["metric"] == "precision@1"}
    for layer in (0, 2):
        for name, stand_in in (
            ("id", streams[layer]),
            ("mat", np.asarray(fits[0].maps[layer](streams[layer]))),
        ):
            hits = np.asarray(logits(gpt2, stand_in).argmax(-1) == full, float)
            low, high = by_hand(lambda chosen, hits=hits: hits[chosen].mean(), sentences, seed=3)
            row = found[3][name, layer]
            assert (row["low"], row["high"]) == (pytest.approx(low), pytest.approx(high))
    ends = [[(row["low"], row["high"]) for row in of_seed.values()] for of_seed in found.values()]
    assert ends[0] != ends[1]


def test_the_final_layer_alone_is_refused(tmp_path):
    _, said = run("cross_corpus", *on("gpt2", tmp_path), "--layers=4", code=1)
    assert said.endswith(
        "error: --layers=4 is the final layer, to which every map leads: name one of 0 .. 3.\n"
    )


def test_sizes():
    assert travel.check_sizes([], 900) == [250, 500, 900]
    assert travel.check_sizes([], 100) == [100]
    assert travel.check_sizes([500, 20, 20], 500) == [20, 500]
    for wrong in (0, 501):
        with pytest.raises(ValueError, match=f"sizes has {wrong}; expected 1 to 500"):
            travel.check_sizes([wrong], 500)


def test_means_over_layers(rows):
    means = travel.over_layers(rows)
    assert len(means) * 2 == len(rows)
    chosen = {
        "map": "mat",
        "fit_corpus": "b",
        "eval_corpus": "a",
        "n_fit": 100,
        "metric": "precision@5",
    }
    assert find(means, **chosen) == [pytest.approx(np.mean(find(rows, **chosen)))]


# --- the experiment -------------------------------------------------------------------------------


def few(split, start, count):
    """Some sentences of a split."""
    lengths, begin = split.lengths[start : start + count], split.starts[start]
    return Split(
        split.tokens[begin : begin + lengths.sum()], lengths, split.positions[start : start + count]
    )


@pytest.mark.slow
def test_experiment_on_two_prepared_corpora(gpt2_examples, tmp_path):
    for k, name in enumerate(("one", "two")):
        examples = Examples(
            few(gpt2_examples.fit, 100 * k, 100), few(gpt2_examples.eval, 30 * k, 30)
        )
        save_examples(tmp_path / f"{name}.npz", examples)
    corpora = [f"{tmp_path}/one.npz", f"{tmp_path}/two.npz"]
    common = ["--model=tests/data/reference/gpt2", f"--out={tmp_path}/out", "--layers=1,3"]
    _, said = run("cross_corpus", *common, f"--corpora={','.join(corpora)}", "--sizes=50,100")
    assert "50 examples of" in said  # fewer than dimensions
    rows = json.loads((tmp_path / "out" / "results.json").read_text("utf-8"))["rows"]
    assert len(rows) == 2 * (2 * 2 + 1) * 2 * 5
    assert {row["layer"] for row in rows} == {1, 3}
    for a in corpora:
        for b in corpora:
            assert (
                min(
                    find(
                        rows, fit_corpus=a, eval_corpus=b, n_fit=100, layer=3, metric="precision@1"
                    )
                )
                > 0.5
            )
    assert {"pairs.png", "learning_curve.png"} <= set(os.listdir(tmp_path / "out"))
    _, said = run("cross_corpus", *common, f"--corpora={corpora[0]},{corpora[0]}", code=1)
    assert "names a corpus twice" in said


def test_files_of_one_name_are_told_apart_in_figures():
    assert travel_plots.corpus_labels(["docs", "a/x.txt", "b/x.txt", "c/y.txt"]) == {
        "docs": "docs",
        "a/x.txt": "a/x.txt",
        "b/x.txt": "b/x.txt",
        "c/y.txt": "y.txt",
    }


def test_the_study_is_called_from_python(tmp_path):
    model, tokenizer = jmat.load(REFERENCE / "gpt2")
    texts = text().read_text("utf-8").splitlines()[:260]
    corpora = {"first": texts[:120], "second": texts[120:]}
    results = cross_corpus.run(
        model, corpora, cross_corpus.Options(sizes=(70,), layers=(2,)), tokenizer=tokenizer
    )
    pairs = {(row["fit_corpus"], row["eval_corpus"]) for row in results.rows if row["map"] == "mat"}
    assert pairs == {(a, b) for a in corpora for b in corpora}
    assert {(row["layer"], row["target"], row["n_fit"]) for row in results.rows} == {
        (2, 4, 0),
        (2, 4, 70),
    }
    assert set(results.text) == set(corpora)
    assert set(results.save(tmp_path)) == {"results.json", "pairs.png", "learning_curve.png"}
    assert "mean over layers; fitted on 70 examples" in results.table()
    for wrong, message in (
        ({"layers": (4,)}, "layers=4 is the final layer"),
        ({"layers": (9,)}, "layers has '9'; choose from 0, 1, 2, 3, 4"),
        (
            {"sizes": (5000,)},
            "sizes has 5000; expected 1 to 90, the fit examples of the smallest corpus",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            cross_corpus.run(model, corpora, cross_corpus.Options(**wrong), tokenizer=tokenizer)
    with pytest.raises(ValueError, match="there is no corpus to fit on"):
        cross_corpus.run(model, {}, tokenizer=tokenizer)


def test_layers_are_checked_before_any_text_is_read(tmp_path):
    for experiment in ("cross_corpus", "submodule_ablation"):
        _, said = run(experiment, *on("gpt2", tmp_path), "--layers=9", code=1)
        assert said.endswith("error: --layers has '9'; choose from 0, 1, 2, 3, 4.\n")
        assert "examples to fit on" not in said
