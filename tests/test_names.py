"""Names that jmat knows against files and folders of the same name; names that are
empty; links that lead nowhere.
"""

import pathlib

import pytest

from jmat.checkpoint.load import bundled, find
from jmat.data import corpus
from jmat.data.corpus import fit_eval, load_corpus, named_corpus
from jmat.studies.tasks import read_task
from tests import inside


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_folder_of_a_bundled_name_is_not_guessed():
    bundled_one = find("gpt2-docs")
    folder = pathlib.Path("gpt2-docs")
    folder.mkdir()
    (folder / "results.json").touch()
    assert find("gpt2-docs") == bundled_one  # nothing there could be meant
    for name in ("config.json", "model.safetensors", "adapter_config.json"):
        (folder / name).touch()
        with pytest.raises(
            ValueError,
            match=r"'gpt2-docs' is both a model .*write \./gpt2-docs .*or jmat:gpt2-docs",
        ):
            find("gpt2-docs")
        (folder / name).unlink()
    (folder / "config.json").touch()
    assert find("./gpt2-docs") == folder
    assert find(folder) == folder  # a path is a path
    assert find("jmat:gpt2-docs") == bundled_one
    assert find("bert-docs") == bundled_one.with_name("bert-docs")


def test_a_bundled_model_is_found_in_its_own_folder(monkeypatch):
    expected = find("gpt2-docs")
    monkeypatch.chdir(expected.parent)
    assert find("gpt2-docs") == expected


def test_a_file_of_the_name_of_a_corpus_is_not_guessed(monkeypatch):
    monkeypatch.setitem(corpus.NAMED, "docs", lambda: ["From the corpus."])
    assert load_corpus("docs") == ["From the corpus."]
    pathlib.Path("docs").mkdir()
    assert load_corpus("docs") == ["From the corpus."]  # a folder is no corpus
    pathlib.Path("docs").rmdir()
    pathlib.Path("docs").write_text("From the file.\n")
    for read in (load_corpus, named_corpus, lambda name: fit_eval(name, 1, 1, 0)):
        with pytest.raises(
            ValueError,
            match=r"'docs' is both a corpus .*write \./docs for .*or jmat:docs for jmat's",
        ):
            read("docs")
    assert load_corpus("./docs") == load_corpus(pathlib.Path("docs")) == ["From the file."]
    assert load_corpus("jmat:docs") == ["From the corpus."]
    pathlib.Path("wikipedia").touch()
    with pytest.raises(ValueError, match="'wikipedia' is both a corpus"):
        fit_eval("wikipedia", 1, 1, 0)
    assert named_corpus("jmat:wikipedia") == "wikipedia"
    with pytest.raises(ValueError, match="jmat has no corpus 'books'; it has docs, "):
        load_corpus("jmat:books")


def test_a_file_of_the_name_of_a_task_is_not_guessed():
    pathlib.Path("arc_easy").touch()
    with pytest.raises(ValueError, match="'arc_easy' is both a task"):
        read_task("arc_easy")


def test_names_that_are_empty():
    for name in ("", "  "):
        with pytest.raises(
            ValueError,
            match="the name of the model is empty; expected bert-docs, gpt2-docs, or a path",
        ):
            find(name)
        with pytest.raises(ValueError, match="the name of the corpus is empty"):
            load_corpus(name)
    with pytest.raises(ValueError, match="jmat has no model 'gpt3'; it has bert-docs, gpt2-docs"):
        find("jmat:gpt3")
    for flag in ("model", "corpus", "examples", "revision"):
        with pytest.raises(ValueError, match=rf"--{flag} is empty|the name of the {flag} is empty"):
            inside.call("layer_jump", **{flag: ""})


def test_links_that_lead_nowhere_and_homes_that_are_not_there():
    pathlib.Path("a").symlink_to("b")
    pathlib.Path("b").symlink_to("a")
    with pytest.raises(FileNotFoundError, match="a is a symbolic link that leads nowhere"):
        find("a")
    with pytest.raises(FileNotFoundError, match="'a' is neither a name"):
        load_corpus("a")
    with pytest.raises(FileNotFoundError, match="there is no folder ~nobody-of-this-name/x"):
        find("~nobody-of-this-name/x")
    assert bundled() == ["bert-docs", "gpt2-docs"]
