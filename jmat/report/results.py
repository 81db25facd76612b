"""Writes and reads the figures of an experiment (`results.json`), and prints tables of them.

A row of results.json is flat and tidy: `{"map": "mat", "layer": 3, "target": 12, "metric": "precision@1",
"value": 0.41, "low": 0.39, "high": 0.43, "n": 3000}`.
"""

import hashlib
import importlib.metadata
import json
import math
import os
import pathlib
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jmat.runtime.files import save_atomically
from jmat.runtime.folders import discard_replaced
from jmat.runtime.json_files import read_json_object

Row = Mapping[str, Any]

_MOST_BYTES = 1 << 28  # of results.json
_PACKAGES = ("jmat", "jax", "jaxlib", "flax", "numpy", "transformers")


def write_results(
    out: str | pathlib.Path,
    experiment: str,
    config: Mapping[str, Any],
    rows: Sequence[Row],
    *,
    model_hash: str | Mapping[str, str] | None = None,
    text: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
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
        ValueError: a row has no metric or value, is not flat, or holds a number that is not finite. Where there is no
            value to give, a row says `"value": None`, and why in `"note"`.
        OSError: the file cannot be written.
    """
    results: dict[str, Any] = {
        "experiment": experiment,
        "config": dict(config),
        "environment": environment(),
        "model_hash": model_hash,
        "text": text,
        "rows": [_plain_row(index, row) for index, row in enumerate(rows)],
    }
    results["rows_sha256"] = _digest(results["rows"])
    content = _to_json(results)
    save_atomically(pathlib.Path(out) / "results.json", lambda path: path.write_text(content, "utf-8"))
    discard_replaced(pathlib.Path(out))
    return json.loads(content)


def read_results(out: str | pathlib.Path) -> dict[str, Any]:
    """The results of the run in folder `out`.

    Raises FileNotFoundError if it has none, ValueError if they are damaged.
    """
    path = pathlib.Path(out) / "results.json"
    try:
        results = read_json_object(path, most_bytes=_MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{path} not found: expected the --out folder of a finished experiment.") from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged (it {error}): run the experiment again.") from None
    if not isinstance(results.get("rows"), list) or not all(isinstance(row, dict) for row in results["rows"]):
        raise ValueError(f"{path} holds no rows: it was not written by an experiment of jmat.")
    if "rows_sha256" in results and results["rows_sha256"] != _digest(results["rows"]):
        raise ValueError(
            f"{path} is damaged, or was edited: its rows are not those that were written. Run the experiment again, or "
            'leave out "rows_sha256" to read them as they are.'
        )
    return results


def _digest(rows: Sequence[Row]) -> str:
    """Returns SHA-256 of rows, whatever the layout of the file."""
    return hashlib.sha256(json.dumps(list(rows), default=str).encode()).hexdigest()


def environment() -> dict[str, Any]:
    """Returns the versions that figures depend on, the processor, and the devices by kind."""
    versions = {package: package_version(package) for package in _PACKAGES}
    devices = Counter(device.device_kind for device in jax.devices())
    return versions | {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "devices": [f"{count} x {kind}" for kind, count in devices.items()],
    }


def package_version(package: str) -> str:
    """Returns the version of an installed package, or "not installed"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    """Returns the processor's model name and number of cores."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, ValueError, StopIteration):  # not Linux, or not x86
        model = platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} cores"


def format_table(
    rows: Sequence[Row],
    *,
    index: str = "layer",
    columns: Sequence[str] = ("metric", "map"),
    metrics: Sequence[str] | None = None,
    intervals: bool = False,
    width: int = 100,
) -> str:
    """Rows as plain text: values of `index` down, those of `columns` across under grouped headings.

    A table wider than `width` characters is continued below. Layers are 0-based, as everywhere.

    Args:
        rows: those without `index` or one of `columns` are left out.
        index: a key of the rows.
        columns: keys of the rows, the outermost heading first.
        metrics: which to show, in this order; default all.
        intervals: show `[low, high]` behind each value that has them.
        width: characters a line.
    """
    needed = {index, *columns, "value"}
    shown = [row for row in rows if needed <= row.keys() and (metrics is None or row.get("metric") in metrics)]
    if not shown:
        return "(no rows to show)"
    cells = {(row[index], tuple(row[key] for key in columns)): _cell(row, intervals) for row in shown}
    downs = _in_order([row[index] for row in shown], None)
    orders = [_in_order([row[key] for row in shown], metrics if key == "metric" else None) for key in columns]
    heads = sorted(
        {head for _, head in cells}, key=lambda head: [o.index(h) for o, h in zip(orders, head, strict=True)]
    )
    corner = index if columns[-1] in ("metric", "map") else f"{index} \\ {columns[-1]}"
    margin = max(len(corner), *(len(_label(down)) for down in downs))
    cell = 2 + max(*map(len, cells.values()), *(len(_label(head[-1])) for head in heads))
    groups = Counter(head[:-1] for head in heads)
    for outer, size in groups.items():  # a heading may be wider than the cells of its group
        cell = max(cell, -(-(2 + max((len(_label(part)) for part in outer), default=0)) // size))
    per_table = max(1, (width - margin) // cell)
    if len(columns) > 1 and per_table > (size := max(groups.values())):
        per_table -= per_table % size  # do not tear a group apart
    tables = []
    for start in range(0, len(heads), per_table):
        part = heads[start : start + per_table]
        lines = [" " * margin + _spans(part, level, cell) for level in range(len(columns) - 1)]
        lines.append(corner.rjust(margin) + "".join(_label(head[-1]).rjust(cell) for head in part))
        lines.append("─" * len(lines[-1]))
        for down in downs:
            lines.append(_label(down).rjust(margin) + "".join(cells.get((down, h), "").rjust(cell) for h in part))
        tables.append("\n".join(line.rstrip() for line in lines))
    return "\n\n".join(tables)


def _plain_row(index: int, row: Row) -> dict[str, Any]:
    """The row with Python's own numbers, checked."""
    plain = {key: value.item() if isinstance(value, np.generic) else value for key, value in row.items()}
    if "metric" not in plain or "value" not in plain:
        raise ValueError(f"row {index} has no metric or no value: {plain}")
    for key, value in plain.items():
        if not isinstance(value, str | int | float | None):
            raise ValueError(f"row {index} is not flat, {key!r} is a {type(value).__name__}: {plain}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"row {index} has {key} = {value}: {plain}. A row without a value gives None and a note.")
    if plain["value"] is None and not plain.get("note"):
        raise ValueError(f"row {index} has no value, and no note that says why: {plain}")
    return plain


def _to_json(content: Any) -> str:
    return json.dumps(content, indent=1, allow_nan=False, default=str) + "\n"


def _in_order(values: Sequence[Any], order: Sequence[Any] | None) -> list[Any]:
    """Distinct values: in the given order, else numbers rising, else as they first appear."""
    distinct = list(dict.fromkeys(values))
    if order is not None:
        return [value for value in order if value in distinct]
    return sorted(distinct) if all(isinstance(value, int | float) for value in distinct) else distinct


def _spans(heads: Sequence[tuple[Any, ...]], level: int, cell: int) -> str:
    """One line of outer headings, each over the columns that share it."""
    line, previous = "", None
    for position, head in enumerate(heads):
        if head[: level + 1] != previous:
            line = line.ljust(position * cell) + "  " + _label(head[level])
        previous = head[: level + 1]
    return line


def _cell(row: Row, intervals: bool) -> str:
    if row["value"] is None:
        return "-"
    spread = f" [{_number(row['low'])}, {_number(row['high'])}]" if intervals and "low" in row else ""
    return _number(row["value"]) + spread


def _number(value: float | int) -> str:
    return f"{value:.3f}" if abs(value) < 1e4 else f"{value:.2e}"


def _label(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
