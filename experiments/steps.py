"""Runs the steps of a study: experiments, one after another, each once."""

import json
import pathlib
import shlex
import sys
from collections.abc import Sequence

from experiments.children import run_child
from experiments.cli import say
from experiments.streams import CLOSED
from jmat.report.results import read_results
from jmat.report.rows import Content
from jmat.runtime.files import save_atomically


def step(
    experiment: str,
    out: pathlib.Path,
    own: Sequence[str],
    more: Sequence[str],
    *,
    trained: Sequence[str] = (),
    overwrite: bool = False,
) -> Content:
    """Runs one experiment in a process of its own, unless it has run to its end with
    these flags. Returns its results.

    Args:
        experiment: its name.
        out: its output folder.
        own: flags that the study sets.
        more: other flags.
        trained: further flags with which the model was trained that the experiment
          measures.
        overwrite: replace the files of a run with other flags in its folder.

    Raises:
        ValueError: the experiment failed, or left results that cannot be read.
    """
    done, given = out / "done.json", [*own, *more, *trained]
    try:
        earlier = json.loads(done.read_text("utf-8"))
    except FileNotFoundError:
        earlier = None
    except (ValueError, RecursionError):
        say(f"{done} is damaged: this step is run again")
        earlier = []
    if earlier == given:
        try:
            return read_results(out)
        except (FileNotFoundError, ValueError) as error:
            say(f"{error} This step is run again now.")
    say(f"{experiment} → {out}")
    done.unlink(missing_ok=True)
    command = [sys.executable, "-m", f"experiments.{experiment}", *more, *own, f"--out={out}"]
    if earlier is not None or overwrite:  # of an earlier study with other flags
        command.append("--overwrite")
    if run_child(command) not in (0, CLOSED):
        raise ValueError(
            f"{shlex.join(command)} failed, see above; mend it, and start the study again to go on."
        )
    save_atomically(done, lambda path: path.write_text(json.dumps(given), "utf-8"))
    return read_results(out)
