"""Probes: labels read from files and from tokens, classifiers on data with a known
answer, the script.
"""

import json

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression, RidgeClassifierCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from transformers import AutoTokenizer

import jmat
from jmat.studies import probe
from jmat.studies.probe.classifiers import probe_rows
from jmat.studies.probe.labels import labelled_examples, read_labelled, token_classes
from tests.inside import text
from tests.scripts import rows_of, run
from tests.test_reference import REFERENCE


@pytest.fixture(scope="module")
def tokenizers():
    return {
        family: AutoTokenizer.from_pretrained(REFERENCE / family) for family in ("gpt2", "bert")
    }


@pytest.mark.parametrize("classifier", ["ridge", "logistic"])
def test_a_probe_reads_what_is_linear_and_nothing_else(classifier):
    random = np.random.default_rng(0)
    x = random.standard_normal((900, 6))
    labels = np.where(x[:, 0] > 2 * x[:, 1], "up", "down")
    layers = {0: random.standard_normal((900, 6)), 1: 1e3 * x + 5e4, 2: np.abs(x)}
    parts = ({l: v[:600] for l, v in layers.items()}, {l: v[600:] for l, v in layers.items()})
    rows = probe_rows(*parts, {"fit": labels[:600], "eval": labels[600:]}, classifier=classifier)
    accuracy = {row.get("layer", "majority"): row["value"] for row in rows}
    assert accuracy[1] > 0.95
    assert abs(accuracy[0] - 0.5) < 0.1
    assert accuracy[2] < 0.75
    assert accuracy["majority"] == max(
        (labels[600:] == "up").mean(), (labels[600:] == "down").mean()
    )
    assert all(row["low"] <= row["value"] <= row["high"] for row in rows)


def test_the_majority_is_the_most_frequent_label_that_was_fitted_on():
    x = np.random.default_rng(2).standard_normal((10, 3))
    labels = {
        "fit": np.array(["up"] * 7 + ["down"] * 3),
        "eval": np.array(["up"] * 2 + ["down"] * 8),
    }
    rows = probe_rows({0: x}, {0: x}, labels, classifier="ridge")
    assert [row["value"] for row in rows if row["map"] == "majority"] == [0.2]


def test_the_classifiers_are_scikit_learns():
    """Labels that a third of the features decide, on few and noisy examples: the two
    classifiers differ.
    """
    random = np.random.default_rng(1)
    x = random.standard_normal((2, 120, 30)) * np.geomspace(1, 50, 30) + 7
    labels = np.where(x[..., :10].sum(-1) + random.standard_normal((2, 120)) * 6 > 75, "up", "down")
    right = {}
    heads = {
        "ridge": RidgeClassifierCV(np.logspace(-1, 5, 7)),
        "logistic": LogisticRegression(max_iter=2000),
    }
    for classifier, head in heads.items():
        model = make_pipeline(StandardScaler(), head).fit(x[0], labels[0])
        right[classifier] = (model.predict(x[1]) == labels[1]).mean()
        rows = probe_rows(
            {3: x[0]}, {3: x[1]}, {"fit": labels[0], "eval": labels[1]}, classifier=classifier
        )
        assert (rows[0]["map"], rows[0]["layer"], rows[0]["n"]) == (classifier, 3, 120)
        assert rows[0]["value"] == pytest.approx(right[classifier])
    assert right["ridge"] != right["logistic"]


def test_the_seed_divides_the_labelled_texts(tokenizers):
    texts, labels = [f"Returns value {i}" for i in range(40)], [f"label {i}" for i in range(40)]
    how = {"max_length": 16, "masked": False}
    divided = []
    for seed in (1, 1, 2):
        _, kept = labelled_examples(texts, labels, tokenizers["gpt2"], seed=seed, **how)
        assert sorted([*kept["fit"], *kept["eval"]]) == sorted(labels)
        divided.append(sorted(kept["eval"]))
    assert divided[0] == divided[1] != divided[2]


def test_one_label_is_no_task():
    labels = {"fit": np.array(["a", "a"]), "eval": np.array(["a"])}
    with pytest.raises(ValueError, match="all 2 examples to fit on have the label 'a'"):
        probe_rows({0: np.ones((2, 2))}, {0: np.ones((1, 2))}, labels)


