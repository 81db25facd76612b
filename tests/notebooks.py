"""Runs the notebooks of the documentation, each in a kernel of its own (`pip install -e
'.[docs]'`):

python -m tests.notebooks            # writes their outputs anew
python -m tests.notebooks --check    # writes nothing
"""

import os
import pathlib
import sys
import tempfile
import time

import nbformat
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).parent.parent
LONGEST = 300  # seconds of one cell; a notebook should take less than a minute


def execute(path: pathlib.Path) -> nbformat.NotebookNode:
    """Returns the notebook with the outputs of a run in an empty folder. Raises
    CellExecutionError where one fails.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PYTHONPATH"] = str(ROOT)
        client = NotebookClient(
            notebook,
            timeout=LONGEST,
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
        )
        client.execute()
    for cell in notebook.cells:
        cell.metadata = {}  # times of the run
    notebook.metadata = {key: notebook.metadata[key] for key in ("kernelspec",)} | {
        "language_info": {"name": "python"}
    }
    return notebook


def main(arguments: list[str]) -> None:
    names = [name for name in arguments if name != "--check"] or ["*"]
    folder = ROOT / "docs" / "notebooks"
    for path in sorted(path for name in names for path in folder.glob(f"{name}.ipynb")):
        began = time.monotonic()
        notebook = execute(path)
        if "--check" not in arguments:
            path.write_text(nbformat.writes(notebook) + "\n", "utf-8")
        print(f"{path.name}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
