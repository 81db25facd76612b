"""Studies called from Python: their rows and files are those of their scripts."""

import html
import json

import pytest

import jmat
from jmat.data.corpus import fit_eval
from jmat.data.examples import Examples, fingerprint
from jmat.data.sampling import make_examples
from jmat.data.splitting import divide
from jmat.report.results import read_results
from jmat.studies import early_exit, linearity, peek, prune, r2, submodules, tasks, verify
from tests.inside import call, text
from tests.test_reference import REFERENCE

FEW = {"num_fit": 70, "num_eval": 30, "seed": 1}


@pytest.fixture(scope="module")
def gpt2():
    return jmat.load(REFERENCE / "gpt2")


@pytest.fixture(scope="module")
def sentences():
    return text().read_text("utf-8").splitlines()[:60]


@pytest.fixture(scope="module")
def examples(gpt2) -> Examples:
    """Those that scripts draw with the flags FEW."""
    model, tokenizer = gpt2
    fit, held_out = fit_eval(str(text()), **FEW)
    size = {"max_length": model.config.num_positions, "masked": False}
    return make_examples(fit, held_out, tokenizer, protocol="din2023", seed=FEW["seed"], **size)


def without_noise(rows):
    """Returns rows without those of a clock, and figures to five digits."""
    return [
        {
            key: float(f"{value:.5g}") if isinstance(value, float) else value
            for key, value in row.items()
        }
        for row in rows
        if row["metric"] not in ("seconds_per_example", "time_ratio")
    ]


def without_notes(rows):
    return [
        {key: value for key, value in row.items() if key != "note"} for row in without_noise(rows)
    ]


def saved(results, folder):
    """Saves results, and returns the files that are there."""
    written = results.save(folder)
    names = sorted(path.name for path in folder.iterdir())
    assert sorted(written) == names
    assert read_results(folder)["rows"] == results.rows
    return names


def left_by(outcome):
    """Returns the names of the files of a script's run, but for that which says whose
    the folder is.
    """
    return sorted(path.name for path in outcome.out.iterdir() if path.name != "run.json")


def test_early_exit_is_a_call(gpt2, examples, tmp_path, capfd):
    model, tokenizer = gpt2
    outcome = call("early_exit", corpus=text(), timing_examples=2, check_every=1, **FEW)
    options = early_exit.Options(seed=1, timing_examples=2, check_every=1)
    capfd.readouterr()
    results = early_exit.run(model, examples, options, tokenizer=tokenizer)
    assert "".join(capfd.readouterr()) == ""
    assert without_notes(results.rows) == without_notes(outcome.rows)
    assert saved(results, tmp_path) == left_by(outcome)
    assert results.table().splitlines()[-1].startswith("timed on ")
    assert outcome.printed.splitlines()[-2].startswith("timed on ")


def test_early_exit_reads_texts(gpt2, sentences):
    model, tokenizer = gpt2
    options = early_exit.Options(timing_examples=0)
    results = early_exit.run(model, sentences, options, tokenizer=tokenizer)
    assert {row["n"] for row in results.rows if row["metric"] == "precision@1"} == {15}
    assert sorted(results.maps) == [f"mat.{l}.4" for l in range(4)]
    assert not any(line.startswith("timed on") for line in results.table().splitlines())


@pytest.mark.parametrize(
    ("study", "options"),
    [
        (linearity, linearity.Options(parts=False)),
        (prune, prune.Options(method="delete")),
        (r2, r2.Options()),
        (submodules, submodules.Options(layers=(3,), maps=("mat_attn",))),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_texts_are_read_as_the_examples_that_they_become(gpt2, sentences, study, options):
    """A hash of the text puts a quarter of the sentences aside to evaluate on."""
    model, tokenizer = gpt2
    results = study.run(model, sentences, options, tokenizer=tokenizer)
    fit, held_out = divide(set(sentences), fit=3, held_out=1)
    assert (len(fit), len(held_out)) == (45, 15)
    size = {"max_length": model.config.num_positions, "masked": False}
    examples = make_examples(
        fit, held_out, tokenizer, protocol="din2023", seed=options.seed, **size
    )
    assert results.text == {
        "source": "texts",
        "fit": fingerprint(examples.fit),
        "eval": fingerprint(examples.eval),
    }
    wanted = study.run(model, examples, options, tokenizer=tokenizer)
    assert without_clock(results.rows) == without_clock(wanted.rows)


def without_clock(rows):
    return [row for row in rows if row["metric"] != "microseconds_per_token"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"check_every": 0}, "check_every=0: expected a whole number of at least 1"),
        ({"short_list": 1}, "short_list=1: expected a whole number of at least 2"),
        ({"timing_examples": -1}, "timing_examples=-1: expected a whole number of at least 0"),
        ({"delta": 1.5}, r"delta=1\.5: expected a number from 0 to 1"),
        ({"epsilon": float("nan")}, "epsilon=nan: expected a number from 0 to 1"),
        ({"protocol": "mine"}, "protocol='mine': expected one of din2023, jmat"),
    ],
)
def test_early_exit_refuses_a_wrong_setting(wrong, message):
    with pytest.raises(ValueError, match=message):
        early_exit.Options(**wrong)


PEEK = ["Returns the name of the file.", "The default value"]


