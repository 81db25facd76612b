"""Holds the figures of a study (`Results`), and writes and reads them (`results.json`).

A row of results.json is flat and tidy: `{"map": "mat", "layer": 3, "target": 12,
"metric": "precision@1", "value": 0.41, "low": 0.39, "high": 0.43, "n": 3000}`.
"""

import dataclasses
import functools
import hashlib
import html
import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Unpack, cast

import numpy as np
from matplotlib.figure import Figure

from jmat.maps.compact import Map
from jmat.maps.files import MAPS_FILES, MapsInfo, save_maps
from jmat.report.drawing import Drawing
from jmat.report.environment import environment
from jmat.report.notes import format_notes
from jmat.report.rows import Content, Row
from jmat.report.saving import check_format, save_figure
from jmat.report.style import Width, width_in_inches
from jmat.runtime.annotations import Fields
from jmat.runtime.checks import check_path
from jmat.runtime.errors import NothingToDrawError, printable
from jmat.runtime.files import save_atomically
from jmat.runtime.json_files import read_json_object
from jmat.runtime.replaced import discard_replaced

_HTML_TABLE = "white-space: pre; overflow-x: auto; line-height: 1.25"  # wide tables scroll
_MOST_BYTES = 1 << 28  # of results.json


def ignore_message(message: str) -> None:
    """Drops a message."""


def _print_nothing(rows: Sequence[Row]) -> str:
    """Returns no table."""
    return ""


@dataclasses.dataclass(frozen=True, eq=False)
class Results:
    """Holds the figures of one study, and prints, draws and saves them.

    Attributes:
      experiment: name of the study, such as "layer_jump".
      rows: one flat dict a figure, with `metric`, `value`, `n` and, where there is an
        interval, `low` and `high`; `pandas.DataFrame(results.rows)` is a tidy table.
      config: the settings of the study, with `model`, the model's name.
      model_hash: fingerprint of the model's weights, or of several models by name.
      text: what was read: its source, and fingerprints of what was fitted and evaluated
        on.
      maps: the maps that were fitted, by their names in files, such as `mat.3.8`.
      maps_info: which model and text the maps come from; None where there are no maps.
      figures: file name → function that draws it from what results.json holds, and that
        takes what `jmat.report.drawing.Drawing` lists.
      tables: returns the tables of the rows, as text.
      files: names of further files → function that writes them into a folder.
      remarks: sentences below the tables that are of no row, such as the machine of a
        clock.
    """

    experiment: str
    rows: list[Row]
    config: Fields
    model_hash: str | Mapping[str, str] | None = None
    text: Fields | None = None
    maps: Mapping[str, Map] = dataclasses.field(default_factory=dict)
    maps_info: MapsInfo | None = None
    figures: Mapping[str, Callable[..., Figure]] = dataclasses.field(default_factory=dict)
    tables: Callable[[Sequence[Row]], str] = _print_nothing
    files: Mapping[tuple[str, ...], Callable[[pathlib.Path], None]] = dataclasses.field(
        default_factory=dict
    )
    remarks: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "rows", [_plain_row(index, row) for index, row in enumerate(self.rows)]
        )

    def table(self) -> str:
        """Returns the figures as tables of plain text, and the notes and remarks on
        them.
        """
        return "\n".join(
            [self.tables(self.rows).rstrip("\n"), *format_notes(self.rows), *self.remarks]
        )

    def plot(self, name: str | None = None, **drawing: Unpack[Drawing]) -> Figure:
        """Draws a figure: by its file name, with or without the ending; by default the
        first.

            results.plot(width="column", title="")
            results.plot("layer_jump", panel="precision@1", ax=axes[0])

        Args:
          name: its name; None: the first.
          drawing: title, width, axes and panel, see `jmat.report.drawing.Drawing`.

        Raises:
          ValueError: there is no figure of that name, or nothing to draw in it; an
            argument that does not fit it.
        """
        files = {pathlib.PurePath(file).stem: file for file in self.figures}
        file = (
            next(iter(self.figures), None)
            if name is None
            else files.get(pathlib.PurePath(str(name)).stem)
        )
        if file is None:
            raise ValueError(
                f"{self.experiment} draws {', '.join(self.figures) or 'no figure'}, not {name!r}."
            )
        return self.figures[file](self._content(), **drawing)

    def save(
        self,
        folder: str | pathlib.Path,
        *,
        figure_format: str = "png",
        width: Width = None,
        before: Callable[[str], object] = ignore_message,
        say: Callable[[str], object] = ignore_message,
    ) -> list[str]:
        """Writes results.json, maps, figures and all further files into a folder, each
        whole or not at all.

        Args:
          folder: is made where it is missing.
          figure_format: png, pdf or svg.
          width: of the figures: "column" (3.25 inches), "page" (6.75) or inches; None:
            as wide as suits a screen.
          before: is called with the name of each file before it is written.
          say: is called with a sentence about a figure that is left out, because there
            is nothing to draw in it.

        Returns:
          The names of the files.

        Raises:
          ValueError: there is no such format or width.
          OSError: a file cannot be written.
        """
        check_format(figure_format)
        width_in_inches(width)
        check_path("folder", folder)
        folder = pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        files = dict(self.files)
        if self.maps_info is not None:
            files[MAPS_FILES] = functools.partial(save_maps, maps=self.maps, info=self.maps_info)
        for names, write in files.items():
            for name in names:
                before(name)
            write(folder)
        write_results(
            folder,
            self.experiment,
            self.config,
            self.rows,
            model_hash=self.model_hash,
            text=self.text,
        )
        drawn = self.save_figures(
            folder, figure_format=figure_format, width=width, before=before, say=say
        )
        return ["results.json", *drawn, *(name for names in files for name in names)]

    def save_figures(
        self,
        folder: str | pathlib.Path,
        *,
        figure_format: str = "png",
        width: Width = None,
        before: Callable[[str], object] = ignore_message,
        say: Callable[[str], object] = ignore_message,
    ) -> list[str]:
        """Writes the figures into an existing folder, and returns the names of their
        files. Arguments and errors as for `save`.
        """
        folder, written = pathlib.Path(folder), list[str]()
        for file, draw in self.figures.items():
            name = figure_file(file, figure_format)
            before(name)
            try:
                save_figure(draw(self._content(), width=width), folder / name)
                written.append(name)
            except NothingToDrawError as error:
                say(f"{name} is left out: {error}")
        return written

    def _content(self) -> Content:
        """Returns what figures are drawn from."""
        return {"experiment": self.experiment, "config": dict(self.config), "rows": self.rows}

    def __repr__(self) -> str:
        return f"Results of {self.experiment}: {len(self.rows)} rows\n{self.table()}"

    def _repr_html_(self) -> str:
        """Returns the tables for a notebook, under a line that says what they are of."""
        model = self.config.get("model", "")
        title = f"<b>{html.escape(self.experiment)}</b>" + (
            f" of {html.escape(str(model))}" if model else ""
        )
        table = html.escape(printable(self.table(), lines=True).strip("\n"))
        return (
            f'<div>{title}: {len(self.rows):,} rows</div><pre style="{_HTML_TABLE}">{table}</pre>'
        )


