"""The study of ways to write text, against the tokens that it wrote down."""

import json

import numpy as np
import pytest

import jmat
from jmat.data.corpus import fit_eval
from jmat.data.examples import load_examples
from jmat.data.sampling import make_examples
from jmat.decode import generate as generating
from jmat.decode.costs import Costs
from jmat.decode.words import frequent_words
from jmat.studies import decoding
from jmat.studies.decoding import measure, predicted, study
from jmat.studies.decoding.agreement import measure_exits
from jmat.studies.decoding.prompts import first_tokens
from tests.figures import curve, legend
from tests.inside import call, text
from tests.intervals import by_hand
from tests.test_reference import REFERENCE

FEW = {"corpus": text(), "num_fit": 120, "num_eval": 40, "num_prompts": 5, "prompt_tokens": 3}
WRITE = {"layers": "1,3", "draft_tokens": "3", "kinds": "affine,id", "new_tokens": 9, "seed": 5,
         "fills": "copy,map", "thresholds": "0.02"}  # fmt: skip


@pytest.fixture(scope="module")
def outcome():
    return call("decoding", turns=0, **FEW, **WRITE)


def prepared(model):
    """The examples of `outcome`."""
    _, tokenizer = jmat.load(REFERENCE / "gpt2")
    fit, held_out = fit_eval(text(), 120, 40, 5)
    size = {"max_length": model.config.num_positions, "masked": False}
    return make_examples(fit, held_out, tokenizer, protocol="din2023", seed=5, **size)


@pytest.fixture(scope="module")
def written(outcome):
    return json.loads((outcome.out / "decoding.json").read_text("utf-8"))


def check_ratio(row, sums, counts):
    sums, counts = np.asarray(sums, np.float64), np.asarray(counts, np.float64)
    sums, counts = sums[counts > 0], counts[counts > 0]
    if not len(sums):
        assert row["value"] is None
        return
    assert row["value"] == pytest.approx(sums.sum() / counts.sum())
    low, high = by_hand(
        lambda drawn: sums[drawn].sum() / counts[drawn].sum(), np.arange(len(sums)), seed=5
    )
    assert (row["low"], row["high"]) == pytest.approx((low, high))
    assert row["n"] == len(sums)


def test_figures_are_those_of_the_tokens(outcome, written):
    methods = written["methods"]
    drafts = [f"{kind}.{layer} x 3" for kind in ("affine", "id", "carry") for layer in (1, 3)]
    exits = [f"exit {kind} {fill} > 0.02" for kind in ("affine", "id") for fill in ("copy", "map")]
    assert list(methods) == ["plain", *drafts, "lookup x 3", *exits]
    plain = methods["plain"]["tokens"]
    (row,) = outcome.find(method="plain")  # no clock, and nothing to compare it with
    assert (row["metric"], row["way"]) == ("perplexity", "plain")
    for name, kept in methods.items():
        assert len(kept["tokens"]) == 5
        assert all(len(row) == 9 for row in kept["tokens"])
        if name == "plain":
            continue
        words = name.replace(".", " ").split()
        label = {"method": name, "way": "draft"}
        if words[0] == "exit":
            label |= {"way": "exit", "map": words[1], "fill": words[2], "threshold": 0.02}
        elif words[0] == "lookup":
            label |= {"way": "lookup", "tokens": int(words[2])}
        else:
            label |= {"map": words[0], "layer": int(words[1]), "tokens": int(words[3])}
            label |= {"way": "carry"} if words[0] == "carry" else {}
        agrees = [[a == b for a, b in zip(*rows, strict=True)] for rows in zip(kept["tokens"], plain, strict=True)]  # fmt: skip
        check_ratio(
            outcome.one(**label, metric="same_tokens"), [sum(row) for row in agrees], [9] * 5
        )
        until = np.array([[*row, False].index(False) for row in agrees], np.float64)
        row = outcome.one(**label, metric="until_difference")
        assert row["value"] == until.mean()
        if words[0] == "exit":
            left = [row[1:] for row in kept["layers"]]
            check_ratio(outcome.one(**label, metric="layers"), [sum(row) for row in left], [8] * 5)
            continue
        check_ratio(outcome.one(**label, metric="accepted"), kept["accepted"], kept["drafted"])
        check_ratio(outcome.one(**label, metric="tokens_a_check"), [8] * 5, kept["cycles"])


