"""prune, probe and cross_corpus as users call them on texts: orders, classifiers and
foreign text by hand.
"""

import dataclasses
import json
import pathlib
import re
import types

import numpy as np
import pytest
from absl import flags
from sklearn.linear_model import LogisticRegression, RidgeClassifierCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import jmat
from jmat.checkpoint import parameters
from jmat.data import Examples, save_examples
from jmat.data.examples import target_tokens
from jmat.maps.types import Identity
from jmat.metrics.bootstrap import bootstrap_counts
from jmat.studies import probe, prune
from jmat.studies.probe.labels import labelled_examples, token_classes
from tests.by_hand import Lab, affine, compare, log_p, r2, same
from tests.figures import curve, legend
from tests.inside import call, changed_model, loaded, text
from tests.test_reference import REFERENCE

FLAGS = {"num_fit": 100, "num_eval": 40, "seed": 3, "intercept": True}


@pytest.fixture(scope="module")
def lab():
    return Lab(**FLAGS)


# --- prune ----------------------------------------------------------------------------------------


def log_probabilities(lab, split, stand_ins):
    """Of every prediction of a text, with blocks replaced; the tokens that came; and
    the sentence of each.
    """
    mask = np.arange(split.lengths.max()) < split.lengths[:, None]
    tokens = np.zeros(mask.shape, np.int32)
    tokens[mask] = split.tokens
    x = np.asarray(jmat.run(lab.model, tokens, mask=mask, sites=stand_ins)[0])
    predicts = mask[:, 1:]
    return log_p(lab.model, x[:, :-1][predicts]), tokens[:, 1:][predicts], np.nonzero(predicts)[0]


def check_pruned(lab, outcome, method, removed, stand_ins):
    split = lab.examples.eval
    full, _, _ = log_probabilities(lab, split, {})
    short, targets, sentence = log_probabilities(lab, split, stand_ins)
    drawn = bootstrap_counts(split.num_sentences, seed=3)
    label = {"method": method, "removed": removed}
    nats = -short[np.arange(len(targets)), targets]
    kl = (np.exp(full) * (full - short)).sum(1)
    agree = (full.argmax(1) == short.argmax(1)).astype(float)
    counts = np.bincount(sentence)
    for metric, values in (("perplexity", nats), ("kl", kl), ("precision@1", agree)):
        sums = np.bincount(sentence, values)
        figures = [
            sums.sum() / counts.sum(),
            *np.percentile((drawn @ sums) / (drawn @ counts), [2.5, 97.5]),
        ]
        wanted = np.exp(figures) if metric == "perplexity" else figures
        same(outcome.one(metric=metric, **label), wanted, len(targets), tolerance=5e-3)


def mapped(lab, gone):
    """Stand-ins for removed blocks: one map for each stretch of neighbours."""
    stand_ins = {}
    for first in (i for i in gone if i - 1 not in gone):
        stop = next(i for i in range(first, 5) if i not in gone)
        solve = affine(lab.fit[first], lab.fit[stop], intercept=True)
        bias = solve(np.zeros((1, 64)))[0]
        linear = jmat.Linear((solve(np.eye(64)) - bias).astype(np.float32), bias.astype(np.float32))
        stand_ins |= {f"block.{i}": Identity() for i in range(first, stop)} | {
            f"block.{first}": linear
        }
    return stand_ins


def test_prune_removes_by_the_score_and_keeps_its_figures(lab):
    outcome = call(
        "prune", corpus=text(), method="delete,map", score="block_influence", remove=2, **FLAGS
    )
    cosines = [
        (x.astype(np.float64) * y).sum(1)
        / np.linalg.norm(x.astype(np.float64), axis=1)
        / np.linalg.norm(y, axis=1)
        for x, y in zip(lab.fit, lab.fit[1:], strict=False)
    ]
    influence = [1 - cosine.mean() for cosine in cosines]
    order = np.argsort(influence)
    for i in range(4):
        row = outcome.one(
            method="delete", metric="score", step=0, layer=i, target=i + 1, score="block_influence"
        )
        assert row["value"] == pytest.approx(influence[i], rel=1e-3)
    for removed in (0, 1, 2):
        gone = [int(i) for i in order[:removed]]
        assert {row["order"] for row in outcome.find(removed=removed)} == {",".join(map(str, gone))}
        check_pruned(lab, outcome, "delete", removed, {f"block.{i}": Identity() for i in gone})
        check_pruned(lab, outcome, "map", removed, mapped(lab, gone))
    maps, info = outcome.maps
    for name, linear in maps.items():
        start, stop = map(int, name.removeprefix("mat.").split("."))
        wanted = affine(lab.fit[start], lab.fit[stop], intercept=True)(lab.held_out[start])
        np.testing.assert_allclose(
            linear(lab.held_out[start]), wanted, atol=1e-3 * np.abs(wanted).max()
        )
    assert (info.n, info.seed) == (100, 3)
    (figure,) = outcome.figures
    assert figure.get_suptitle().endswith("reference/gpt2: blocks removed by block influence")
    assert list(legend(figure)) == ["deleted", "linear map"]