def test_token_classes(tokenizers):
    for tokenizer in tokenizers.values():
        ids = tokenizer("The array, 12 tokenizers.", add_special_tokens=False)["input_ids"]
        classes = token_classes(np.asarray([*ids, -1]), tokenizer)
        words = dict(zip(tokenizer.convert_ids_to_tokens(ids), classes, strict=False))
        assert classes[-1] == "end"
        assert {name for token, name in words.items() if token in (",", ".")} == {"punctuation"}
        assert "word" in classes
        assert "number" in classes
        assert {name for token, name in words.items() if token.startswith("##")} <= {
            "piece",
            "number",
        }


def test_labelled_texts_are_divided_and_read_where_the_model_sums_up(tokenizers, caplog):
    texts, labels = [f"Returns value {i}" for i in range(20)], [str(i % 2) for i in range(20)]
    for family, masked in (("gpt2", False), ("bert", True)):
        examples, kept = labelled_examples(
            texts, labels, tokenizers[family], max_length=16, masked=masked, seed=1
        )
        assert (examples.fit.num_examples, examples.eval.num_examples) == (15, 5)
        assert (examples.fit.positions == (0 if masked else examples.fit.lengths - 1)).all()
        assert sorted([*kept["fit"], *kept["eval"]]) == sorted(labels)
        long = ["Returns " * 40 if i % 4 else text for i, text in enumerate(texts)]
        caplog.clear()
        labelled_examples(long, labels, tokenizers[family], max_length=16, masked=masked, seed=1)
        assert [
            caplog.messages[i].startswith("Sentences that were cut at 16 tokens: ")
            and caplog.messages[i].endswith(f" of {count}.")
            for i, count in enumerate((15, 5))
        ] == [True] * 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a", "label": "x"}\nno json', "line 2 is not JSON"),
        ('{"text": "a"}', "line 1: 'label' is missing"),
        ('{"text": "", "label": "x"}', "line 1: the text"),
        ('{"text": "a", "label": "x"}\n\n', "has the labels"),
        ("[1]", "line 1: this line is not a JSON object"),
    ],
)
def test_bad_labels_are_refused(content, message, tmp_path):
    (tmp_path / "labels.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_labelled(tmp_path / "labels.jsonl")
    with pytest.raises(FileNotFoundError, match="there is no text file"):
        read_labelled(tmp_path / "none.jsonl")


@pytest.mark.slow
def test_the_script(tmp_path):
    lines = [
        {"text": f"{word} the value {i}.", "label": word}
        for word in ("Return", "Raise")
        for i in range(60)
    ]
    labels = tmp_path / "labels.jsonl"
    labels.write_text("\n".join(map(json.dumps, lines)))
    model = f"--model={REFERENCE / 'gpt2'}"
    printed, _ = run(
        "probe",
        model,
        f"--labels={labels}",
        f"--against={REFERENCE / 'gpt2'}",
        f"--out={tmp_path}/out",
    )
    rows = rows_of(tmp_path / "out")
    ours, again = (
        [row["value"] for row in rows if row["map"] == name]
        for name in ("ridge", "ridge (against)")
    )
    assert ours == again
    assert max(ours) > 0.9
    assert "majority" in printed
    assert (tmp_path / "out" / "probe.png").exists()


def test_the_study_is_called_from_python(tmp_path):
    model, tokenizer = jmat.load(REFERENCE / "gpt2")
    texts = text().read_text("utf-8").splitlines()[:100]
    labels = ["long" if len(each) > 60 else "short" for each in texts]
    results = probe.run(model, texts, probe.Options(seed=5), tokenizer=tokenizer, labels=labels)
    assert [row["layer"] for row in results.rows if row["map"] == "ridge"] == [0, 1, 2, 3, 4]
    assert {row["n"] for row in results.rows} == {25}
    assert set(results.save(tmp_path)) == {"results.json", "probe.png"}
    classes = probe.run(model, texts, tokenizer=tokenizer)
    assert {row["map"] for row in classes.rows} == {"ridge", "majority"}
    with pytest.raises(ValueError, match="classifier='tree': expected one of ridge, logistic"):
        probe.Options(classifier="tree")
    with pytest.raises(ValueError, match="there are 99 labels; expected a list of as many texts"):
        probe.run(model, texts, tokenizer=tokenizer, labels=labels[1:])
    with pytest.raises(ValueError, match="has no tokenizer"):
        probe.run(model, texts, labels=labels)
