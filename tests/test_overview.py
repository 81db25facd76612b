"""All studies of one model on one page: their figures are those of the single studies,
and a killed run goes on.
"""

import dataclasses
import html.parser
import itertools
import json
import re
import signal
import time

import jax
import numpy as np
import pytest

import jmat
from jmat.capture import activations
from jmat.capture.shared import SharedActivations
from jmat.data.examples import Examples, Split
from jmat.report.results import Results, read_results
from jmat.studies import layer_jump, overview, peek, prune, r2
from jmat.studies.overview import finished, study
from jmat.studies.overview.claims import CLAIMS, verdicts
from jmat.studies.overview.options import reason_against
from jmat.studies.overview.page import page
from jmat.studies.overview.rules import Evidence
from jmat.studies.overview.tables import number
from tests.scripts import on, run, start
from tests.test_reference import REFERENCE

SOME = ("layer_jump", "r2", "peek")
OPTIONS = overview.Options(studies=SOME, seed=3, intercept=True)


def first(split: Split, count: int) -> Split:
    lengths = split.lengths[:count]
    return Split(split.tokens[: lengths.sum()], lengths, split.positions[:count])


@pytest.fixture(scope="module")
def loaded():
    return jmat.load(REFERENCE / "gpt2")


@pytest.fixture(scope="module")
def few(gpt2_examples):
    return Examples(first(gpt2_examples.fit, 90), first(gpt2_examples.eval, 40))


@pytest.fixture(scope="module")
def made(loaded, few, tmp_path_factory):
    """A report of some studies, its folder, and how many sweeps over text read
    activations.
    """
    folder, swept = tmp_path_factory.mktemp("report"), []
    with pytest.MonkeyPatch.context() as patch:
        plain = activations.sweep
        patch.setattr(
            activations, "sweep", lambda *given, **how: swept.append(1) or plain(*given, **how)
        )
        report = overview.run(loaded[0], few, OPTIONS, tokenizer=loaded[1], folder=folder)
    report.save(folder)
    return report, folder, len(swept)


def test_one_pass_for_each_text_serves_all_studies(made):
    report, _, sweeps = made
    assert report.passes == 2  # the text to fit on, and that to evaluate on
    assert sweeps == 3  # and the sentences that peek looks at


@pytest.mark.parametrize("name", SOME)
def test_figures_are_those_of_the_study_alone(made, loaded, few, name):
    report, folder, _ = made
    module = overview.STUDIES[name]
    model, tokenizer = loaded
    given = [None] if name == "peek" else [few]
    how = {"tokenizer": tokenizer, **({"examples": few} if name == "peek" else {})}
    alone = module.run(model, *given, module.Options(seed=3, intercept=True), **how)
    assert report.studies[name].rows == alone.rows
    assert read_results(folder / name)["rows"] == alone.rows
    other = module.run(model, *given, module.Options(seed=3), **how)
    assert report.studies[name].rows != other.rows
    content = json.loads((folder / "report.json").read_text("utf-8"))
    assert content["studies"][name]["rows"] == alone.rows
    assert content["model_hash"] == alone.model_hash
    assert (content["text"]["fit"], content["text"]["eval"]) == (
        alone.text["fit"],
        alone.text["eval"],
    )
    assert (content["text"]["num_fit"], content["text"]["num_eval"]) == (90, 40)
    shape = {"name": model.name, "layers": 4, "width": model.config.width, "causal": True}
    assert content["model"] == shape
    assert {name: content["config"][name] for name in ("seed", "intercept", "remove")} == {
        "seed": 3, "intercept": True, "remove": 1
    }  # fmt: skip