def test_texts_are_those_of_generate(outcome, written):
    model, tokenizer = jmat.load(REFERENCE / "gpt2")
    prompts = [np.array(ids, np.int32) for ids in written["prompts"]]
    assert all(len(prompt) == 3 for prompt in prompts)
    own = {"max_new_tokens": 9, "stop_tokens": [], "seed": 5}
    plain = jmat.generate(model, prompts, **own)
    assert written["methods"]["plain"]["tokens"] == [row.tolist() for row in plain.tokens]
    maps, info = outcome.maps
    assert info.n == 120
    assert set(maps) == {f"{kind}.{layer}.4" for kind in ("affine", "id") for layer in (1, 3)}
    draft = jmat.Draft(3, maps["affine.3.4"], tokens=3)
    drafted = jmat.generate(model, prompts, tokenizer=tokenizer, draft=draft, **own)
    kept = written["methods"]["affine.3 x 3"]
    assert kept["tokens"] == [row.tolist() for row in drafted.tokens]
    assert kept["texts"] == list(drafted.texts)
    for field, counts in drafted.drafts._asdict().items():
        assert kept[field] == counts.tolist()


def test_exits_are_those_that_were_asked_for(outcome, written):
    """Some tokens leave and some do not, and their figures are those of `measure_exits`."""
    model, _ = jmat.load(REFERENCE / "gpt2")
    examples = prepared(model)
    prompts = [np.array(ids, np.int32) for ids in written["prompts"]]
    for fill in ("copy", "map"):
        exits = jmat.fit_exits(model, examples.fit, [1, 3], 0.02, fill=fill, kind="affine")
        name = f"exit affine {fill} > 0.02"
        rows = measure_exits(model, prompts, {name: exits}, max_new_tokens=9, seed=5)
        for row in rows[1:]:
            shared = {key: row[key] for key in ("metric", "method", "distance") if key in row}
            (found,) = [
                each
                for each in outcome.find(**shared)
                if ("distance" in each) == ("distance" in row)
            ]
            if row["value"] is None:
                assert found["value"] is None
                continue
            assert found["value"] == pytest.approx(row["value"], rel=1e-4), shared
        assert rows[0]["value"] == pytest.approx(outcome.one(method="plain")["value"], rel=1e-4)
        layers = np.concatenate([row[1:] for row in written["methods"][name]["layers"]])
        assert 0 < (layers == 4).mean() < 1


def test_the_predicted_speed_is_of_measured_costs(monkeypatch, gpt2, gpt2_examples):
    """A plain step takes 10 ms, a drafted token 2 or 3, and a check 14, 15 or 16."""
    asked = {}

    def costs(model, drafts, checks, *, rows, length, room, turns):
        asked.update(drafts=drafts, checks=list(checks), sizes=(rows, length, room, turns))
        per_draft = {name: 0.002 if step.layer == 1 else 0.003 for name, step in drafts.items()}
        return Costs(0.01, per_draft, {(1, 2): 0.014, (3, 2): 0.015, (0, 2): 0.016})

    monkeypatch.setattr(predicted, "measure_costs", costs)
    options = decoding.Options(
        ways=["draft", "lookup"], layers=[1, 3], draft_tokens=[2], num_prompts=3, prompt_tokens=4,
        new_tokens=6, turns=1, short_list=50,
    )  # fmt: skip
    results = decoding.run(gpt2, gpt2_examples, options)
    rows = {(row["method"], row["metric"]): row for row in results.rows}
    per_check = {name: rows[name, "tokens_a_check"]["value"] for name, metric in rows if metric == "tokens_a_check"}  # fmt: skip
    for name, c, v in (
        ("affine.1 x 2", 0.2, 1.4),
        ("affine.3 x 2", 0.3, 1.5),
        ("lookup x 2", 0, 1.6),
    ):
        row = rows[name, "predicted_speed_up"]
        assert row["value"] == pytest.approx(per_check[name] / (2 * c + v))
        assert (row["draft_cost"], row["check_cost"]) == pytest.approx((c, v))
    assert asked["sizes"] == (3, 4 + 3, 4 + 6, 1)
    assert set(asked["drafts"]) == {"affine.1 x 2", "affine.3 x 2"}
    words = frequent_words(gpt2_examples.fit, 50)
    assert all(np.array_equal(step.words, words) for step in asked["drafts"].values())


def test_prompts_begin_sentences_that_no_map_was_fitted_on():
    split = load_examples(REFERENCE / "gpt2" / "examples.npz").eval
    prompts = first_tokens(split, 7, 4)
    sentences = [
        split.tokens[start : start + length].tolist()
        for start, length in zip(split.starts, split.lengths, strict=True)
    ]
    expected = list(dict.fromkeys(tuple(row[:4]) for row in sentences if len(row) > 4))[:7]
    assert [tuple(prompt) for prompt in prompts] == expected
    with pytest.raises(ValueError, match="ask for fewer prompts, shorter ones, or more text"):
        first_tokens(split, 10**6, 4)


