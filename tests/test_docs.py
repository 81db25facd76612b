"""The documentation: its code runs, its commands exist, its numbers and names are those
of the project.
"""

import ast
import functools
import pathlib
import re
import tomllib

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest

import jmat
from jmat.studies.overview.claims import CLAIMS
from jmat.studies.overview.options import STUDIES

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {
    str(path.relative_to(DOCS)): path.read_text("utf-8") for path in sorted(DOCS.rglob("*.md"))
}
PAGES |= {name: (ROOT / name).read_text("utf-8") for name in ("CHANGELOG.md", "CONTRIBUTING.md")}


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE)


WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]
QUICK = ("add_study.md",)  # pages that take less than two seconds
# pages that need an extra which the tests do not have
EXTRAS = {"recipes/lm_eval.md": pytest.mark.lm_eval}


@functools.cache
def load(name):
    return LOAD(name)


LOAD = jmat.load


@pytest.mark.parametrize(
    "page",
    [
        page if page in QUICK else pytest.param(page, marks=EXTRAS.get(page, pytest.mark.slow))
        for page in WITH_PYTHON
    ],
)
def test_python_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    """All blocks of a page, one after another, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        jmat, "load", lambda name: load(name) if name in ("gpt2-docs", "bert-docs") else LOAD(name)
    )
    names = {"__name__": f"docs.{page}"}
    with mpl.rc_context({"backend": "agg"}):
        for code in blocks(page, "python"):
            exec(compile(code, page, "exec"), names)
    plt.close("all")
    assert capsys.readouterr().out.strip()


def test_commands_of_the_pages_exist():
    """Every script that a page names is there, and has the flags that it is given."""
    found = set()
    for page, text in PAGES.items():
        for name, rest in re.findall(
            r"python -m experiments\.(\w+)([^`|\n]*(?:\\\n[^`|\n]*)*)", text
        ):
            # a step's flags, in quotes
            for script, flags in re.findall(r"--(pretrain)='([^']*)'", rest):
                found |= {(page, script, flag) for flag in re.findall(r"--(\w+)", flags)}
            for flag in re.findall(r"--(\w+)", re.sub(r"'[^']*'", "", rest)):
                found.add((page, name, flag))
            assert (ROOT / "experiments" / f"{name}.py").exists(), (
                f"{page} names experiments.{name}"
            )
    assert len(found) > 20
    for page, name, flag in found:
        assert flag in {"help", *_flags(name)}, f"{page}: experiments.{name} has no flag --{flag}"


@functools.cache
def _flags(module):
    """Returns the flags that a script defines, with those of the modules of
    `experiments` that it imports.
    """
    path = ROOT / "experiments" / f"{module}.py"
    if not path.exists():
        return frozenset()
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and re.match(
            r"(flags\.)?(DEFINE_|define_|files_flag)", ast.unparse(node.func)
        ):
            names |= {each.value for each in node.args[:1] if isinstance(each, ast.Constant)}
        elif isinstance(node, ast.ImportFrom) and node.module == "experiments":
            names |= {flag for alias in node.names for flag in _flags(alias.name)}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("experiments."):
            names |= _flags(node.module.removeprefix("experiments."))
    return frozenset(names)


def test_numbers_of_the_papers_page_are_those_of_the_results():
    numbers = re.findall(r"(?<![\w.])\d+\.\d+(?![\d.])", PAGES["papers.md"])
    assert len(numbers) > 20
    results = re.findall(r"(?<![\w.])\d+\.\d+(?!\d|\.\d)", PAGES["results.md"])
    assert set(numbers) - set(results) <= {"2303.09435", "2405.12250"}


def test_the_reference_has_every_public_name():
    listed = set(re.findall(r"^::: jmat\.(\w+)$", PAGES["reference.md"], re.MULTILINE))
    assert listed == {*jmat.__all__} - {"studies"}


def test_the_reference_has_every_study():
    files = [
        *(ROOT / "jmat" / "studies").glob("*.py"),
        *(ROOT / "jmat" / "studies").glob("*/study.py"),
    ]
    studies = {
        file.parent.name if file.stem == "study" else file.stem for file in files if _is_study(file)
    }
    assert len(studies) > 10
    for study in studies:
        for name in ("run", "Options"):
            assert f"::: jmat.studies.{study}.{name}\n" in PAGES["reference.md"], study


def _is_study(file):
    return re.search(r"^def run\(", file.read_text("utf-8"), re.MULTILINE) is not None


def test_pages_are_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2]
    for page in PAGES.keys() - {"CHANGELOG.md", "CONTRIBUTING.md"}:
        assert re.search(rf" {re.escape(page)}$", nav, re.MULTILINE), page


def test_versions_of_citation_and_changelog_agree():
    versions = re.findall(r"^## (\d+\.\d+\.\d+)", PAGES["CHANGELOG.md"], re.MULTILINE)
    assert (
        re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.MULTILINE)
        == versions[:1]
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["version"] in versions


def test_sentences_are_short():
    """Under 18 words on average, on each page."""
    for page in PAGES.keys() - {"changelog.md", "contributing.md"}:
        sentences = _sentences(PAGES[page])
        assert sum(sentences) / len(sentences) < 18, page


def _sentences(text):
    """Returns the numbers of words of the sentences of a page, without its code, tables
    and headings.
    """
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^\s*(\||#|:::|\[\S+\]:).*$", ".", text, flags=re.MULTILINE)
    text = re.sub(
        r"^\s*([-*]|\d+\.) |\n\n", ". ", re.sub(r"\]\([^)]*\)", "]", text), flags=re.MULTILINE
    )
    lengths = [len(sentence.split()) for sentence in re.split(r"[.?!](?:\s|$)", text)]
    return [length for length in lengths if length > 2]


def test_the_report_page_has_every_claim_with_its_rule():
    page = PAGES["report.md"]
    for claim in CLAIMS:
        assert f"| {claim.statement} | {claim.rule} |\n" in page, claim.statement
    for study in STUDIES:
        assert f"| `{study}` |" in page, study


def test_links_to_notebooks_lead_to_their_pages():
    """GitHub follows them to the notebooks; on the site a page stands in their place."""
    text = (DOCS / "assets" / "notebook_pages.py").read_text("utf-8")
    (pattern,) = re.findall(r're\.sub\(r"(\(.*ipynb.*?)", r"', text)
    links = "[a](notebooks/x.ipynb), [b](../y.ipynb#top), `z.ipynb`, [c](w.md)"
    expected = "[a](notebooks/x.md), [b](../y.md#top), `z.ipynb`, [c](w.md)"
    assert re.sub(pattern, r"\1.md", links) == expected