@pytest.mark.slow
def test_all_studies_have_the_figures_of_each_alone(loaded, few, monkeypatch):
    model, tokenizer = loaded
    options = overview.Options(
        seed=3, intercept=True, protocol="jmat", remove=2, method=("map",), score="angular"
    )
    swept = []
    plain = activations.sweep
    monkeypatch.setattr(
        activations, "sweep", lambda *given, **how: swept.append(1) or plain(*given, **how)
    )
    report = overview.run(model, few, options, tokenizer=tokenizer)
    assert (report.passes, len(swept)) == (2, 3)
    assert list(report.studies) == list(overview.STUDIES)
    settings = {"prune": {"remove": 2, "method": ("map",), "score": "angular"}}
    settings |= {
        name: {"protocol": "jmat"} for name in ("layer_jump", "r2", "early_exit", "linearity")
    }
    for name, module in overview.STUDIES.items():
        chosen = module.Options(seed=3, intercept=True, **settings.get(name, {}))
        given = (None,) if name == "peek" else (few,)
        how = {"examples": few} if name == "peek" else {}
        alone = module.run(model, *given, chosen, tokenizer=tokenizer, **how)
        assert timeless(report.studies[name].rows) == timeless(alone.rows), name


def timeless(rows):
    """Returns rows and notes without those of a clock."""
    clocks = ("seconds_per_example", "time_ratio", "microseconds_per_token")
    return [row for row in rows if row["metric"] not in clocks]


def test_shared_activations_are_read_once_and_cannot_be_changed(gpt2, few, loaded):
    shared = SharedActivations(gpt2)
    once = shared.read(few.eval, ["block.1", "embed"])
    again = shared.read(few.eval, ["embed", "block.1"])
    assert list(again) == ["embed", "block.1"]
    assert again["embed"] is once["embed"]
    assert shared.passes == 1
    np.testing.assert_array_equal(
        once["block.1"], activations.capture(gpt2, few.eval, "block.1")["block.1"]
    )
    with pytest.raises(ValueError, match="read-only"):
        once["embed"][0] = 0
    other = shared.read(few.fit, ["embed"])["embed"]
    assert len(other) == 90
    shared.keep_only(["embed"])
    assert shared.read(few.fit, ["embed"])["embed"] is other
    shared.read(few.eval, ["block.1"])
    assert shared.passes == 3
    with pytest.raises(ValueError, match="another model's"):
        r2.run(loaded[0], few, shared=shared)


def again(made, loaded, few, options=OPTIONS):
    return overview.run(loaded[0], few, options, tokenizer=loaded[1], folder=made[1])


def test_a_run_goes_on_with_what_is_there(made, loaded, few, monkeypatch):
    report, _, _ = made
    ran = []
    for module in (layer_jump, r2, peek):
        monkeypatch.setattr(
            module, "run", lambda *_, **__: ran.append(1) or pytest.fail("was run again")
        )
    kept = again(made, loaded, few)
    assert all(done.read_back for done in kept.studies.values())
    for name, done in kept.studies.items():
        before = json.loads(json.dumps(report.studies[name].rows))
        assert (done.rows, done.seconds, done.figures) == (before, *report.studies[name][2:5:2]), (
            name
        )
    assert "in an earlier run" in kept.table()
    assert kept.page().count("<img") == 2
    assert kept.page().count('class="tokens"') == report.page().count('class="tokens"') == 6
    assert ran == []


@pytest.mark.parametrize("change", ["option", "text", "model", "version", "rows", "page"])
def test_results_of_another_run_are_not_read_back(made, few, tmp_path, change, monkeypatch):
    _, folder, _ = made
    stored = read_results(folder / "r2")
    for name in ("results.json", "page.json"):
        (tmp_path / name).write_bytes((folder / "r2" / name).read_bytes())
    expected = Results("r2", [], stored["config"], stored["model_hash"], stored["text"])
    assert finished.read(tmp_path, expected).rows == stored["rows"]
    if change == "option":
        expected = dataclasses.replace(expected, config={**stored["config"], "intercept": False})
    elif change == "text":
        expected = dataclasses.replace(expected, text={**stored["text"], "eval": "0" * 16})
    elif change == "model":
        expected = dataclasses.replace(expected, model_hash="0" * 16)
    elif change == "version":
        monkeypatch.setattr(finished, "package_version", lambda name: "9.9")
    elif change == "rows":
        content = (tmp_path / "results.json").read_text("utf-8")
        (tmp_path / "results.json").write_text(
            content.replace('"layer": 1', '"layer": 2', 1), "utf-8"
        )
    else:
        (tmp_path / "page.json").unlink()
    assert finished.read(tmp_path, expected) is None


