"""Output folders and result files: nothing mixed up, nothing lost, nothing silently not a number."""

import errno
import json
import pathlib
import re

import jax
import numpy as np
import pytest

from jmat.results import claim_output_folder, format_table, read_results, write_results
from tests.scripts import ROOT

CONFIG = {"model": "tiny", "seed": 0, "maps": ["mat", "id"]}


def _row(**fields):
    return {"map": "mat", "layer": 0, "target": 4, "metric": "r2", "value": 0.5, "n": 9, **fields}


def test_results_come_back_with_what_they_depend_on(tmp_path):
    rows = [_row(value=np.float32(0.25), n=np.int64(9)), _row(value=None, note="no such layer"), _row(ok=True)]
    written = write_results(tmp_path, "r2", CONFIG, rows)
    assert read_results(tmp_path) == written
    assert (written["experiment"], written["config"]) == ("r2", CONFIG)
    assert written["rows"][0] == {**_row(), "value": 0.25}
    environment = written["environment"]
    assert {"jmat", "jax", "jaxlib", "flax", "numpy", "python", "platform", "devices"} <= environment.keys()
    assert environment["jax"] == jax.__version__
    assert environment["devices"] == [f"{jax.device_count()} x cpu"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (_row(value=float("nan")), "row 1 has value = nan"),
        (_row(value=np.float32("inf")), "row 1 has value = inf"),
        (_row(low=float("-inf")), "row 1 has low = -inf"),
        (_row(value=None), "row 1 has no value, and no note"),
        (_row(value=[0.5]), "row 1 is not flat, 'value' is a list"),
        (_row(value=np.ones(2)), "row 1 is not flat, 'value' is a ndarray"),
        ({"map": "mat", "value": 1.0}, "row 1 has no metric"),
    ],
)
def test_bad_rows_are_named_and_nothing_is_written(tmp_path, row, message):
    before = write_results(tmp_path, "r2", CONFIG, [_row()])
    with pytest.raises(ValueError, match=message):
        write_results(tmp_path, "r2", CONFIG, [_row(), row])
    assert read_results(tmp_path) == before


def test_full_disk_keeps_the_old_results(tmp_path, monkeypatch):
    before = write_results(tmp_path, "r2", CONFIG, [_row()])

    def full(path, text, encoding):
        with path.open("w") as file:
            file.write(text[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_text", full)
    with pytest.raises(OSError, match=r"results\.json.*full"):
        write_results(tmp_path, "r2", CONFIG, [_row(), _row()])
    assert read_results(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize("content", ["", '{"rows": [', "[]", "{}"])
def test_damaged_results_are_one_clear_sentence(tmp_path, content):
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(ValueError, match=r"results\.json (is damaged|holds no rows)"):
        read_results(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"results\.json not found"):
        read_results(tmp_path / "elsewhere")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_flag_that_is_no_finite_number_is_named(tmp_path, value):
    with pytest.raises(ValueError, match=rf"--reg_weight={value}: expected a finite number"):
        claim_output_folder(tmp_path / "out", "pretrain", {"reg_weight": value})
    assert not (tmp_path / "out").exists()


def test_a_run_may_come_back_to_its_folder(tmp_path):
    out = tmp_path / "runs" / "r2"
    claim_output_folder(out, "r2", CONFIG)
    assert json.loads((out / "run.json").read_text()) == {"experiment": "r2", "config": CONFIG}
    write_results(out, "r2", CONFIG, [_row()])
    claim_output_folder(out, "r2", {**CONFIG, "maps": ("mat", "id")})  # a tuple is a list to JSON
    assert len(read_results(out)["rows"]) == 1


@pytest.mark.parametrize(
    ("experiment", "config", "message"),
    [
        ("layer_jump", CONFIG, "belongs to experiment r2, this is layer_jump; choose another --out, or --overwrite"),
        ("r2", {**CONFIG, "seed": 1, "maps": []}, r"--maps was \['mat', 'id'\] and is \[\], --seed was 0 and is 1"),
        ("r2", {**CONFIG, "new": 1}, "--new was None and is 1"),
    ],
)
def test_another_runs_folder_is_refused_and_says_why(tmp_path, experiment, config, message):
    claim_output_folder(tmp_path, "r2", CONFIG)
    (tmp_path / "maps.json").write_text("{}")
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(ValueError, match=message):
        claim_output_folder(tmp_path, experiment, config)
    assert (tmp_path / "run.json").read_bytes() == before


def test_overwrite_keeps_what_runs_leave_until_there_are_new_results_and_touches_nothing_else(tmp_path):
    claim_output_folder(tmp_path, "r2", CONFIG)
    for name in ("checkpoints", "model", "replaced"):
        (tmp_path / name).mkdir()
    theirs = {"notes.txt", "mine.png", "replaced"}
    for name in ("results.json", "r2.png", "checkpoints/0", "model/config.json", "maps.safetensors", *theirs):
        if not (tmp_path / name).is_dir():
            (tmp_path / name).write_text("old")
    assert claim_output_folder(tmp_path, "r2", CONFIG, overwrite=True) is None  # the same run goes on
    assert (tmp_path / "checkpoints" / "0").exists()
    aside = claim_output_folder(tmp_path, "layer_jump", {}, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", aside.name, *theirs}
    (tmp_path / "maps.safetensors").write_text("half of new ones: the run failed")
    assert claim_output_folder(tmp_path, "peek", {}, overwrite=True) == aside
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", aside.name, *theirs}
    assert (aside / "maps.safetensors").read_text() == "old"
    assert (aside / "model" / "config.json").read_text() == "old"
    assert json.loads((aside / "run.json").read_text())["experiment"] == "r2"
    claim_output_folder(tmp_path, "peek", {})
    write_results(tmp_path, "peek", {}, [_row()])
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "results.json", *theirs}


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_does_not_write_over_what_it_reads(tmp_path, overwrite):
    out = tmp_path / "out"
    for name in ("model", "elsewhere"):
        (out / name).mkdir(parents=True)
        (out / name / "model.safetensors").write_text("weights")
    (out / "run.json").write_text('{"experiment": "pretrain", "config": {}}')
    for flags in ({"model": str(out / "model")}, {"revisions": ["main", f"{out}/../out/model"]}, {"maps": str(out)}):
        with pytest.raises(ValueError, match=r"lies in the output folder .*: choose another --out"):
            claim_output_folder(out, "prune", flags, overwrite=overwrite)
    assert (out / "model" / "model.safetensors").read_text() == "weights"
    claim_output_folder(out, "prune", {"model": str(out / "elsewhere"), "corpus": "docs"}, overwrite=True)


def test_a_run_that_failed_before_it_wrote_anything_keeps_no_folder(tmp_path):
    claim_output_folder(tmp_path, "r2", CONFIG)
    claim_output_folder(tmp_path, "layer_jump", {"seed": 3})
    assert json.loads((tmp_path / "run.json").read_text()) == {"experiment": "layer_jump", "config": {"seed": 3}}


def test_damaged_claim_needs_overwrite(tmp_path):
    (tmp_path / "run.json").write_text('{"experiment": ')
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(ValueError, match="is damaged"):
        claim_output_folder(tmp_path, "r2", CONFIG)
    claim_output_folder(tmp_path, "r2", CONFIG, overwrite=True)
    claim_output_folder(tmp_path, "r2", CONFIG)


def test_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "log.txt").write_text("the shell redirects output here: no reason to refuse")
    claim_output_folder(tmp_path, "r2", CONFIG)
    model = tmp_path / "gpt2"
    model.mkdir()
    (model / "config.json").write_text("{}")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=r"gpt2 holds config\.json, and no run\.json"):
            claim_output_folder(model, "r2", CONFIG, overwrite=overwrite)
    (tmp_path / "parent" / "model").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"parent holds model, and no run\.json"):
        claim_output_folder(tmp_path / "parent", "r2", CONFIG)