def test_the_clock_is_of_turns(monkeypatch, gpt2, gpt2_examples):
    """Plain text takes 2, 1 and 4 seconds; the draft takes 1, 3 and 2."""
    times = {"plain": [2.0, 1.0, 4.0], "affine.2 x 2": [1.0, 3.0, 2.0]}
    asked = []

    def in_turn(works, turns):
        asked.append(turns)
        assert all(len(work()) == 2 for work in works.values())
        return times

    monkeypatch.setattr(measure, "in_turn", in_turn)
    options = decoding.Options(
        ways=["draft"],
        layers=[2],
        draft_tokens=[2],
        num_prompts=2,
        prompt_tokens=4,
        new_tokens=6,
        turns=3,
    )
    monkeypatch.setattr(study, "predicted_rows", lambda *_, **__: [])
    results = decoding.run(gpt2, gpt2_examples, options)
    assert asked == [3]
    rows = {(row["method"], row["metric"]): row for row in results.rows}
    extremes = {"n": 3, "interval": "extremes over turns"}
    for method, values in {"plain": (12, 3, 12), "affine.2 x 2": (12, 4, 12)}.items():
        row = rows[method, "tokens_a_second"]
        assert row == row | dict(zip(("value", "low", "high"), values, strict=True)) | extremes
    row = rows["affine.2 x 2", "speed_up"]
    assert row == row | {"value": 1, "low": 1 / 3, "high": 2} | extremes
    assert ("plain", "speed_up") not in rows
    assert "timed on" in results.table()
    figure = results.plot()
    panel = figure.axes[0]
    (name,) = [name for name in legend(figure) if name != "plain"]
    assert name == "affine map, 2 a draft"
    assert curve(panel, legend(figure)[name]) == ([1.0], [12.0])


def test_settings_reach_the_texts(monkeypatch, gpt2, gpt2_examples):
    seen = []

    def spy(model, prompts, **arguments):
        seen.append((prompts, arguments))
        return generating.generate(model, prompts, **arguments)

    monkeypatch.setattr(measure, "generate", spy)
    options = decoding.Options(
        ways=["draft"], kinds=["mat"], layers=[3], draft_tokens=["2"], new_tokens=5, temperature=0.7, seed=9,
        turns=0, num_prompts=2,
    )  # fmt: skip
    prompts = [[5, 6, 7], [8, 9]]
    decoding.run(gpt2, gpt2_examples, options, prompts=prompts)
    assert len(seen) == 2
    for given, arguments in seen:
        assert [row.tolist() for row in given] == prompts
        wanted = {"max_new_tokens": 5, "temperature": 0.7, "seed": 9, "stop_tokens": []}
        assert wanted.items() <= arguments.items()
    draft = seen[1][1]["draft"]
    assert (draft.layer, draft.tokens) == (3, 2)


def test_prompts_come_from_a_file(tmp_path):
    (tmp_path / "mine.txt").write_text("returns the list\n\nvalue of the first key\n", "utf-8")
    given = FEW | {
        "ways": "lookup",
        "prompts": tmp_path / "mine.txt",
        "new_tokens": 4,
        "turns": 0,
        "layers": 2,
    }
    outcome = call("decoding", draft_tokens=1, **given)
    _, tokenizer = jmat.load(REFERENCE / "gpt2")
    written = json.loads((outcome.out / "decoding.json").read_text("utf-8"))
    texts = ["returns the list", "value of the first key"]
    assert written["prompts"] == [tokenizer(text)["input_ids"] for text in texts]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layers": [0]}, "no block drafts from layer 0"),
        ({"layers": [4]}, "layers"),
        ({"draft_tokens": [0]}, "draft_tokens=0: expected a whole number from 1 to 64"),
        ({"draft_tokens": ["x"]}, "draft_tokens='x': expected a whole number from 1 to 64"),
        ({"kinds": ["jacobian"]}, "derived from gradients, and decoding does not read them"),
        ({"kinds": ["rank:65"]}, "rank 65, above the width 64"),
        ({"kinds": ["tuned"], "route": "streaming"}, "stores no activations"),
        ({"intercept": True}, "affine is mat with one"),
        ({"solver": "lstsq"}, "all kinds are fitted from one set of moments"),
        ({"new_tokens": 126}, "ask for at most 120"),
        ({"turns": -1}, "turns=-1"),
        ({"ways": ["drafts"]}, "ways"),
        ({"kinds": ["tuned"]}, "is not fitted to one pair of sites in closed form"),
        ({"fills": ["cpy"]}, "fills"),
        ({"thresholds": ["x"]}, "thresholds=x: expected numbers, such as 0.5,0.9"),
        ({"thresholds": [1.5]}, "1.5"),
        ({"confidence": "patience", "thresholds": ["1.5"]}, "of patience whole ones"),
        ({"short_list": -1}, "short_list=-1"),
        ({"temperature": -1.0}, "temperature=-1.0"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_read(given, message, gpt2, gpt2_examples, monkeypatch):  # fmt: skip
    monkeypatch.setattr(study, "read_statistics", None)
    with pytest.raises(ValueError, match=message):
        decoding.run(gpt2, gpt2_examples, decoding.Options(**given))


def test_a_masked_model_does_not_write(bert):
    with pytest.raises(ValueError, match=r"bert.*causal|masked"):
        decoding.Options().check(bert.config)