def test_a_study_that_fails_takes_nothing_from_the_others(made, loaded, few, monkeypatch):
    def fail(*_, **__):
        raise ValueError("the map diverged.")

    monkeypatch.setattr(prune, "run", fail)
    report = again(made, loaded, few, dataclasses.replace(OPTIONS, studies=(*SOME, "prune")))
    assert list(report.studies) == list(SOME)
    assert report.failures == {"prune": "the map diverged."}
    assert "prune failed: the map diverged." in report.table()
    assert "the map diverged." in report.page()


def test_a_setting_is_refused_before_any_work(loaded, few):
    with pytest.raises(ValueError, match="studies has 'peak'"):
        overview.Options(studies=("peak",))
    with pytest.raises(ValueError, match="score='size'"):
        overview.Options(score="size")
    with pytest.raises(ValueError, match=r"remove=4: expected 1 \.\. 3"):
        overview.run(loaded[0], few, overview.Options(remove=4), tokenizer=loaded[1])


def test_every_study_gets_the_settings_of_its_names_and_snapshots_of_its_own(tmp_path):
    """Each setting has another value than its default."""
    given = {
        "seed": 5,
        "intercept": True,
        "tokens_per_batch": 99,
        "protocol": "jmat",
        "skip_first": 3,
    }
    given |= {
        "skip_special": True,
        "snapshot_every": 7.0,
        "method": ("merge",),
        "remove": 2,
        "score": "angular",
    }
    options = overview.Options(snapshot_folder=tmp_path, **given)
    for name, module in overview.STUDIES.items():
        found = vars(study._settings(name, options, 8))
        own = {field.name for field in dataclasses.fields(module.Options)}
        assert {each: found[each] for each in given if each in own} == {
            k: v for k, v in given.items() if k in own
        }
        assert found.get("snapshot_folder") == (
            tmp_path / name if "snapshot_folder" in own else None
        )
        others = {
            each: value for each, value in found.items() if each not in {*given, "snapshot_folder"}
        }
        assert others == {each: getattr(module.Options(), each) for each in others}


def test_of_a_deep_model_parts_are_replaced_at_ten_layers():
    """The time of submodule_ablation at all layers would grow with their square."""
    name = "submodule_ablation"
    layers = {
        count: study._settings(name, overview.Options(), count).layers
        for count in (1, 9, 10, 12, 30)
    }
    assert layers == {
        1: (),
        9: (),
        10: (0, 1, 2, 3, 4, 6, 7, 8, 9, 10),
        12: (0, 1, 3, 4, 5, 7, 8, 9, 11, 12),
        30: (0, 3, 7, 10, 13, 17, 20, 23, 27, 30),
    }


HEADS = {"layer_jump", "submodule_ablation", "early_exit", "prune", "probe", "peek"}


def test_studies_that_predict_nothing_need_no_head(loaded):
    model, tokenizer = loaded
    without = jax.tree.map(lambda leaf: leaf, model)
    without.head = None
    for name in overview.STUDIES:
        assert reason_against(name, model, tokenizer, overview.Options()) is None
        reason = reason_against(name, without, tokenizer, overview.Options())
        assert reason == ("the model has no language-model head" if name in HEADS else None)
        reason = reason_against(name, model, None, overview.Options())
        assert reason == ("the model has no tokenizer" if name in ("probe", "peek") else None)


