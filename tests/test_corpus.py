import collections
import importlib.metadata
import pathlib
import warnings

import pytest

from jmat.data import corpus, splitting
from jmat.data.corpus import docs_sentences, fit_eval, load_corpus, text_sentences
from jmat.data.docstrings import sentences
from jmat.data.splitting import split
from jmat.runtime.cache import cache_folder

DATA = pathlib.Path(__file__).parent / "data"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own."""
    monkeypatch.setenv("JMAT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(path, *lines):
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def numbered(num, word="line"):
    """Sentences whose letters differ."""
    letters = [chr(97 + n // 676) + chr(97 + n // 26 % 26) + chr(97 + n % 26) for n in range(num)]
    return [f"This is the {word} of text that is called {name}." for name in letters]


# Docstring → sentences


def test_numpy_docstring_becomes_prose():
    assert list(sentences((DATA / "docstrings.txt").read_text("utf-8"))) == [
        "Compute the running mean of an array along one axis.",
        "Uses cumsum, which is much faster than a loop.",
        "See the guide for the details of the method.",
        "Values such as None or 'nan' are skipped, e.g. The ones in the first row, cf. Smith et "
        "al. They count as 0.",
        "The work of J. Smith and others is used here.",
        "It is not changed by the call.",
        "The result is a new array in every case.",
        "The array whose mean is computed.",
        "The axis along which the mean is taken.",
        "Its default is the last one of the array.",
        "An array of the same shape as the input.",
        "The example above shows how the function is used.",
        "It is the end of the example.",
    ]


def test_google_and_hugging_face_docstrings_become_prose():
    docstring = """Reads the table of all the values.

    Args:
        path (`str`, *optional*, defaults to `None`): the path to
            the file that is read.
        num_rows: How many rows are read from the file.
        **kwargs: Passed on to the reader of the file.

    Returns:
        The table: all the values that are in the file.

    ```python
    This is code in a fence, and not the prose of a person.
    ```
    """
    assert list(sentences(docstring)) == [
        "Reads the table of all the values.",
        "The path to the file that is read.",
        "How many rows are read from the file.",
        "Passed on to the reader of the file.",
        "The table: all the values that are in the file.",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "The value of it.",  # too short
        "It is a word and so on" + " and on" * 30 + ".",  # too long
        "the sentence starts with a lower-case letter.",
        "The sentence has no full stop at the end",
        "The value is x[0] = {1} for all of the keys.",
        "The value of arg_a is here.",  # an identifier in so short a sentence
        "Retourne la valeur de tous les arguments de cette fonction.",
        "Renvoie la même valeur que la fonction dans le cas où elle est a.",
        "This sentence of the text is (not closed.",
        "The page is at www.example.org for all of the readers.",
        "TODO this is to be done by one of us.",
        "THIS SOFTWARE IS PROVIDED AS IS AND IN NO EVENT IS IT OURS.",
        "| The cell of the table | is in the row of it. |",
    ],
)
def test_what_is_no_clean_sentence_is_dropped(text):
    assert list(sentences(text)) == []
    assert list(sentences("It is followed by the next one.\n\n" + text)) == [
        "It is followed by the next one."
    ]


# docs


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A folder of Python files that stands for all that is installed; returns how often
    it was read.
    """
    folder = tmp_path / "package"
    folder.mkdir()
    write(
        folder / "good.py",
        '"""This is the docstring of the module."""',
        "class A:",
        '    """This is the docstring of the class. This is not the end of it."""',
        "    def f(self):",
        '        """This is the docstring of the module! It is here a second time."""',
        "        if True:",
        "            async def g():",
        '                """It is here for the third time. It is in a function of a function."""',
        '        "This string is not the docstring of any function."',
        "raise SystemError('imported')",
    )
    write(
        folder / "escape.py", '"""This docstring has \\d in it. It is not a raw string at all."""'
    )
    write(folder / "broken.py", '"""This is the docstring of a broken module."""', "def")
    (folder / "latin.py").write_bytes(b'"""This is the docstring of \xe9 in Latin text."""')
    (folder / "null.py").write_bytes(b'"""This is the docstring of a null byte."""\0')
    reads = []
    monkeypatch.setattr(corpus, "_dependencies", dict)
    monkeypatch.setattr(
        corpus,
        "_python_files",
        lambda _: reads.append(1) or [*sorted(folder.glob("*.py")), folder / "gone.py"],
    )
    return reads


