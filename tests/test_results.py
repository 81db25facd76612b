"""Result files: nothing lost, nothing silently not a number; and tables of them."""

import errno
import json
import os
import pathlib
import platform

import jax
import numpy as np
import pytest

from jmat.maps.files import MAPS_FILES, MapsInfo
from jmat.report.results import Results, read_results, write_results
from jmat.report.tables import format_table

CONFIG = {"model": "tiny", "seed": 0, "maps": ["mat", "id"]}


def _row(**fields):
    return {"map": "mat", "layer": 0, "target": 4, "metric": "r2", "value": 0.5, "n": 9, **fields}


def test_every_file_is_announced_before_it_is_written(tmp_path):
    announced = {}
    files = {
        ("a.html", "a.json"): lambda folder: [
            (folder / name).touch() for name in ("a.html", "a.json")
        ]
    }
    info = MapsInfo("tiny", "hash", "din2023", "docs", 9, 0, "float32")
    results = Results("r2", [_row()], CONFIG, maps_info=info, files=files)
    written = results.save(
        tmp_path, before=lambda name: announced.update({name: (tmp_path / name).exists()})
    )
    assert announced == dict.fromkeys(("a.html", "a.json", *MAPS_FILES), False)
    assert (
        set(written) == {"results.json", *announced} == {path.name for path in tmp_path.iterdir()}
    )


def test_results_come_back_with_what_they_depend_on(tmp_path):
    rows = [
        _row(value=np.float32(0.25), n=np.int64(9)),
        _row(value=None, note="no such layer"),
        _row(ok=True),
    ]
    written = write_results(tmp_path, "r2", CONFIG, rows)
    assert read_results(tmp_path) == written
    assert (written["experiment"], written["config"]) == ("r2", CONFIG)
    assert written["rows"][0] == {**_row(), "value": 0.25}
    environment = written["environment"]
    assert {
        "jmat",
        "jax",
        "jaxlib",
        "flax",
        "numpy",
        "python",
        "platform",
        "devices",
    } <= environment.keys()
    assert environment["jax"] == jax.__version__
    processor, _, cores = environment["cpu"].rpartition(", ")
    assert cores == f"{os.cpu_count()} cores"
    listed = pathlib.Path("/proc/cpuinfo")
    assert processor
    assert not listed.exists() or processor in listed.read_text() or processor in platform.uname()
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


def test_a_changed_figure_is_noticed(tmp_path):
    write_results(tmp_path, "r2", CONFIG, [_row(value=0.8127, token="é")])
    path = tmp_path / "results.json"
    content = path.read_text("utf-8")
    path.write_text(content.replace("0.8127", "0.8627"), "utf-8")
    with pytest.raises(ValueError, match="its rows are not those that were written"):
        read_results(tmp_path)
    path.write_text(content.replace("\n", ""), "utf-8")  # the layout does not matter
    assert read_results(tmp_path)["rows"][0]["value"] == 0.8127
    older = json.loads(content)
    del older["rows_sha256"]
    path.write_text(json.dumps(older), "utf-8")
    assert len(read_results(tmp_path)["rows"]) == 1


def test_table_has_layers_down_and_metrics_across():
    rows = [
        _row(
            map=name,
            layer=layer,
            metric=metric,
            value=layer / 10 + (name == "id") / 100,
            low=0.0,
            high=1.0,
        )
        for name in ("mat", "id")
        for metric in ("surprisal", "precision@1", "r2")
        for layer in (10, 2, 0)
    ]
    del rows[0]  # mat, surprisal, layer 10
    rows += [{"metric": "r2", "value": 1.0}]  # belongs to no layer: not in this table
    assert format_table(
        rows, index="layer", columns=("metric", "map"), metrics=("precision@1", "surprisal")
    ) == (
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
