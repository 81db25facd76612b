"""layer_jump and r2 as users call them on a text: every figure, interval and map equals
what is computed by hand.
"""

import numpy as np
import pytest

from jmat.checkpoint import parameters
from jmat.data import corpus, hub_corpora, splitting
from jmat.data.examples import fingerprint
from jmat.metrics.bootstrap import bootstrap_counts
from jmat.runtime.digests import model_hash
from tests.by_hand import Lab, r2, same
from tests.inside import call, loaded, text
from tests.test_hub_corpora import Hub, split_text

# Nothing as by default: a flag that is not heeded shows.
FLAGS = {"num_fit": 100, "num_eval": 40, "seed": 3, "intercept": True}
FLAGS |= {"protocol": "jmat", "positions_per_sentence": 3, "skip_first": 2}
FEW = {"num_fit": 90, "num_eval": 50}


@pytest.fixture(scope="module")
def lab():
    return Lab(**FLAGS)


def check_jumps(outcome, lab, fit=None):
    """All rows of layer_jump, and that there are no others."""
    drawn, n = lab.drawn(), lab.examples.eval.num_examples
    for l in range(lab.layers + 1):
        mat = lab.held_out[l] if l == lab.layers else lab.jump(lab.held_out[l], l, fit=fit)
        for name, stand_in in (("mat", mat), ("id", lab.held_out[l])):
            for metric, values in lab.metrics(stand_in).items():
                row = outcome.one(map=name, layer=l, target=lab.layers, metric=metric)
                same(row, lab.interval(values, drawn), n)
    assert len(outcome.rows) == 2 * (lab.layers + 1) * 8


def check_maps(outcome, lab, targets, fit=None):
    """What the saved maps make of the evaluation examples."""
    maps, _ = outcome.maps
    assert set(maps) == {
        f"mat.{i}.{j}"
        for i in range(lab.layers)
        for j in range(i + 1, lab.layers + 1)
        if j in targets
    }
    for name, linear in maps.items():
        i, j = map(int, name.split(".")[1:])
        wanted = lab.jump(lab.held_out[i], i, j, fit)
        error = np.linalg.norm(np.asarray(linear(lab.held_out[i])) - wanted) / np.linalg.norm(
            wanted
        )
        assert error < 1e-3, (name, error)


def test_layer_jump_heeds_every_flag(lab):
    outcome = call("layer_jump", corpus=text(), **FLAGS)
    check_jumps(outcome, lab)
    check_maps(outcome, lab, range(lab.layers + 1))
    info = outcome.maps[1]
    assert (info.n, info.seed, info.dtype) == (lab.examples.fit.num_examples, 3, "float32")
    assert info.model_hash == model_hash(parameters(lab.model))
    assert info.corpus == str(text())
    assert info.protocol == "jmat, 3 positions a sentence, skip_first=2"
    config = outcome.results["config"]
    assert {name: config[name] for name in FLAGS} == FLAGS


def test_layer_jump_by_default_follows_the_paper():
    lab = Lab(**FEW)
    outcome = call("layer_jump", corpus=text(), **FEW)
    assert (lab.examples.fit.num_examples, lab.examples.eval.num_examples) == (90, 50)
    check_jumps(outcome, lab)
    assert (outcome.maps[1].protocol, outcome.maps[1].n) == ("din2023", 90)


def test_layer_jump_of_a_masked_model_reads_under_the_mask():
    given = {
        "num_fit": 120,
        "num_eval": 40,
        "seed": 1,
        "protocol": "jmat",
        "positions_per_sentence": 2,
    }
    lab = Lab("bert", **given)
    outcome = call(
        "layer_jump", model="tests/data/reference/bert", corpus=text(), targets="final", **given
    )
    for l in range(lab.layers + 1):
        for metric, values in lab.metrics(lab.held_out[l]).items():
            same(outcome.one(map="id", layer=l, metric=metric), lab.interval(values))
    assert outcome.maps[1].n == lab.examples.fit.num_examples == 240
    for i in range(lab.layers):  # a post-norm stream is all but dependent: maps agree to few digits
        wanted = lab.jump(lab.held_out[i], i)
        error = np.linalg.norm(
            np.asarray(outcome.maps[0][f"mat.{i}.{lab.layers}"](lab.held_out[i])) - wanted
        )
        assert error < 0.02 * np.linalg.norm(wanted), i


@pytest.mark.parametrize("route", ["memory", "streaming"])
def test_all_tokens_are_fitted_on_where_that_is_asked_for(route):
    given = {**FEW, "protocol": "jmat", "skip_first": 2, "intercept": True}
    lab = Lab(**given)
    outcome = call(
        "layer_jump", corpus=text(), fit_tokens="all", route=route, targets="final", **given
    )
    check_jumps(outcome, lab, lab.every_token)
    check_maps(outcome, lab, [lab.layers], lab.every_token)
    assert (
        outcome.maps[1].n == len(lab.every_token[0]) == (lab.examples.fit.lengths - 2).clip(0).sum()
    )
    assert outcome.maps[1].protocol == "jmat, all tokens, skip_first=2"
    assert f"route {route}, as asked for" in outcome.said


def test_layer_jump_draws_and_prints_its_own_figures(lab):
    outcome = call("layer_jump", corpus=text(), **FLAGS)
    (figure,) = outcome.figures
    assert figure.get_suptitle().endswith("reference/gpt2: reading layer l")
    metrics = ("precision@1", "precision@5", "precision@10", "surprisal")
    assert tuple(panel.get_title() for panel in figure.axes) == metrics
    table = [line.split() for line in outcome.printed.splitlines()]
    printed = {int(line[0]): line[1:] for line in table if line and line[0].isdigit()}
    for l in range(lab.layers + 1):
        rows = [
            outcome.one(map=name, layer=l, metric=metric)
            for metric in metrics
            for name in ("mat", "id")
        ]
        assert printed[l] == [f"{row['value']:.3f}" for row in rows]