def test_a_model_without_tokenizer_leaves_studies_out(loaded, few, made):
    report = overview.run(loaded[0], few, overview.Options(studies=("r2", "peek")), folder=None)
    assert list(report.studies) == ["r2"]
    assert report.skipped["peek"] == "the model has no tokenizer"
    assert report.skipped["prune"] == "it was not asked for"


# --- claims ---------------------------------------------------------------------------------------


def figure(value, width=0.01, **fields):
    return {**fields, "value": value, "low": value - width, "high": value + width, "n": 9}


def evidence(**changes):
    """Figures of a model of two blocks for which every claim that is tested holds;
    `changes` are values to take.
    """
    value = {
        "mat": 0.8, "id": 0.4, "r2": 0.9, "saved": 0.1, "attn": 0.9, "step": 0.995, "without": 0.5, "norm": 0.3,
        "mapped": 51.0, "kl": 0.1, "distil": 0.05,
    } | changes  # fmt: skip
    metrics = ("precision@1", "precision@5", "precision@10")
    jump = [
        figure(value[kind], map=kind, layer=layer, target=2, metric=metric)
        for kind in ("mat", "id") for layer in range(2) for metric in metrics
    ]  # fmt: skip
    jump += [
        figure(1.0, map=kind, layer=2, target=2, metric=metric)
        for kind in ("mat", "id")
        for metric in metrics
    ]
    pairs = [(0, 1), (0, 2), (1, 2)]
    explained = [
        figure(value["r2"] if kind == "mat" else 0.6, map=kind, layer=i, target=j, metric="r2")
        for kind in ("mat", "id") for i, j in pairs
    ]  # fmt: skip
    saved = {"mat": 0.3, "id": 0.2, "mat - id": value["saved"]}
    exits = [
        figure(v, map=k, confidence="gap", metric="layers_saved@0.95") for k, v in saved.items()
    ]
    parts = {"mat_attn": value["attn"], "mat_ffn": 0.8, "mat_ln1_ln2": 0.7}
    replaced = [
        figure(v, map=k, layer=l, target=2, metric="precision@1")
        for k, v in parts.items()
        for l in range(2)
    ]
    steps = {
        "linearity": value["step"],
        "linearity_held_out": 0.98,
        "contribution_norm": value["norm"],
    }
    steps |= {"linearity_without_residual_held_out": value["without"]}
    linear = [
        figure(v, map="mat", layer=l, target=l + 1, metric=m)
        for m, v in steps.items()
        for l in range(2)
    ]
    kls = {"map": value["kl"], "delete": 0.2, "distil": value["distil"]}
    pruned = [figure(v, method=m, removed=k, blocks="1" if k else "", metric="kl")
              for m, last in kls.items() for k, v in enumerate((0.0, last))]  # fmt: skip
    pruned += [figure(v, method="map", removed=k, blocks="1" if k else "", metric="perplexity")
               for k, v in enumerate((50.0, value["mapped"]))]  # fmt: skip
    rows = {
        "layer_jump": jump,
        "r2": explained,
        "early_exit": exits,
        "submodule_ablation": replaced,
    }
    return Evidence(
        rows | {"linearity": linear, "prune": pruned}, layers=2, causal=True, score="linearity"
    )


def by_statement(seen):
    return {each.statement: each for each in verdicts(seen)}


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("reads the prediction off an earlier layer", {"mat": 0.415}),  # intervals meet
        ("The advantage of the map is large", {"mat": 0.54}),
        ("Early layers already hold", {"mat": 0.6}),
        ("explains more of a later layer", {"r2": 0.615}),
        ("Early exit by the map", {"saved": 0.005}),
        ("attention bears linear replacement best", {"attn": 0.79}),
        ("The step from a layer to the next", {"step": 0.985}),
        ("Without the residual stream", {"without": 0.975}),
        ("A block adds little", {"norm": 0.995}),
        ("The most linear blocks can be replaced", {"mapped": 53.0}),
        ("in the place of a block loses less", {"kl": 0.195}),
        ("Distillation of the maps", {"distil": 0.095}),
    ],
)
def test_a_rule_decides_each_claim(words, change):
    (statement,) = (claim.statement for claim in CLAIMS if words in claim.statement)
    assert by_statement(evidence())[statement].verdict == "holds"
    wrong = by_statement(evidence(**change))[statement]
    assert wrong.verdict == "does not hold"
    assert re.search(r"\d", wrong.figures)