def test_peek_is_a_call(gpt2, examples, tmp_path, capfd):
    model, tokenizer = gpt2
    given = [f"--sentences={sentence}" for sentence in PEEK]
    outcome = call("peek", *given, corpus=text(), layers="0,2", top=2, **FEW)
    options = peek.Options(seed=1, layers=(0, 2), top=2)
    capfd.readouterr()
    results = peek.run(model, PEEK, options, tokenizer=tokenizer, examples=examples)
    assert "".join(capfd.readouterr()) == ""
    assert without_notes(results.rows) == without_notes(outcome.rows)
    assert saved(results, tmp_path) == left_by(outcome)
    for name in ("fit", "eval", "sentences"):
        assert results.text[name] == outcome.results["text"][name]
    assert results.peek["sentences"][1]["text"] == PEEK[1]
    page = results._repr_html_()
    assert page.startswith("<iframe srcdoc=")
    assert html.unescape(page.partition('srcdoc="')[2].partition('"')[0]) == (
        tmp_path / "peek.html"
    ).read_text("utf-8")
    shown = outcome.printed.splitlines()
    assert all(line in shown for line in results.table().splitlines())
    assert (
        shown[-1]
        == f"wrote {outcome.out}/results.json, peek.json; open {outcome.out}/peek.html in a browser"
    )


def test_peek_reads_with_maps_or_fits_on_texts(gpt2, sentences):
    model, tokenizer = gpt2
    linear = jmat.studies.layer_jump.run(model, sentences, tokenizer=tokenizer).maps
    given = peek.run(model, PEEK, tokenizer=tokenizer, maps=linear)
    fitted = peek.run(model, PEEK, tokenizer=tokenizer, examples=sentences)
    assert without_noise(given.rows) == without_noise(fitted.rows)
    own = peek.run(model, tokenizer=tokenizer, maps=linear)
    assert len(own.peek["sentences"]) == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "give one of maps= and examples="),
        ({"maps": {}, "examples": []}, "give one of maps= and examples="),
        ({"maps": {}}, "maps= has no map to layer 4, the last"),
        ({"maps": {}, "options": {"layers": [9]}}, "layers has '9'; choose from 0, 1, 2, 3, 4"),
        ({"maps": {}, "options": {"top": 0}}, "top=0: expected a whole number of at least 1"),
        ({"maps": {}, "options": {"top": 999}}, "top=999: expected 1 to 768"),
        ({"maps": {}, "tokenizer": None}, "has no tokenizer"),
        ({"maps": {}, "sentences": "one text"}, "expected a list of sentences; got one text"),
        ({"maps": {}, "sentences": ["a" * 2000]}, "tokens; expected 1 to"),
    ],
)
def test_peek_refuses_what_it_cannot_read(gpt2, given, message):
    read = {"tokenizer": gpt2[1], "sentences": PEEK, **given}
    with pytest.raises(ValueError, match=message):
        peek.run(gpt2[0], read.pop("sentences"), peek.Options(**read.pop("options", {})), **read)


def test_tasks_is_a_call(gpt2, sentences, tmp_path, capfd):
    model, tokenizer = gpt2
    words = ("name", "type", "size")
    asked = [
        {"context": f"Returns the {word} of", "choices": ["it", "a list"], "answer": 0}
        for word in words
    ]
    paths = tmp_path / "lines.txt", tmp_path / "asked.jsonl"
    paths[0].write_text("\n".join(sentences[:9]))
    paths[1].write_text("\n".join(map(json.dumps, asked)))
    outcome = call("tasks", text=paths[0], tasks=paths[1], seed=3)
    questions, options = tasks.read_task(paths[1]), tasks.Options(seed=3)
    capfd.readouterr()
    given = {str(paths[1]): questions}, options
    results = tasks.run(model, *given, tokenizer=tokenizer, texts={str(paths[0]): sentences[:9]})
    assert "".join(capfd.readouterr()) == ""
    assert without_notes(results.rows) == without_notes(outcome.rows)
    assert results.text == outcome.results["text"]
    assert results.table().splitlines()[:3] == outcome.printed.splitlines()[:3]
    assert saved(results, tmp_path / "out") == left_by(outcome)
    alone = tasks.run(model, questions, options, tokenizer=tokenizer)
    assert [row["value"] for row in alone.rows] == [row["value"] for row in results.rows[1:]]
    (line,) = tasks.run(model, (), options, tokenizer=tokenizer, texts=sentences[:9]).rows
    assert line["value"] == pytest.approx(results.rows[0]["value"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "nothing to measure"),
        ({"texts": "one text"}, "expected a list of texts; got one text"),
        ({"texts": ["a text"], "tokenizer": None}, "has no tokenizer"),
        ({"questions": [tasks.Question("It is", ("a", "b " * 900), 0)]}, "the model reads"),
    ],
)
def test_tasks_refuses_what_it_cannot_measure(gpt2, given, message):
    with pytest.raises(ValueError, match=message):
        tasks.run(gpt2[0], **{"tokenizer": gpt2[1], **given})


def test_verify_is_a_call(gpt2, tmp_path):
    model, tokenizer = gpt2
    line = "Returns the name of the file."
    outcome = call("verify", f"--text={line}", dtype="float32")
    results = verify.run(model, line, tokenizer=tokenizer)
    assert results.verdict == "MATCH"
    assert [row["verdict"] for row in results.rows] == ["MATCH"] * len(outcome.rows)
    assert [row.get("site") for row in results.rows] == [row.get("site") for row in outcome.rows]
    assert results.text == outcome.results["text"]
    assert results.table().splitlines()[-1] in outcome.printed.splitlines()
    assert saved(results, tmp_path) == left_by(outcome)
    with pytest.raises(ValueError, match="so --text cannot be read"):
        verify.run(model, line)
    with pytest.raises(ValueError, match="dtype='float8': expected one of float32"):
        verify.Options(dtype="float8")
