"""Prints rows of results as tables of plain text."""

from collections import Counter
from collections.abc import Sequence

from jmat.report.rows import Row

Value = str | int | float | None  # of a field of a row


def format_table(
    rows: Sequence[Row],
    *,
    index: str = "layer",
    columns: Sequence[str] = ("metric", "map"),
    metrics: Sequence[str] | None = None,
    intervals: bool = False,
    width: int = 100,
) -> str:
    """Returns rows as plain text: values of `index` down, those of `columns` across
    under grouped headings.

    A table wider than `width` characters is continued below. Layers are 0-based, as
    everywhere.

    Args:
      rows: those without `index` or one of `columns` are left out.
      index: a key of the rows.
      columns: keys of the rows, the outermost heading first.
      metrics: which to show, in this order; default all.
      intervals: show `[low, high]` behind each value that has them.
      width: characters a line.
    """
    needed = {index, *columns, "value"}
    shown = [
        row
        for row in rows
        if needed <= row.keys() and (metrics is None or row.get("metric") in metrics)
    ]
    if not shown:
        return "(no rows to show)"
    cells = {
        (row[index], tuple(row[key] for key in columns)): _cell(row, intervals) for row in shown
    }
    downs = _in_order([row[index] for row in shown], None)
    orders = [
        _in_order([row[key] for row in shown], metrics if key == "metric" else None)
        for key in columns
    ]
    heads = sorted(
        {head for _, head in cells},
        key=lambda head: [o.index(h) for o, h in zip(orders, head, strict=True)],
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
            lines.append(
                _label(down).rjust(margin)
                + "".join(cells.get((down, h), "").rjust(cell) for h in part)
            )
        tables.append("\n".join(line.rstrip() for line in lines))
    return "\n\n".join(tables)


def _in_order(values: Sequence[Value], order: Sequence[Value] | None) -> list[Value]:
    """Returns distinct values: in the given order, else numbers rising, else as they
    first appear.
    """
    distinct = list(dict.fromkeys(values))
    if order is not None:
        return [value for value in order if value in distinct]
    numbers = [value for value in distinct if isinstance(value, int | float)]
    return [*sorted(numbers)] if len(numbers) == len(distinct) else distinct


def _spans(heads: Sequence[tuple[Value, ...]], level: int, cell: int) -> str:
    """Returns one line of outer headings, each over the columns that share it."""
    line, previous = "", None
    for position, head in enumerate(heads):
        if head[: level + 1] != previous:
            line = line.ljust(position * cell) + "  " + _label(head[level])
        previous = head[: level + 1]
    return line


def _cell(row: Row, intervals: bool) -> str:
    if row["value"] is None:
        return "-"
    spread = (
        f" [{_number(row['low'])}, {_number(row['high'])}]" if intervals and "low" in row else ""
    )
    return _number(row["value"]) + spread


def _number(value: float | int) -> str:
    return f"{value:.3f}" if abs(value) < 1e4 else f"{value:.2e}"


def _label(value: Value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
