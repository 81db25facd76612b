"""Notebooks of the documentation run, and hold outputs that can be exported; models,
results and bars show in one.
"""

import json
import pathlib
import re
import sys
import types

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest

from jmat.report.results import Results
from jmat.report.tables import format_table
from jmat.runtime import progress

NOTEBOOKS = sorted((pathlib.Path(__file__).parent.parent / "docs" / "notebooks").glob("*.ipynb"))
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def cells(path, kind="code"):
    return [
        cell for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == kind
    ]


def outputs(path):
    """Returns each output of a notebook: its type and text, images as they are."""
    for output in (output for cell in cells(path) for output in cell["outputs"]):
        data = (
            {"text/plain": output["text"]}
            if "text" in output
            else output.get("data", {"error": ""})
        )
        yield from ((kind, "".join(content)) for kind, content in data.items())


def test_all_notebooks_are_there():
    assert {path.stem for path in NOTEBOOKS} == {
        "first_look",
        "generation",
        "kinds_of_maps",
        "own_model_and_text",
        "patching_and_steering",
        "pruning",
    }


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_of_a_notebook_can_be_exported(path):
    kinds = dict(outputs(path))
    assert {"text/html", "image/png"} <= kinds.keys()
    assert "error" not in kinds
    for kind, content in outputs(path):
        assert not CONTROL.search(content), content
        assert kind == "image/png" or not re.search(
            r"/tmp/|/home/|/work/|site-packages|Warning", content
        ), content
    assert all(cell["execution_count"] for cell in cells(path))
    header = "".join(cells(path)[0]["source"]).splitlines()
    assert "Colab" in header[0]
    assert "TPU" in header[0]
    assert all(line.startswith("#") for line in header)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    """All cells, one after another, in an empty folder. `python -m tests.notebooks
    --check` runs them in a kernel.
    """
    monkeypatch.chdir(tmp_path)
    names = {"__name__": path.stem}
    with mpl.rc_context({"backend": "agg"}):
        for cell in cells(path):
            code = re.sub(r"^%.*$", "", "".join(cell["source"]), flags=re.MULTILINE)
            exec(compile(code, path.name, "exec"), names)
    plt.close("all")


def test_a_model_shows_in_a_notebook(gpt2, monkeypatch):
    assert repr(gpt2) in gpt2._repr_html_()
    monkeypatch.setattr(gpt2, "name", "<b>\x1b[31m&")
    page = gpt2._repr_html_()
    assert r"&lt;b&gt;\x1b[31m&amp;: causal language model" in page
    assert "\x1b" not in page


def test_results_show_in_a_notebook():
    rows = [
        {"map": "<i>\x1b", "metric": "kl", "value": k / 2, "n": 9, "layer": k} for k in range(1200)
    ]
    results = Results("layer_jump", rows, {"model": "<u>"}, tables=format_table)
    page = results._repr_html_()
    assert page.startswith("<div><b>layer_jump</b> of &lt;u&gt;: 1,200 rows</div><pre ")
    assert r"&lt;i&gt;\x1b" in page
    assert "599.500" in page
    assert not re.search(r"<i>|<u>|\x1b", page)
    assert Results("own", [], {})._repr_html_().startswith("<div><b>own</b>: 0 rows</div>")


class ZMQInteractiveShell:
    """Stands for the shell of a notebook."""


@pytest.fixture
def shown(monkeypatch):
    """A notebook in which nothing but `display` works; returns all states of its
    outputs.
    """
    states = []

    class Handle:
        def update(self, value):
            states[-1].append(value)

    def display(value, *, display_id):
        assert display_id is True
        states.append([value])
        return Handle()

    ipython, module = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    ipython.get_ipython = ZMQInteractiveShell
    module.HTML, module.display = str, display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr(progress, "_PAUSE", -1.0)
    return states


def test_a_bar_in_a_notebook_is_one_output(shown, capsys):
    assert list(progress.track("abc", "fit <b>\x1b")) == ["a", "b", "c"]
    (states,) = shown
    assert [re.search(r"(\d) of 3", state)[0] for state in states] == [
        f"{k} of 3" for k in (0, 1, 2, 3, 3)
    ]
    assert r"fit &lt;b&gt;\x1b: " in states[-1]
    assert '<progress value="3" max="3">' in states[-1]
    assert capsys.readouterr() == ("", "")


def test_a_bar_in_a_notebook_needs_no_total(shown):
    assert list(progress.track(iter("ab"), "fit")) == ["a", "b"]
    assert list(progress.track(iter("ab"), "fit", total=2)) == ["a", "b"]
    assert re.fullmatch(r"<div>fit: 2, \d\.\d s</div>", shown[0][-1])
    assert "fit: 2 of 2, " in shown[1][-1]


def test_a_bar_that_is_left_early_keeps_its_count(shown):
    for item in progress.track(range(9), "fit"):
        if item == 4:
            break
    assert "fit: 5 of 9, " in shown[0][-1]


def test_no_bar_without_words(shown):
    assert list(progress.track("ab", None)) == ["a", "b"]
    assert not shown
