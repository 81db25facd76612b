"""README's figures come out of README's commands, under the versions of
requirements.lock.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from jmat.data.corpus import README_DOCS

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def table(heading):
    """Rows of the table that follows a text: first cell → the others."""
    lines = README[README.index(heading) :].splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("|"))
    rows = {}
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        rows[name] = cells
    return rows


def test_the_lock_has_an_exact_version_for_all_that_jmat_needs():
    lines = (ROOT / "requirements.lock").read_text("utf-8").splitlines()
    pins = dict(
        re.fullmatch(r"([a-z0-9._-]+)==(\S+)", line).groups() for line in lines if line[0] != "#"
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = [
        *project["dependencies"],
        *(r for extra in project["optional-dependencies"].values() for r in extra),
    ]
    assert len(wanted) > 20
    for requirement in map(Requirement, wanted):
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_readme_names_the_text_of_its_figures():
    assert f"`{README_DOCS}`" in README


@pytest.mark.slow
def test_readme_rows_come_out_again(tmp_path):
    """Every digit that README prints; with the text of other versions, all within the
    intervals.
    """
    clean = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    flags = ["--model=gpt2-docs", f"--out={tmp_path}"]
    command = [sys.executable, "-m", "experiments.layer_jump", *flags]
    subprocess.run(command, check=True, cwd=ROOT, env=clean, capture_output=True)
    results = json.loads((tmp_path / "results.json").read_text())
    printed = table("(precision@1)")
    same_text = results["text"]["corpus"] == README_DOCS
    for column, name in enumerate(("mat", "id")):
        rows = [r for r in results["rows"] if (r["map"], r["metric"]) == (name, "precision@1")]
        rows = [row for row in rows if row["layer"] < row["target"]]
        assert len(rows) == len(printed) == 8
        for row in rows:
            cell = printed[str(row["layer"])][column]
            assert row["n"] == 3000
            if same_text:
                assert f"{row['value']:.2f} [{row['low']:.2f}, {row['high']:.2f}]" == cell, row
            else:
                assert row["low"] - 0.005 <= float(cell.split()[0]) <= row["high"] + 0.005, row