FOUND = {
    "This is the docstring of the module.",
    "This is the docstring of the class.",
    "This is not the end of it.",
    "It is here a second time.",
    "It is here for the third time.",
    "It is in a function of a function.",
    "It is not a raw string at all.",
}


def test_docs_reads_docstrings_without_importing(package):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = docs_sentences()
    assert {s.replace("!", ".") for s in found} == FOUND
    assert len(found) == len(FOUND)  # "module." and "module!" have the same letters
    assert found == sorted(found, key=splitting.digest)


def test_docs_is_kept_in_the_cache_folder(package, cache, monkeypatch):
    first = docs_sentences()
    (file,) = cache.iterdir()
    assert text_sentences(file) == first
    assert docs_sentences() == first
    assert len(package) == 1
    monkeypatch.setattr(corpus.platform, "python_version", lambda: "4.0.0")
    assert docs_sentences() == first
    assert len(package) == 2
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"\xff",
        lambda content: content[: len(content) // 2],
        lambda content: b"This is other text in its place.\n",
        lambda content: content[:20] + bytes(40) + content[60:],
        lambda content: content.replace(b"docstring", b"docstrinG", 1),
        lambda content: b"",
    ],
)
def test_a_damaged_cache_is_reported_and_made_anew(package, cache, caplog, damage):
    first = docs_sentences()
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert docs_sentences() == first
    assert len(package) == 2
    assert [f"{file} is damaged" in record.getMessage() for record in caplog.records] == [True]
    assert file.read_bytes() == whole
    assert docs_sentences() == first
    assert len(package) == 2


def test_an_unwritable_cache_folder_is_no_error(package, tmp_path, monkeypatch):
    monkeypatch.setenv("JMAT_CACHE", str(write(tmp_path / "file", "in the way") / "cache"))
    assert docs_sentences() == docs_sentences()
    assert len(package) == 2


def test_the_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder().name == "cache"
    monkeypatch.delenv("JMAT_CACHE")
    assert cache_folder() == pathlib.Path("/xdg/jmat")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == pathlib.Path("/home/me/.cache/jmat")


class Installed(importlib.metadata.Distribution):
    """A distribution that needs others."""

    def __init__(self, *requirements):
        self.text = "".join(f"Requires-Dist: {requirement}\n" for requirement in requirements)

    def read_text(self, filename):
        return self.text if filename == "METADATA" else None

    def locate_file(self, path):
        raise NotImplementedError


def test_dependencies_are_closed_over_without_extras(monkeypatch):
    installed = {
        "jmat": Installed("A.b>=1", "c; python_version < '3'", "d[x]; extra == 'hub'"),
        "a-b": Installed("e", "missing"),
        "e": Installed("A_B", "f ; extra == 'test'"),
        "c": Installed(),
        "d": Installed(),
        "f": Installed(),
    }

    def distribution(name):
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(corpus.importlib.metadata, "distribution", distribution)
    assert set(corpus._dependencies()) == {"a-b", "e"}
    del installed["jmat"]  # never installed: the direct dependencies are known by name
    installed["jax"] = Installed("c")
    assert set(corpus._dependencies()) == {"jax", "c"}


