"""Runs an experiment by its name: `jmat layer_jump --model=gpt2` is `python -m experiments.layer_jump --model=gpt2`."""

import difflib
import importlib.metadata
import pathlib
import runpy
import sys

_FOLDER = pathlib.Path(__file__).parent


def experiments() -> dict[str, str]:
    """Returns the names of all experiments, with the first line of what each says of itself."""
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
        print("usage: jmat EXPERIMENT [--flag=value …]\n")
        width = max(map(len, known))
        for experiment, question in known.items():
            print(f"  {experiment:{width}}  {question}")
        print("\n`jmat EXPERIMENT --help` describes an experiment and its flags.")
    elif name == "--version":
        print(f"jmat {importlib.metadata.version('jmat')}")
    elif name not in known:
        near = difflib.get_close_matches(name, known, n=2)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        sys.exit(f"error: there is no experiment {name!r}.{hint} `jmat --help` lists all.")
    else:
        del sys.argv[1]
        runpy.run_module(f"experiments.{name}", run_name="__main__", alter_sys=True)