def test_r2_heeds_every_flag(lab):
    outcome = call("r2", corpus=text(), **FLAGS)
    check_maps(outcome, lab, range(lab.layers + 1))
    n, first = lab.examples.eval.num_examples, lab.examples.eval.positions == 0
    assert not first.any()  # --skip_first
    for i in range(lab.layers):
        for j in range(i + 1, lab.layers + 1):
            for name, stand_in in (
                ("mat", lab.jump(lab.held_out[i], i, j)),
                ("id", lab.held_out[i]),
            ):
                row = outcome.one(map=name, layer=i, target=j, metric="r2")
                same(row, [r2(lab.held_out[j], stand_in)], n)
    samples = bootstrap_counts(n, groups=lab.groups, samples=200, seed=3)
    row = outcome.one(map="mat", layer=1, target=3, metric="r2")
    draws = [r2(lab.held_out[3], lab.jump(lab.held_out[1], 1, 3), w) for w in samples]
    width = row["high"] - row["low"]
    assert (
        np.abs(np.percentile(draws, [2.5, 97.5]) - [row["low"], row["high"]]).max() < 0.01 * width
    )
    (figure,) = outcome.figures
    assert figure.get_suptitle().endswith("reference/gpt2: $R^2$ of layer $j$ from layer $i$")


def test_r2_leaves_first_positions_out_where_it_says_so():
    lab = Lab(**FEW)
    outcome, kept = call("r2", corpus=text(), **FEW), lab.examples.eval.positions > 0
    assert 0 < kept.sum() < len(kept)
    stand_in = lab.jump(lab.held_out[1], 1, 4)
    same(outcome.one(map="mat", layer=1, target=4, metric="r2"), [r2(lab.held_out[4], stand_in)])
    without = outcome.one(map="mat", layer=1, target=4, metric="r2_no_first")
    same(without, [r2(lab.held_out[4][kept], stand_in[kept])], kept.sum())
    y = lab.held_out[4].astype(np.float64)
    weighted = 1 - ((y - stand_in) ** 2).sum() / ((y - y.mean(0)) ** 2).sum()
    same(outcome.one(map="mat", layer=1, target=4, metric="r2_weighted"), [weighted])
    mat = outcome.printed.partition("r2 of mat")[2].partition("r2 of id")[0]
    (line,) = [line.split() for line in mat.splitlines() if line.split()[:1] == ["1"]]
    assert line[-1] == f"{outcome.one(map='mat', layer=1, target=4, metric='r2')['value']:.3f}"


def test_by_default_the_sentences_are_those_of_docs_that_no_bundled_model_was_trained_on(
    monkeypatch,
):
    sentences = corpus.text_sentences(text(600))
    parts = splitting.split(sentences)
    monkeypatch.setitem(corpus.NAMED, "docs", lambda: sentences)
    with loaded("layer_jump") as script:
        monkeypatch.setattr(script.common.text_flags, "docs_sentences", lambda: sentences)
        outcome = call("layer_jump", num_fit=70, num_eval=30, targets="final")
    lab = Lab(num_fit=70, num_eval=30, source="docs")
    assert set(lab.sentences[0]) < set(parts["fit"])
    assert set(lab.sentences[1]) < set(parts["eval"])
    for metric, values in lab.metrics(lab.jump(lab.held_out[2], 2)).items():
        same(outcome.one(map="mat", layer=2, metric=metric), lab.interval(values), 30)
    assert outcome.maps[1].corpus == outcome.results["text"]["source"] == "docs"


def test_text_of_the_hub_is_read_by_the_same_flags(monkeypatch, tmp_path):
    monkeypatch.setenv("JMAT_CACHE", str(tmp_path))
    monkeypatch.setattr(hub_corpora, "stream", lambda name, columns: Hub())
    monkeypatch.setattr(hub_corpora, "_sentencex", lambda name: split_text)
    monkeypatch.setattr(hub_corpora, "_rules", lambda name, by_sentencex: "rules")
    given = {**FLAGS, "num_fit": 80, "num_eval": 30}
    outcome = call("layer_jump", corpus="cc-news", targets="final", **given)
    lab = Lab(**given, source="cc-news")
    read = outcome.results["text"]
    assert (read["fit"], read["eval"]) == (
        fingerprint(lab.examples.fit),
        fingerprint(lab.examples.eval),
    )
    values = lab.metrics(lab.held_out[1])["kl"]
    same(
        outcome.one(map="id", layer=1, metric="kl"),
        lab.interval(values),
        lab.examples.eval.num_examples,
    )
    assert outcome.maps[1].corpus == "cc-news"


def test_the_batch_size_changes_no_figure_and_the_dtype_does():
    whole = call("layer_jump", corpus=text(), **FEW)
    small = call("layer_jump", corpus=text(), tokens_per_batch=96, **FEW)
    for row, other in zip(whole.rows, small.rows, strict=True):
        same(other, [row["value"], row["low"], row["high"]])
    half = call("layer_jump", corpus=text(), dtype="bfloat16", targets="final", **FEW)
    assert half.maps[1].dtype == "bfloat16"
    lab = Lab(dtype="bfloat16", **FEW)
    same(
        half.one(map="id", layer=1, metric="kl"),
        lab.interval(lab.metrics(lab.held_out[1])["kl"]),
        tolerance=0.02,
    )
    assert (
        half.one(map="id", layer=1, metric="kl")["value"]
        != whole.one(map="id", layer=1, metric="kl")["value"]
    )