def test_files_of_tests_and_copies_are_skipped():
    kept = [
        "json/decoder.py",
        "doctest.py",
        "unittest/mock.py",
        "numpy/ma/core.py",
        "transformers/trainer.py",
    ]
    skipped = [
        "test/a.py",
        "numpy/ma/tests/b.py",
        "idlelib/c.py",
        "a/_vendor/d.py",
        "test_e.py",
        "a/f_test.py",
    ]
    skipped += [
        "transformers/models/bert/modeling_bert.py",
        "a_pb2.py",
        "a/conftest.py",
        "testing_utils.py",
    ]
    assert [name for name in kept + skipped if not corpus._SKIPPED.fullmatch(name)] == kept


def test_real_docstrings_read_well():
    """On the package this is about: every sentence ends, few hold an identifier."""
    files = [path for path in corpus._python_files([]) if path.parent.name in {"logging", "json"}]
    found = {s for path in files for text in corpus._docstrings(path) for s in sentences(text)}
    assert len(found) > 200
    assert all(s[0].isupper() and s.isascii() and 5 <= len(s.split()) <= 60 for s in found)
    assert sum("_" in s for s in found) < 0.15 * len(found)


# Text files


def test_text_file_has_one_sentence_a_line(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes("\ufeffFirst one.\r\n\n  Zweiter Satz: Größe.  \n\u2028 \n12 %".encode())
    assert (
        text_sentences(path)
        == load_corpus(str(path))
        == ["First one.", "Zweiter Satz: Größe.", "12 %"]
    )


def test_text_files_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no text file .*missing\.txt"):
        text_sentences(tmp_path / "missing.txt")
    with pytest.raises(ValueError, match="is not a file"):
        text_sentences(tmp_path)
    with pytest.raises(ValueError, match="holds no text"):
        text_sentences(write(tmp_path / "empty.txt", "", " "))
    (tmp_path / "latin.txt").write_bytes(b"Gr\xf6\xdfe")
    with pytest.raises(ValueError, match=r"not UTF-8 text \(byte 2 is invalid\)"):
        text_sentences(tmp_path / "latin.txt")
    with pytest.raises(
        FileNotFoundError, match=r"'no such name' is neither a name \(docs, .*\) nor a text file"
    ):
        load_corpus("no such name")


def test_docs_is_a_name(package):
    assert load_corpus("docs") == docs_sentences()


# Splits


def test_split_shares():
    parts = split(numbered(8000))
    shares = {name: len(part) / 8000 for name, part in parts.items()}
    assert shares == pytest.approx({"train": 0.78, "fit": 0.155, "eval": 0.065}, abs=0.015)
    assert sorted(s for part in parts.values() for s in part) == numbered(8000)


def test_a_sentence_never_changes_sides():
    """Whatever else is there, in whatever order, and however it is spelled: only its
    letters count.
    """
    side = {s: name for name, part in split(numbered(500)).items() for s in part}
    assert {
        s: name for name, part in split(numbered(500)[::-3]).items() for s in part
    }.items() <= side.items()
    for variant in (
        lambda s: s.upper(),
        lambda s: s.replace(" ", ", 12  "),
        lambda s: f"({s[:-1]})!",
    ):
        assert all(variant(s) in split([variant(s)])[side[s]] for s in side)
    # The hash itself is a promise to the bundled models: these places must stay.
    assert collections.Counter(side.values()) == {"train": 373, "fit": 97, "eval": 30}


def test_fit_eval_of_docs_leaves_out_what_models_were_trained_on(monkeypatch):
    parts = split(numbered(1000))
    monkeypatch.setitem(corpus.NAMED, "docs", lambda: numbered(1000))
    fit, held_out = fit_eval("docs", 50, 20, seed=0)
    assert (len(fit), len(held_out)) == (50, 20)
    assert set(fit) < set(parts["fit"])
    assert set(held_out) < set(parts["eval"])
    assert fit_eval("docs", 50, 20, seed=0) == (fit, held_out)
    others = fit_eval("docs", 50, 20, seed=1)
    assert others[0] != fit
    assert others[1] != held_out


def test_fit_eval_hardly_changes_with_a_few_other_sentences(monkeypatch):
    monkeypatch.setitem(corpus.NAMED, "docs", lambda: numbered(1000))
    before = fit_eval("docs", 50, 20, seed=0)
    gone = {before[0][3], before[1][7]}
    monkeypatch.setitem(corpus.NAMED, "docs", lambda: [s for s in numbered(1000) if s not in gone])
    after = fit_eval("docs", 50, 20, seed=0)
    for old, new in zip(before, after, strict=True):
        assert new[:-1] == [s for s in old if s not in gone]


@pytest.mark.parametrize("read", [load_corpus, lambda name: fit_eval(name, 50, 20, seed=0)])
def test_docs_of_other_versions_is_said_in_one_line(monkeypatch, caplog, read):
    monkeypatch.setitem(corpus.NAMED, "docs", lambda: numbered(1000))
    read("docs")
    (message,) = [record.getMessage() for record in caplog.records]
    assert "is not the text of README's figures" in message
    assert corpus.sentences_fingerprint(numbered(1000)) in message
    assert "\n" not in message
    caplog.clear()
    monkeypatch.setattr(corpus, "README_DOCS", corpus.sentences_fingerprint(numbered(1000)))
    read("docs")
    assert not caplog.records


def test_the_fingerprint_of_sentences_sees_every_change():
    sentences = numbered(5)
    others = [
        sentences[:4],
        sentences[::-1],
        [*sentences[:4], ""],
        ["".join(sentences[:2]), *sentences[2:]],
    ]
    assert len({corpus.sentences_fingerprint(text) for text in (sentences, *others)}) == 5
    assert corpus.sentences_fingerprint(["a"]) == "ffe9aaeaa2a2d504"  # of b"a\0"


def test_fit_eval_of_a_text_uses_all_of_it_once(tmp_path):
    path = write(tmp_path / "text.txt", *numbered(80), *(s.upper() for s in numbered(80)))
    fit, held_out = fit_eval(path, 60, 20, seed=0)
    assert len({s.casefold() for s in fit + held_out}) == 80 == len(fit + held_out)
    # the seed reorders; the hash divides
    assert sorted(fit_eval(path, 60, 20, seed=5)[0]) == sorted(fit)
    assert len(fit_eval(path, 10, 5, seed=0)[0]) == 10


def test_texts_of_the_same_letters_are_divided_together_in_whatever_order():
    texts = [sentence for each in numbered(40) for sentence in (each, each.upper(), f"{each} 7!")]
    fit, held_out = splitting.divide(texts, 3, 1)
    assert (len(fit), len(held_out)) == (90, 30)
    letters = [{splitting.letters(text) for text in part} for part in (fit, held_out)]
    assert not letters[0] & letters[1]
    assert splitting.divide(reversed(texts), 3, 1) == (fit, held_out)
    same = [f"number {i}" for i in range(40)]  # all have the same letters
    assert splitting.divide(reversed(same), 3, 1) == splitting.divide(same, 3, 1)


def test_fit_eval_refuses_too_few_sentences(tmp_path, monkeypatch):
    path = write(tmp_path / "text.txt", *numbered(80))
    with pytest.raises(
        ValueError, match=r"80 distinct sentences .*: 60 .* 20 .* use --num_fit=60 --num_eval=20"
    ):
        fit_eval(path, 9000, 3000, seed=0)
    assert len(fit_eval(path, 60, 20, seed=0)[0]) == 60  # what the message says works
    with pytest.raises(ValueError, match="num_eval=0: both must be at least 1"):
        fit_eval(path, 60, 0, seed=0)
    with pytest.raises(ValueError, match="holds no text"):
        fit_eval(write(tmp_path / "empty.txt", ""), 60, 20, seed=0)
    monkeypatch.setitem(corpus.NAMED, "docs", lambda: numbered(100))
    with pytest.raises(
        ValueError, match=r"corpus docs has 100 distinct sentences .* use --num_fit="
    ):
        fit_eval("docs", 60, 1, seed=0)