def test_prune_orders_by_another_score_where_that_is_asked_for(lab):
    outcome = call("prune", "--save", corpus=text(), method="delete", score="linearity", **FLAGS)
    scores = {}
    for i in range(4):
        x, y = lab.fit[i], lab.fit[i + 1].astype(np.float64)
        error = np.square(y - affine(x, y, intercept=True)(x)).sum()
        scores[i] = 1 - error / np.square(y - y.mean(0)).sum()
        row = outcome.one(metric="score", layer=i, target=i + 1, score="linearity")
        assert row["value"] == pytest.approx(scores[i], abs=1e-4)
    gone = max(scores, key=scores.get)
    assert {row["blocks"] for row in outcome.find(removed=1)} == {str(gone)}
    saved, whole = (parameters(model) for model in (jmat.load(outcome.out / "model")[0], lab.model))
    kept = {
        f"blocks.{new}.": f"blocks.{old}."
        for new, old in enumerate(i for i in range(4) if i != gone)
    }
    for name, value in saved.items():
        own = next(
            (name.replace(new, old, 1) for new, old in kept.items() if name.startswith(new)), name
        )
        np.testing.assert_array_equal(value, whole[own])
    assert len(saved) < len(whole)
    assert {row.get("method") for row in outcome.find(removed=1)} == {"delete"}


def test_a_method_of_prune_that_fails_leaves_the_rows_of_the_others():
    flags = {
        "method": "delete,distil",
        "score": "angular",
        "learning_rate": 1e30,
        "distil_steps": 4,
        **FLAGS,
    }
    with pytest.raises(
        ValueError, match=r"distil failed at 1 of 1 blocks: distilling diverged: .*All else"
    ) as failed:
        call("prune", corpus=text(), **flags)
    out = re.search(r"All else is in (.*)/results.json", str(failed.value))[1]
    rows = [
        row
        for row in json.loads(pathlib.Path(out, "results.json").read_text())["rows"]
        if "removed" in row
    ]
    assert {(row["method"], row["removed"]) for row in rows} == {
        ("delete", 0),
        ("delete", 1),
        ("distil", 0),
    }
    assert pathlib.Path(out, "prune.png").exists()


def test_prune_by_default_removes_what_costs_least_and_lists_every_score(lab):
    outcome = call("prune", corpus=text(), method="delete,merge", **(FLAGS | {"intercept": False}))
    split = lab.examples.fit
    assert split.num_sentences <= 256  # so the score is of all of them
    full, _, _ = log_probabilities(lab, split, {})
    costs = []
    for i in range(4):
        short, _, _ = log_probabilities(lab, split, {f"block.{i}": Identity()})
        costs.append((np.exp(full) * (full - short)).sum(1).mean())
        for wanted in ({"metric": "score", "method": "delete"}, {"metric": "block_score"}):
            row = outcome.one(score="kl", layer=i, target=i + 1, **wanted)
            assert row["value"] == pytest.approx(costs[-1], rel=1e-3)
    assert {row["blocks"] for row in outcome.find(removed=1)} == {str(np.argmin(costs))}
    names = ("kl", "block_influence", "angular", "linearity", "linearity_without_residual")
    assert {row["score"] for row in outcome.find(metric="block_score")} == set(names)
    assert all(name in outcome.printed for name in names)
    assert not outcome.find(method="merge", metric="score", layer=0)  # which merging never takes
    (figure,) = outcome.figures
    ticks = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert ticks == ["none", str(np.argmin(costs))]


def test_pruning_is_a_call_that_gives_what_the_script_gives(lab, tmp_path, capsys):
    outcome = call("prune", "--save", corpus=text(), method="delete", score="linearity", **FLAGS)
    options = prune.Options(method="delete", score="linearity", seed=3, intercept=True, save=True)
    results = prune.run(lab.model, lab.examples, options)
    timed = lambda rows: [row for row in rows if row["metric"] != "microseconds_per_token"]  # noqa: E731
    bare = [
        {key: value for key, value in row.items() if key != "note"} for row in timed(outcome.rows)
    ]
    assert [{key: row[key] for key in row if key != "note"} for row in timed(results.rows)] == bare
    assert sorted(results.save(tmp_path)) == ["model", "prune.png", "results.json"]
    assert jmat.load(tmp_path / "model")[0].config.layers == 3
    assert results.table().startswith("scores of the whole model's blocks")
    assert results.plot("prune.png").get_suptitle().endswith("blocks removed by linearity")
    assert capsys.readouterr() == ("", "")
    failing = prune.Options(
        method=["delete", "distil"], score="angular", distil_steps=4, learning_rate=1e30
    )
    with pytest.warns(UserWarning, match="distil failed at 1 of 1"):
        left = prune.run(lab.model, lab.examples, failing)
    assert [failure.split(":")[0] for failure in left.failures] == [
        "distil failed at 1 of 1 blocks"
    ]
    assert {row["method"] for row in left.rows if row.get("removed") == 1} == {"delete"}