def test_claims_that_one_model_cannot_decide_are_not_tested():
    untested = [each for each in verdicts(evidence()) if each.verdict == "not tested"]
    assert len(untested) == 4
    assert all("python -m experiments." in each.figures for each in untested)
    nothing = verdicts(evidence()._replace(rows={}))
    assert {each.verdict for each in nothing} == {"not tested"}
    assert nothing[0].figures == "There are no results of layer_jump."


def test_masked_models_and_other_orders_have_their_own_rules():
    masked = by_statement(evidence(mat=0.58)._replace(causal=False))
    assert masked["The advantage of the map is large."].verdict == "holds"
    assert (
        by_statement(evidence(mat=0.56)._replace(causal=False))[
            "The advantage of the map is large."
        ].verdict
        == "does not hold"
    )
    assert masked["Early layers already hold much of the prediction."].verdict == "not tested"
    other = by_statement(evidence()._replace(score="kl"))
    asked = other["The most linear blocks can be replaced by linear maps at little cost."]
    assert (asked.verdict, "--score=linearity" in asked.figures) == ("not tested", True)
    seen = evidence()
    seen.rows["prune"][3]["blocks"] = "0"
    assert (
        by_statement(seen)[
            "A linear map in the place of a block loses less than removal does."
        ].verdict
        == "not tested"
    )


def test_figures_without_value_or_interval_decide_nothing():
    seen = evidence()
    seen.rows["r2"][0].update(value=None, note="does not vary")
    assert by_statement(seen)[CLAIMS[3].statement].verdict == "not tested"
    for row in seen.rows["layer_jump"]:
        del row["low"], row["high"]
    assert by_statement(seen)[CLAIMS[0].statement].figures.startswith("There are no intervals")


# --- the page -------------------------------------------------------------------------------------


class Elements(html.parser.HTMLParser):
    """Collects the elements of a page, and the text of its headings."""

    def __init__(self, content):
        super().__init__()
        self.all: list[tuple[str, dict]] = []
        self.feed(content)

    def handle_starttag(self, tag, attributes):
        self.all.append((tag, dict(attributes)))

    def of(self, tag):
        return [attributes for name, attributes in self.all if name == tag]