def test_unusable_folder_is_one_clear_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot use .*file/out as output folder: .*; choose another --out"):
        claim_output_folder(tmp_path / "file" / "out", "r2", CONFIG)
    with pytest.raises(ValueError, match=r"cannot use .*file as output folder"):
        claim_output_folder(tmp_path / "file", "r2", CONFIG)


def test_table_has_layers_down_and_metrics_across():
    rows = [
        _row(map=name, layer=layer, metric=metric, value=layer / 10 + (name == "id") / 100, low=0.0, high=1.0)
        for name in ("mat", "id")
        for metric in ("surprisal", "precision@1", "r2")
        for layer in (10, 2, 0)
    ]
    del rows[0]  # mat, surprisal, layer 10
    rows += [{"metric": "r2", "value": 1.0}]  # belongs to no layer: not in this table
    assert format_table(rows, index="layer", columns=("metric", "map"), metrics=("precision@1", "surprisal")) == (
        "       precision@1   surprisal\n"
        "layer    mat     id    mat     id\n"
        "─────────────────────────────────\n"
        "    0  0.000  0.010  0.000  0.010\n"
        "    2  0.200  0.210  0.200  0.210\n"
        "   10  1.000  1.010         1.010"
    )


def test_wide_tables_continue_below():
    rows = [_row(layer=i, target=j, value=float(j - i)) for i in range(3) for j in range(i + 1, 31)]
    text = format_table(rows, index="layer", columns=("target",), metrics=("r2",))
    assert max(map(len, text.splitlines())) <= 100
    heads = [line.split()[3:] for line in text.splitlines() if line.startswith("layer \\ target")]
    assert len(heads) == 3
    assert [int(head) for part in heads for head in part] == list(range(1, 31))


def test_table_shows_intervals_gaps_and_large_numbers():
    rows = [
        _row(value=0.5, low=0.4, high=0.6),
        _row(layer=1, value=None, note="no data"),
        _row(layer=2, value=123456),
    ]
    lines = format_table(rows, columns=("map",), intervals=True).splitlines()
    assert lines[2].split(maxsplit=1)[1] == "0.500 [0.400, 0.600]"
    assert lines[3].split() == ["1", "-"]
    assert lines[4].split() == ["2", "1.23e+05"]
    assert format_table([]) == "(no rows to show)"


def test_every_figure_that_a_script_draws_is_one_that_overwriting_replaces(tmp_path):
    scripts = (ROOT / "experiments").glob("*.py")
    figures = {name for script in scripts for name in re.findall(r"\b\w+\.png", script.read_text("utf-8"))}
    assert len(figures) > 10
    (tmp_path / "run.json").write_text('{"experiment": "r2", "config": {}}')
    for name in figures:
        (tmp_path / name).write_text("old")
    aside = claim_output_folder(tmp_path, "layer_jump", {}, overwrite=True)
    assert {path.name for path in aside.iterdir()} == figures | {"run.json"}
