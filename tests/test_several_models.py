"""The zoo of maps of several models in one run: the rows of each alone, the same bytes
twice and after a kill, and tables family by family.
"""

import contextlib
import io
import json
import sys
from unittest import mock

import pytest

from jmat.report.results import read_results
from jmat.studies import map_zoo
from jmat.studies.map_zoo import several
from tests.inside import _as_before, call, loaded, text
from tests.test_map_zoo import one
from tests.test_reference import REFERENCE

MODELS = [REFERENCE / "gpt2", REFERENCE / "bert"]
GIVEN = {
    "kinds": "mat,affine,rank:4",
    "layers": "1",
    "corpus": text(),
    "num_fit": 90,
    "num_eval": 20,
}


def run_in(out, models=MODELS, **given):
    """Runs the script in this process, and returns what it printed."""
    words = [f"--{name}={value}" for name, value in {**GIVEN, **given}.items()]
    names = ",".join(map(str, models))
    arguments = ["experiments.map_zoo", f"--models={names}", f"--out={out}", *words]
    printed, said = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with (
        _as_before(),
        loaded("map_zoo") as module,
        mock.patch.object(sys, "argv", arguments),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(said),
    ):
        try:
            module.cli.run(module.main)
        except SystemExit as end:
            if end.code:
                raise ValueError(said.buffer.getvalue().decode()) from None
    return [stream.buffer.getvalue().decode("utf-8") for stream in (printed, said)]


def contents(folder):
    """The bytes of every file of a run by its name; run.json, which names the folder's
    flags, too.
    """
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("several") / "out"
    return out, run_in(out)[0]


def test_each_model_has_the_files_of_a_run_alone(whole):
    out, _ = whole
    for model in MODELS:
        alone = call("map_zoo", model=model, **GIVEN)
        mine = read_results(out / model.name)
        assert mine["config"] == alone.results["config"]
        assert [row for row in mine["rows"]] == [
            {key: value for key, value in row.items() if key != "note"} | _note(row, mine["rows"])
            for row in alone.rows
        ]
        files = {path.name for path in (out / model.name).iterdir()}
        assert files == {
            "results.json", "maps.json", "maps.safetensors", "map_zoo.png", "map_zoo_bytes.png"
        }  # fmt: skip
        for name in ("maps.safetensors",):
            assert (out / model.name / name).read_bytes() == (alone.out / name).read_bytes()


def _note(row, rows):
    """The note of a row's twin: in runs inside the tests, notes on predictions are others."""
    label = {key: row.get(key) for key in ("map", "layer", "target", "metric")}
    twin = one(rows, **label)
    return {"note": twin["note"]} if "note" in twin else {}


def test_the_rows_of_all_models_stand_together(whole):
    out, printed = whole
    together = read_results(out)
    wanted = [
        {"model": name, "family": name, **row}
        for name in ("gpt2", "bert")
        for row in read_results(out / name)["rows"]
    ]
    assert together["rows"] == wanted
    assert set(together["model_hash"]) == {"gpt2", "bert"} == set(together["text"])
    row = one(wanted, model="bert", map="affine", layer=None, metric="kl")
    shown = f"{row['value']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
    assert shown in printed[printed.index("bert: bert") :]
    last = printed[printed.index("the paired difference from mat, of all models") :]
    row = one(wanted, model="gpt2", map="rank:4", layer=None, metric="kl_minus_mat")
    assert f"{row['value']:.3f} [{row['low']:.3f}, {row['high']:.3f}]" in last
    assert (out / "map_zoo.png").is_file()
    figure = several.plot_models(together)
    drawn = {
        round(float(line.get_xdata()[0]), 6)
        for line in figure.axes[0].lines
        if len(line.get_xdata()) == 1
    }
    apart = [row for row in wanted if row["metric"] == "kl_minus_mat" and "layer" not in row]
    assert drawn == {round(row["value"], 6) for row in apart}
    assert several.plot_bytes(together).get_suptitle() == "what a map's memory buys"
    panels = several.plot_bytes(together).axes
    assert [panel.get_title() for panel in panels] == [
        f"{name}: KL, mean over layers" for name in ("gpt2", "bert")
    ]


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(whole, tmp_path, monkeypatch):
    out, run = tmp_path / "out", map_zoo.run
    ran = []

    def killed(model, *given, **named):
        ran.append(model.name)
        if len(ran) == 2:
            raise KeyboardInterrupt
        return run(model, *given, **named)

    monkeypatch.setattr(map_zoo, "run", killed)
    with pytest.raises(ValueError, match="interrupted"):
        run_in(out)
    (out / "gpt2" / "map_zoo.png").unlink()  # as if it had been killed while it drew
    _, said = run_in(out)
    assert [name.rpartition("/")[2] for name in ran] == ["gpt2", "bert", "bert"]
    assert f"is there already: {out}/gpt2" in said
    assert contents(out) == contents(whole[0])


@pytest.mark.slow
def test_other_flags_and_damaged_results_are_run_again(whole, tmp_path, monkeypatch):
    out, ran, run = tmp_path / "out", [], map_zoo.run

    def counted(model, *given, **named):
        ran.append(model.name)
        return run(model, *given, **named)

    monkeypatch.setattr(map_zoo, "run", counted)
    run_in(out, MODELS[:1])
    results = out / "gpt2" / "results.json"
    content = json.loads(results.read_text())
    content["rows"][0]["value"] = 0.5
    results.write_text(json.dumps(content))
    run_in(out, MODELS[:1])
    assert len(ran) == 2
    with pytest.raises(ValueError, match="--overwrite"):
        run_in(out, MODELS[:1], seed=1)


def test_models_of_one_family_stand_together():
    def part(family, name):
        rows = [{"map": "mat", "metric": "kl", "value": 1.0, "n": 3, "target": 4}]
        content = {
            "rows": rows,
            "model_hash": name,
            "text": {},
            "config": {},
            "experiment": "map_zoo",
        }
        return several.Part(family, content)

    parts = {"a": part("gpt2", "a"), "b": part("bert", "b"), "c": part("gpt2", "c")}
    assert [row["model"] for row in several.combined(parts, {}).rows] == ["a", "c", "b"]


@pytest.mark.parametrize(
    ("models", "given", "message"),
    [
        ([MODELS[0], MODELS[0]], {}, "--models has '.*gpt2' twice"),
        ([MODELS[0], ""], {}, "--models has an empty name"),
        ([MODELS[0], "/no/such"], {}, "there is no folder /no/such"),
        (MODELS, {"layers": "5"}, "--layers has '5'; choose from 0, 1, 2, 3"),
        (MODELS, {"model": MODELS[0]}, "names all models: leave out --model"),
    ],
)
def test_flags_are_checked_before_a_model_is_loaded(models, given, message, tmp_path):
    with pytest.raises(ValueError, match=message) as caught:
        run_in(tmp_path / "out", models, **given)
    assert "loading" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_folders_of_one_name_get_numbers():
    with loaded("map_zoo") as module:
        names = module.several_models.folder_names(["a/x", "jmat:y", "b/x"])
    assert names == {"a/x": "x", "jmat:y": "y", "b/x": "x-2"}