def test_flags_of_pruning_are_its_settings():
    """By name and default."""
    settings = {field.name: field.default for field in dataclasses.fields(prune.Options)}
    with loaded("prune") as module:
        assert module.common.flag_options(prune.Options).methods == [*settings["method"]]
        defaults = {name: flags.FLAGS[name].default for name in settings}
    assert defaults == settings | {"method": list(settings["method"])}


# --- probe ----------------------------------------------------------------------------------------


def right(classifier, fit, held_out, labels):
    head = (
        RidgeClassifierCV(np.logspace(-1, 5, 7))
        if classifier == "ridge"
        else LogisticRegression(max_iter=2000)
    )
    model = make_pipeline(StandardScaler(), head).fit(fit.astype(np.float64), labels["fit"])
    return (model.predict(held_out.astype(np.float64)) == labels["eval"]).astype(float)


def check_probe(outcome, lab, streams, labels, classifier, end=""):
    fit, held_out = streams
    exact = 0
    for layer in range(lab.layers + 1):
        values = right(classifier, fit[layer], held_out[layer], labels)
        row, (mean, *ends) = (
            outcome.one(map=f"{classifier}{end}", layer=layer, metric="accuracy"),
            lab.interval(values),
        )
        same(row, [mean, *ends], len(values))
        if abs(row["value"] - mean) < 1e-9:  # no example fell the other way
            assert [row["low"], row["high"]] == pytest.approx(ends, abs=1e-9)
            exact += 1
    assert exact >= 3
    kinds, counts = np.unique(labels["fit"], return_counts=True)
    row = outcome.one(map=f"majority{end}")
    wanted = lab.interval((labels["eval"] == kinds[counts.argmax()]).astype(float))
    assert [row["value"], row["low"], row["high"]] == pytest.approx(wanted, abs=1e-9)


def test_probe_reads_both_models_each_with_its_own_streams():
    given = {
        "num_fit": 100,
        "num_eval": 40,
        "seed": 3,
        "protocol": "jmat",
        "positions_per_sentence": 3,
    }
    outcome = call("probe", corpus=text(), against=changed_model(), **given)
    for family, end in (("gpt2", ""), (changed_model(), " (against)")):
        lab = Lab(family, **given)
        splits = {"fit": lab.examples.fit, "eval": lab.examples.eval}
        labels = {
            name: token_classes(target_tokens(split, masked=False), lab.loaded[1])
            for name, split in splits.items()
        }
        check_probe(outcome, lab, (lab.fit, lab.held_out), labels, "ridge", end)
    ours, other = (
        [row["value"] for row in outcome.rows if row["map"] == name]
        for name in ("ridge", "ridge (against)")
    )
    assert ours != other
    (figure,) = outcome.figures
    assert figure.get_suptitle().endswith("reference/gpt2: probes")
    majority = outcome.one(map="majority")["value"]
    assert f"majority: {majority:.3f}" in outcome.printed.splitlines()
    samples, (panel,) = legend(figure), figure.axes
    assert curve(panel, samples["most frequent label"])[1] == [majority] * 5
    assert curve(panel, samples["ridge classifier"])[1] == ours
    assert curve(panel, samples["ridge classifier, other model"])[1] == other


def test_probe_reads_the_text_in_the_tokens_of_each_model(monkeypatch):
    first, second = (jmat.load(path) for path in (REFERENCE / "gpt2", changed_model()))
    lab, other = Lab(num_fit=60), Lab(num_fit=70)
    both = probe.run(
        first[0], lab.examples, tokenizer=first[1], against=probe.Other(*second, other.examples)
    )
    alone = probe.run(second[0], other.examples, tokenizer=second[1])
    against = [row for row in both.rows if row["map"].endswith(" (against)")]
    assert [{**row, "map": row["map"].removesuffix(" (against)")} for row in against] == alone.rows
    asked, given = [], {}

    def study(*inputs, **options):
        given.update(options, inputs=inputs)
        return both

    job = types.SimpleNamespace(
        model=first[0],
        examples=lab.examples,
        source="text",
        config={"dtype": "float32", "model": "a"},
    )
    job.context, job.publish, job.options = {}, lambda *results, **text: None, lambda kind: kind()
    with loaded("probe") as script:
        monkeypatch.setattr(
            script.text_flags, "prepare_examples", lambda *of: asked.append(of) or other.examples
        )
        monkeypatch.setattr(script.common, "start", lambda *names, **files: job)
        monkeypatch.setattr(script.probe, "run", study)
        monkeypatch.setattr(script, "load", lambda name, dtype: second)
        monkeypatch.setattr(script, "_AGAINST", types.SimpleNamespace(value="second"))
        monkeypatch.setattr(script, "_LABELS", types.SimpleNamespace(value=None))
        script.main([])
    assert asked == [(*second, "text")]
    assert given["inputs"][:2] == (first[0], lab.examples)
    assert given["against"] == (*second, other.examples)


