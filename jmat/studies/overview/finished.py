"""Writes the results of a finished study into a folder of its own, and reads back those
that a run left there.
"""

import contextlib
import dataclasses
import io
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import matplotlib as mpl
from matplotlib.colors import to_hex

from jmat.report.results import Results, read_results
from jmat.report.rows import Content, Row
from jmat.runtime.annotations import Fields, JsonObject
from jmat.runtime.errors import NothingToDrawError
from jmat.runtime.files import discard_temporary, save_atomically
from jmat.runtime.json_files import read_json_object
from jmat.runtime.versions import package_version
from jmat.studies.peek.predictions import Peek
from jmat.studies.settings import Say, Settings, Subject

PAGE = "page.json"  # what the page shows of a study beside its results
_NOT_SETTINGS = ("snapshot_folder", "snapshot_every")  # they change no figure


class Finished(NamedTuple):
    """Holds what the report shows of a study.

    Attributes:
      config: its settings.
      rows: its figures.
      seconds: its duration.
      read_back: whether an earlier run left the figures.
      figures: its figures as SVG, by name.
      peek: what `peek` shows; None for all other studies.
    """

    config: Fields
    rows: Sequence[Row]
    seconds: float
    read_back: bool = False
    figures: Mapping[str, str] = {}
    peek: Peek | None = None

    def duration(self) -> str:
        """Returns how long it took, in words."""
        return f"{self.seconds:.0f} s" + (", in an earlier run" if self.read_back else "")


def empty(name: str, subject: Subject, settings: Settings) -> Results:
    """Returns what a study says of its settings, model and text, without rows."""
    config = {"model": subject.model.name, **dataclasses.asdict(settings)}
    return Results(name, [], config, subject.model_hash, subject.text)


def of(results: Results, seconds: float) -> Finished:
    """Returns what the report shows of the results of a study that was run now."""
    seen = getattr(results, "peek", None)
    return Finished(
        _plain(results.config), results.rows, seconds, figures=_figures(results), peek=seen
    )


def _figures(results: Results) -> dict[str, str]:
    """Returns the figures as SVG, by file name without its end, but those in which
    there is nothing to draw.
    """
    drawn = {}
    for name in results.figures:
        with contextlib.suppress(NothingToDrawError):
            file = io.StringIO()
            # else ids, and so the page, would differ from run to run
            with mpl.rc_context({"svg.hashsalt": name}):
                figure = results.plot(name)
                for panel in figure.axes:
                    # other colours mean something: grey is no token
                    if to_hex(panel.get_facecolor()) == "#ffffff":
                        panel.patch.set_visible(False)
                figure.savefig(file, format="svg", facecolor="none", metadata={"Date": None})
            drawn[pathlib.PurePath(name).stem] = file.getvalue()
    return drawn


def save(folder: pathlib.Path, results: Results, done: Finished, *, say: Say) -> None:
    """Writes the files that the study's script would write, and beside them its figures
    as SVG, and its duration.
    """
    folder.mkdir(parents=True, exist_ok=True)
    discard_temporary(folder.iterdir())
    (folder / PAGE).unlink(missing_ok=True)
    results.save(folder, say=say)
    content = json.dumps({"seconds": done.seconds, "figures": done.figures})
    # Written last, since the study counts as finished with it: a run that is killed before leaves
    # files out.
    save_atomically(folder / PAGE, lambda path: path.write_text(content + "\n", "utf-8"))


def read(folder: pathlib.Path, expected: Results) -> Finished | None:
    """Returns the study's results in a folder; None where there are none of these
    settings, text, model and jmat.

    Results that are damaged count as none: the study is run again.
    """
    try:
        found = read_results(folder)
        beside = read_json_object(folder / PAGE)
        seconds, figures = float(beside["seconds"]), dict(beside["figures"])
        seen = (
            cast(Peek, read_json_object(folder / "peek.json"))
            if expected.experiment == "peek"
            else None
        )
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
    if not is_same(found, expected):
        return None
    return Finished(_plain(found["config"]), found["rows"], seconds, True, figures, seen)


def is_same(found: Content, expected: Results) -> bool:
    """Returns whether results that were read are of the settings, model, text and version
    of jmat of a run that is to come.
    """
    texts = [
        {key: dict(text or {}).get(key) for key in ("fit", "eval")}
        for text in (found["text"], expected.text)
    ]
    version = dict(found.get("environment") or {}).get("jmat")
    return (
        _plain(found["config"]) == _plain(expected.config)
        and found["model_hash"] == expected.model_hash
        and texts[0] == texts[1]
        and version == package_version("jmat")
    )


def _plain(config: Fields) -> JsonObject:
    """Returns settings as JSON holds them, without those that change no figure."""
    kept = {name: value for name, value in config.items() if name not in _NOT_SETTINGS}
    return json.loads(json.dumps(kept, default=str))
