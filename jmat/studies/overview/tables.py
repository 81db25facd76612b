"""Writes rows of results as HTML tables, each figure with its 95 % interval below it."""

import html
import re
from collections.abc import Mapping, Sequence

from jmat.report.names import MAPS, METHODS, PARTS, PROBES
from jmat.report.rows import Row
from jmat.report.tables import Value

# Code name of a map, part, method or metric → how the page names it.
NAMES = {
    **MAPS,
    **PARTS,
    **METHODS,
    **PROBES,
    "mat - id": "difference",
    "kl": "KL (nats)",
    "surprisal": "surprisal (nats)",
    "r2": "R²",
    "linearity": "in sample",
    "linearity_adjusted": "adjusted",
    "linearity_held_out": "held out",
    "linearity_without_residual": "without residual, in sample",
    "linearity_without_residual_held_out": "without residual, held out",
    "contribution_norm": "norm added / norm of stream",
    "cosine": "cosine of neighbours",
    "anisotropy": "anisotropy",
    "layers": "blocks run",
    "flops_ratio": "FLOPs, whole text",
    "flops_ratio_token": "FLOPs, one token",
    "layers_saved@0.95": "blocks saved at 95 %",
    "layers_saved@0.90": "blocks saved at 90 %",
    "time_ratio": "time / full pass",
    "microseconds_per_token": "µs a token",
    "block_influence": "block influence",
    "angular": "angle",
}
_MOST_TARGETS = 16  # columns of one table of pairs


def name(code: object) -> str:
    """Returns the words for a code name; a name that has none as it is."""
    return NAMES.get(str(code), str(code).replace("_", " "))


def text(content: object) -> str:
    """Returns any content as text that stands in HTML as it is."""
    return html.escape(str(content), quote=True)


def number(value: float | int) -> str:
    """Returns a figure for people: three digits behind the point, of large ones fewer."""
    if isinstance(value, int):
        written = f"{value:,d}"
    elif abs(value) >= 1e5:
        written = f"{value:.3g}"
    else:
        # + 0.0: no minus zero
        written = f"{round(value, 3) + 0.0:.3f}" if abs(value) < 100 else f"{value:,.1f}"
    return written.replace("-", "\N{MINUS SIGN}")


def rows_table(
    rows: Sequence[Row],
    caption: str,
    *,
    index: str = "layer",
    columns: Sequence[str] = ("metric", "map"),
    metrics: Sequence[str] | None = None,
) -> str:
    """Returns a table: values of `index` down, those of `columns` across under grouped
    headings.

    Args:
      rows: those without `index` or one of `columns` are left out.
      caption: says what the table holds.
      index: a key of the rows.
      columns: one or two keys of the rows, the outer heading first.
      metrics: which to show, in this order; None: all.

    Returns:
      Nothing where there is no row to show.
    """
    needed = {index, *columns, "value"}
    shown = [
        row
        for row in rows
        if needed <= row.keys() and (metrics is None or row["metric"] in metrics)
    ]
    if not shown:
        return ""
    if metrics is not None:
        shown.sort(key=lambda row: metrics.index(row["metric"]))
    heads = list(dict.fromkeys(tuple(row[key] for key in columns) for row in shown))
    outer = list(dict.fromkeys(head[0] for head in heads))
    heads.sort(key=lambda head: outer.index(head[0]))  # else groups would be torn apart
    cells = {(row[index], tuple(row[key] for key in columns)): _cell(row) for row in shown}
    downs = list(dict.fromkeys(row[index] for row in shown))
    if all(isinstance(down, int | float) for down in downs):
        downs.sort()
    lines = {
        down: "".join(cells.get((down, head), "<td></td>") for head in heads) for down in downs
    }
    body = "".join(
        f'<tr><th scope="row">{text(_label(down))}</th>{line}</tr>\n'
        for down, line in lines.items()
    )
    return _table(caption, f"{_head_rows(name(index), heads)}", body)


def matrix(rows: Sequence[Row], caption: str) -> str:
    """Returns a table of the figures of pairs of layers: source down, target across; of
    a deep model several, each of which fits the width of a page of paper.
    """
    targets = sorted({row["target"] for row in rows})
    count = max(-(-len(targets) // _MOST_TARGETS), 1)
    size = -(-len(targets) // count)
    tables = []
    for at in range(0, len(targets), size or 1):
        part = targets[at : at + size]
        range_of_part = f", target layers {part[0]} to {part[-1]}" if count > 1 else ""
        chosen = [row for row in rows if row["target"] in part]
        tables.append(rows_table(chosen, f"{caption}{range_of_part}", columns=("metric", "target")))
    return "".join(tables)


def listed(caption: str, heads: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """Returns a table of lines of text, the first of each being its heading."""
    head = "".join(f'<th scope="col">{text(each)}</th>' for each in heads)
    body = "".join(
        "<tr><th "
        f'scope="row">{text(first)}</th>{"".join(f"<td>{text(each)}</td>" for each in others)}</tr>\n'
        for first, *others in lines
    )
    return _table(caption, f"<tr>{head}</tr>", body, kind=' class="words"')


def facts(pairs: Mapping[str, object]) -> str:
    """Returns a list of names and what they are; no line ends inside the name of a
    flag.
    """
    kept = {
        k: re.sub(r"(?<![\w-])--\w+", r'<span class="flag">\g<0></span>', text(v))
        for k, v in pairs.items()
    }
    return (
        f"<dl>{''.join(f'<div><dt>{text(k)}</dt><dd>{v}</dd></div>' for k, v in kept.items())}</dl>"
    )


def _table(caption: str, head: str, body: str, kind: str = "") -> str:
    return (
        f'<details open><summary>{text(caption)}</summary>\n<div class="scroll" tabindex="0" role="region" '
        f'aria-label="{text(caption)}"><table{kind}><caption class="unseen">{text(caption)}</caption>\n'
        f"<thead>{head}</thead>\n<tbody>{body}</tbody></table></div></details>\n"
    )


def _head_rows(corner: str, heads: Sequence[tuple[Value, ...]]) -> str:
    """Returns the heading of the columns; of two rows where they are grouped."""
    inner = "".join(f'<th scope="col">{text(name(_label(head[-1])))}</th>' for head in heads)
    if len(heads[0]) == 1:
        return f'<tr><th scope="col">{text(corner)}</th>{inner}</tr>'
    groups = list(dict.fromkeys(head[0] for head in heads))
    outer = "".join(
        '<th scope="colgroup" '
        f'colspan="{sum(head[0] == group for head in heads)}">{text(name(group))}</th>'
        for group in groups
    )
    return f'<tr><th scope="col" rowspan="2">{text(corner)}</th>{outer}</tr><tr>{inner}</tr>'


def _label(value: object) -> str:
    return f"{value:g}".replace("-", "\N{MINUS SIGN}") if isinstance(value, float) else str(value)


def _cell(row: Row) -> str:
    if row["value"] is None:
        return "<td>–</td>"
    ends = ""
    if "low" in row:
        ends = f"<small>{number(row['low'])} to {number(row['high'])}</small>"
    return f"<td>{number(row['value'])}{ends}</td>"