def test_probe_of_labelled_texts_divides_them_by_the_seed(tmp_path):
    random = np.random.default_rng(0)
    lines = [
        json.dumps({"text": line, "label": random.choice(["up", "down"])})
        for line in text().read_text().split("\n")[:90]
    ]
    lines = [line for line in lines if '"text": ""' not in line]
    (tmp_path / "labels.jsonl").write_text("\n".join(lines))
    outcome = call("probe", labels=tmp_path / "labels.jsonl", classifier="logistic", seed=5)
    lab, (texts, kinds) = (
        Lab(seed=5),
        zip(*[json.loads(line).values() for line in lines], strict=True),
    )
    examples, labels = labelled_examples(
        texts, kinds, lab.loaded[1], max_length=128, masked=False, seed=5
    )
    assert (len(labels["fit"]), len(labels["eval"])) == (67, 23)
    streams = [list(lab.read(split).values()) for split in (examples.fit, examples.eval)]
    lab.__dict__["groups"] = np.arange(23)
    check_probe(outcome, lab, streams, labels, "logistic")


# --- cross_corpus ---------------------------------------------------------------------------------


def test_maps_of_one_text_are_evaluated_on_another():
    corpora = {"one": text(), "two": text(seed=1)}
    # other numbers in each text
    given = FLAGS | {"protocol": "jmat", "positions_per_sentence": 3, "skip_first": 12}
    outcome = call(
        "cross_corpus", corpora=[*corpora.values()], sizes="80,100", layers="1,3", **given
    )
    labs = {name: Lab(**given, source=str(path)) for name, path in corpora.items()}
    assert len(outcome.rows) == 2 * (1 + 2 * 2) * 2 * 5
    for fitted, home in labs.items():
        order = np.random.default_rng(3).permutation(home.examples.fit.num_examples)
        for evaluated, away in labs.items():
            final, count = away.held_out[-1], away.examples.eval.num_examples
            for n in (80, 100):
                for layer in (1, 3):
                    x, y = home.fit[layer][order[:n]], home.fit[-1][order[:n]]
                    stand_in = affine(x, y, intercept=True)(away.held_out[layer])
                    label = {
                        "fit_corpus": str(corpora[fitted]),
                        "eval_corpus": str(corpora[evaluated]),
                    }
                    label |= {"n_fit": n, "layer": layer}
                    values = compare(log_p(away.model, final), log_p(away.model, stand_in))
                    for metric in ("precision@1", "precision@10", "surprisal"):
                        same(
                            outcome.one(metric=metric, **label),
                            away.interval(values[metric]),
                            count,
                            tolerance=1e-2,
                        )
                    same(
                        outcome.one(metric="r2", **label),
                        [r2(final, stand_in)],
                        count,
                        tolerance=1e-2,
                    )
    id_row = outcome.one(map="id", eval_corpus=str(corpora["two"]), layer=1, metric="r2")
    same(id_row, [r2(labs["two"].held_out[-1], labs["two"].held_out[1])])
    pairs, curve = outcome.figures
    assert pairs.get_suptitle().endswith("linear map fitted on one corpus, evaluated on another")
    assert curve.get_suptitle().endswith("linear map over the examples it is fitted on")
    home = str(corpora["one"])
    lines = [line.split() for line in outcome.printed.splitlines()]

    def first(key):
        """The first figures of the lines that begin with a key."""
        return {line[1] for line in lines if line[:1] == [key] and len(line) > 1}

    for n, metric, said in (
        (80, "precision@1", "80"),
        (100, "precision@1", home),
        (100, "r2", home),
    ):
        at_home = outcome.find(map="mat", n_fit=n, metric=metric, fit_corpus=home, eval_corpus=home)
        assert f"{np.mean([row['value'] for row in at_home]):.3f}" in first(said)


# --- prepared examples ----------------------------------------------------------------------------


def test_sentences_that_maps_were_fitted_on_are_told_where_they_are_evaluated_on(
    tmp_path, gpt2_examples
):
    save_examples(tmp_path / "same.npz", Examples(gpt2_examples.eval, gpt2_examples.eval))
    said = call("r2", examples=tmp_path / "same.npz").said
    assert "same.npz: 400 of 400 sentences to evaluate on are among those to fit on" in said