def test_the_page_needs_nothing_else_and_has_a_plan(made):
    _, folder, _ = made
    content = (folder / "report.html").read_text("utf-8")
    elements = Elements(content)
    assert elements.of("html") == [{"lang": "en"}]
    assert not elements.of("script") + elements.of("link") + elements.of("iframe")
    assert all(each["src"].startswith("data:image/svg+xml;base64,") for each in elements.of("img"))
    assert all(len(each["alt"]) > 30 for each in elements.of("img"))
    assert len(elements.of("img")) == 2
    assert not re.search(r"url\(|@import|https?://", content)
    ids = [each["id"] for _, each in elements.all if "id" in each]
    assert len(ids) == len(set(ids))
    assert all(each["href"].removeprefix("#") in ids for each in elements.of("a"))
    levels = [int(tag[1]) for tag, _ in elements.all if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert all("scope" in each for each in elements.of("th"))
    assert content.count('class="badge') == 3 + len(CLAIMS)
    read = read_results(folder / "layer_jump")
    (row,) = (
        row
        for row in read["rows"]
        if (row["map"], row["layer"], row["metric"]) == ("mat", 1, "precision@1")
    )
    assert (
        f"<td>{row['value']:.3f}<small>{row['low']:.3f} to {row['high']:.3f}</small></td>"
        in content
    )
    for fingerprint in (read["model_hash"], read["text"]["fit"], read["text"]["eval"]):
        assert f"<dd>{fingerprint}</dd>" in content


def test_numbers_are_for_people():
    written = [number(value) for value in (-0.0001, -0.25, 123456, 1234.56, 2.5e7)]
    assert written == ["0.000", "\N{MINUS SIGN}0.250", "123,456", "1,234.6", "2.5e+07"]


def test_names_and_texts_are_escaped(made):
    report = made[0]
    wrong = "<img src=x onerror=alert(1)>"
    changed = dataclasses.replace(
        report, model={**report.model, "name": wrong}, skipped={"prune": wrong}
    )
    content = changed.page()
    assert wrong not in content
    assert content.count("&lt;img src=x onerror=alert(1)&gt;") == 4


def luminance(colour):
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_have_the_contrast_that_reading_takes(made):
    """WCAG 2.2, AA: 4.5 to 1, in light, in dark and on paper."""
    palettes = re.findall(r":root \{(.*?)\}", made[0].page(), re.DOTALL)
    assert len(palettes) == 3
    pairs = [
        ("ink", "page"),
        ("ink", "card"),
        ("soft", "page"),
        ("soft", "card"),
        ("link", "page"),
        ("ink", "hot"),
    ]
    pairs += [(kind, f"{kind}-card") for kind in ("yes", "no", "open")]
    for palette in palettes:
        colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", palette))
        for text, ground in pairs:
            light, dark = sorted(
                (luminance(colours[text]), luminance(colours[ground])), reverse=True
            )
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, ground, palette)


def test_a_notebook_shows_the_page(made):
    assert made[0]._repr_html_().startswith('<iframe srcdoc="&lt;!doctype html&gt;')


def test_a_page_of_no_study_says_why(loaded, few, made):
    content = made[0].content()
    empty = page(
        {**content, "studies": {}, "skipped": {}, "failures": {"r2": "too few sentences."}}, {}
    )
    assert "too few sentences." in empty
    assert "<img" not in empty


# --- the script -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_script_goes_on_where_it_was_killed_and_writes_what_single_scripts_do(tmp_path):
    flags = on("gpt2", tmp_path / "report", seed=1, intercept=True, remove=2)
    running, out = start("report", *flags), tmp_path / "report"
    while not (out / "submodule_ablation" / "page.json").exists() and not running.is_over():
        time.sleep(0.01)
    running.kill(signal.SIGKILL)
    assert running.finish()[0] == -signal.SIGKILL
    assert not (out / "report.html").exists()
    printed, said = run("report", *flags)
    assert "submodule_ablation is there already" in said
    assert "open" in printed
    content = json.loads((out / "report.json").read_text("utf-8"))
    assert list(content["studies"]) == list(overview.STUDIES)
    assert content["studies"]["submodule_ablation"]["read_back"]
    assert not content["studies"]["linearity"]["read_back"]
    for name in overview.STUDIES:
        own = {"remove": 2, "score": "linearity"} if name == "prune" else {}
        run(name, *on("gpt2", tmp_path / name, seed=1, intercept=True, **own))
        alone, here = read_results(tmp_path / name), read_results(out / name)
        assert timeless(here["rows"]) == timeless(alone["rows"]), name
        assert {key: here[key] for key in ("experiment", "config", "model_hash", "text")} == {
            key: alone[key] for key in ("experiment", "config", "model_hash", "text")
        }, name
        left = {path.name for path in (tmp_path / name).iterdir()} - {"run.json"}
        assert left <= {path.name for path in (out / name).iterdir()}, name
        assert content["studies"][name]["rows"] == here["rows"]
