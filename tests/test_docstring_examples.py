"""Every public name, and every study, has an example in its docstring, and the examples
run.
"""

import ast
import doctest
import functools
import inspect
import pathlib

import pytest

import jmat
from jmat import studies

ROOM = pathlib.Path(studies.__file__).parent
# The docstring of `run` of every study, by the study's name; read as text, since to import all of
# them takes long.
STUDIES = {
    path.parent.name if path.name == "study.py" else path.stem: ast.get_docstring(node)
    for path in sorted(ROOM.glob("**/*.py"))
    for node in ast.parse(path.read_text("utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name == "run"
}


@pytest.fixture(scope="module")
def load():
    """Loads each model once, for all examples."""
    return functools.cache(jmat.load)


def check_examples(described, folder, load, monkeypatch):
    """Runs the example in the docstring of something public, in a folder of its own."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(jmat, "load", load)
    text = inspect.getdoc(described)
    example = doctest.DocTestParser().get_doctest(text, {}, described.__name__, None, None)
    assert example.examples
    outcome = doctest.DocTestRunner().run(example)
    assert outcome.failed == 0


@pytest.mark.parametrize("name", jmat.__all__)
def test_a_public_name_has_an_example_that_runs(name, tmp_path, load, monkeypatch):
    check_examples(getattr(jmat, name), tmp_path, load, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
def test_a_study_has_an_example_that_runs(name, tmp_path, load, monkeypatch):
    check_examples(getattr(studies, name).run, tmp_path, load, monkeypatch)


def test_every_study_has_an_example():
    assert {"layer_jump", "r2", "overview", "map_zoo"} <= STUDIES.keys()
    assert [name for name, text in STUDIES.items() if ">>>" not in text] == []
