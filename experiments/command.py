"""Runs an experiment by its name: `jmat layer_jump --model=gpt2` is `python -m
experiments.layer_jump --model=gpt2`.
"""

import difflib
import importlib.metadata
import pathlib
import runpy
import sys
from collections.abc import Mapping

from experiments.streams import lasting_streams

_FOLDER = pathlib.Path(__file__).parent


def experiments() -> dict[str, str]:
    """Returns the names of all experiments, and the first line of each one's
    description.
    """
    described = {}
    for path in sorted(_FOLDER.glob("*.py")):
        text = path.read_text("utf-8")
        if text.rstrip().endswith("    cli.run(main)"):
            described[path.stem] = text.lstrip("r").removeprefix('"""').splitlines()[0]
    return described


def main() -> None:
    """Runs the experiment that the first argument names."""
    name, *_ = [*sys.argv[1:], "--help"]
    known = experiments()
    if name in ("--help", "-h", "help"):
        with lasting_streams():
            _print_list(known)
    elif name == "--version":
        with lasting_streams():
            print(f"jmat {importlib.metadata.version('jmat')}")
    elif name not in known:
        near = difflib.get_close_matches(name, known, n=2)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        sys.exit(f"error: there is no experiment {name!r}.{hint} `jmat --help` lists all.")
    else:
        del sys.argv[1]
        runpy.run_module(f"experiments.{name}", run_name="__main__", alter_sys=True)


def _print_list(known: Mapping[str, str]) -> None:
    """Prints the names of all experiments, each with a line that describes it."""
    print("usage: jmat EXPERIMENT [--flag=value …]\n")
    width = max(map(len, known))
    for experiment, description in known.items():
        print(f"  {experiment:{width}}  {description}")
    print("\n`jmat EXPERIMENT --help` describes an experiment and its flags.")