def figure_file(name: str, figure_format: str) -> str:
    """Returns the name of a figure's file with the ending of a format."""
    return str(pathlib.PurePath(name).with_suffix(f".{figure_format}"))


def write_results(
    out: str | pathlib.Path,
    experiment: str,
    config: Fields,
    rows: Sequence[Row],
    *,
    model_hash: str | Mapping[str, str] | None = None,
    text: Fields | None = None,
) -> Content:
    """Writes `OUT/results.json`, whole or not at all, and returns what it holds.

    Args:
      out: the output folder.
      experiment: its name.
      config: its flags.
      rows: the figures.
      model_hash: fingerprint of the model's weights, or of several models by name; None
        where no checkpoint was read.
      text: the text that was read: where it came from, and fingerprints of what was
        fitted and evaluated on; None where no text was read.

    Raises:
      ValueError: a row has no metric or value, is not flat, or holds a number that is
        not finite. Where there is no value to give, a row says `"value": None`, and why
        in `"note"`.
      OSError: the file cannot be written.
    """
    results: Content = {
        "experiment": experiment,
        "config": dict(config),
        "environment": environment(),
        "model_hash": model_hash,
        "text": text,
        "rows": [_plain_row(index, row) for index, row in enumerate(rows)],
    }
    results["rows_sha256"] = _digest(results["rows"])
    content = _to_json(results)
    save_atomically(
        pathlib.Path(out) / "results.json", lambda path: path.write_text(content, "utf-8")
    )
    discard_replaced(pathlib.Path(out))
    return json.loads(content)


def read_results(out: str | pathlib.Path) -> Content:
    """Reads the results.json of a run.

    Args:
      out: the output folder of a script, or one that `Results.save` wrote.

    Returns:
      The content: `experiment`, `config` (the settings), `environment` (versions and
      devices), `model_hash`, `text`, and `rows`, one flat dict a figure.

    Raises:
      FileNotFoundError: the folder has none.
      ValueError: the file is damaged, or its rows were edited.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> texts = [f"Entry {i} holds a list of {i % 7} values." for i in range(40)]
      >>> shortcut = jmat.Shortcut(7, 8, jmat.Identity())
      >>> results = jmat.evaluate(model, texts, {"id": shortcut}, tokenizer=tokenizer)
      >>> files = results.save("my_run")
      >>> rows = jmat.read_results("my_run")["rows"]  # pandas.DataFrame(rows) is a table
    """
    check_path("out", out)
    path = pathlib.Path(out) / "results.json"
    try:
        results = read_json_object(path, most_bytes=_MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"{path} not found: expected the --out folder of a finished experiment."
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged (it {error}): run the experiment again.") from None
    if not isinstance(results.get("rows"), list) or not all(
        isinstance(row, dict) for row in results["rows"]
    ):
        raise ValueError(f"{path} holds no rows: it was not written by an experiment of jmat.")
    if "rows_sha256" in results and results["rows_sha256"] != _digest(results["rows"]):
        raise ValueError(
            f"{path} is damaged, or was edited: its rows are not those that were "
            "written. Run the experiment again, or "
            'leave out "rows_sha256" to read them as they are.'
        )
    return cast(Content, results)


def _digest(rows: Sequence[Row]) -> str:
    """Returns SHA-256 of rows, whatever the layout of the file."""
    return hashlib.sha256(json.dumps(list(rows), default=str).encode()).hexdigest()


def _plain_row(index: int, row: Row) -> Row:
    """Returns the row with Python's own numbers, checked."""
    plain = {
        key: value.item() if isinstance(value, np.generic) else value for key, value in row.items()
    }
    if "metric" not in plain or "value" not in plain:
        raise ValueError(f"row {index} has no metric or no value: {plain}")
    for key, value in plain.items():
        if not isinstance(value, str | int | float | None):
            raise ValueError(
                f"row {index} is not flat, {key!r} is a {type(value).__name__}: {plain}"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(
                f"row {index} has {key} = {value}: {plain}. A row without a value gives None and a "
                "note."
            )
    if plain["value"] is None and not plain.get("note"):
        raise ValueError(f"row {index} has no value, and no note that says why: {plain}")
    return plain


def _to_json(content: Content) -> str:
    return json.dumps(content, indent=1, allow_nan=False, default=str) + "\n"
