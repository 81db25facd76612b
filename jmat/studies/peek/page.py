"""A `Peek` as one HTML page that needs nothing else: tokens across, layers up, the top
token in each cell.

The tables are plain HTML, complete without scripts; a script adds the details of a cell
and the arrow keys. Every piece of text, whatever characters it has, is escaped here and
nowhere else.
"""

import html
import json
import math
import string
from pathlib import Path

from jmat.studies.peek.predictions import Peek, Sentence, Top, visible

_ABOUT = {
    "id": "the layer's stream, read directly",
    "mat": "the same through a linear map to the final layer",
}
_WIDEST = 14  # characters of a token that a column makes room for
_TASK = {
    "next": "the token that follows",
    "masked": "the token that stands there, while it is masked",
}


def page(peek: Peek) -> str:
    """Returns the whole page."""
    template = string.Template(Path(__file__).with_name("page.html").read_text("utf-8"))
    sections = [
        _section(peek, number, sentence) for number, sentence in enumerate(peek["sentences"])
    ]
    return template.substitute(
        model=_text(peek["model"]),
        task=_TASK[peek["task"]],
        blocks=peek["blocks"],
        ticks=_ticks(),
        sections="\n".join(sections),
        data=_script_data(peek),
    )


def shade(probability: float) -> float:
    """Returns how full a cell's colour is, 0..1: a square root, so that 1 % and 5 %
    differ visibly.
    """
    return math.sqrt(min(max(probability, 0.0), 1.0))


def _section(peek: Peek, number: int, sentence: Sentence) -> str:
    tables = [_table(peek, number, kind) for kind in sentence["predictions"]]
    heading = f'<h2 id="s{number}"><bdi>{_text(sentence["text"])}</bdi></h2>'
    return (
        f'<section aria-labelledby="s{number}">{heading}\n<div '
        f'class="maps">\n{"".join(tables)}</div></section>'
    )


def _table(peek: Peek, number: int, kind: str) -> str:
    """Returns a table of the layers from the last, on top, to the embedding; the first
    cell of the top row is where the Tab key enters.
    """
    sentence = peek["sentences"][number]
    by_layer = sentence["predictions"][kind]
    heads = "".join(
        '<th scope="col" role="columnheader" '
        f'style="min-width:{width}ch"><bdi>{_token(token)}</bdi></th>'
        for token, width in zip(sentence["tokens"], _widths(sentence), strict=True)
    )
    rows = []
    for k in reversed(range(len(by_layer))):
        label = _layer_label(peek["layers"][k], peek["blocks"])
        cells = [
            _cell(top, full[0][0]) for top, full in zip(by_layer[k], by_layer[-1], strict=True)
        ]
        rows.append(
            f'<tr role="row"><th scope="row" role="rowheader">{label}</th>{"".join(cells)}</tr>\n'
        )
    rows[0] = rows[0].replace('tabindex="-1"', 'tabindex="0"', 1)
    caption = f"<b>{_text(kind)}</b> {_text(_ABOUT.get(kind, ''))}"
    return (
        f'<figure data-map="{_text(kind)}"><figcaption id="c{number}-{_text(kind)}">{caption}</figcaption>\n'
        f'<div class="scroll"><table role="grid" translate="no" aria-labelledby="s{number} c{number}-{_text(kind)}"'
        f' data-sentence="{number}" data-map="{_text(kind)}">\n'
        f'<thead><tr role="row"><th scope="col" role="columnheader" class="corner">layer</th>{heads}</tr></thead>\n'
        f"<tbody>{''.join(rows)}</tbody></table></div></figure>\n"
    )


def token_table(peek: Peek, number: int, kind: str) -> str:
    """Returns the table of one sentence and map for a page without scripts: layers down
    from the last, tokens across.

    A cell's `title` holds its probability.
    """
    sentence = peek["sentences"][number]
    by_layer = sentence["predictions"][kind]
    heads = "".join(
        f'<th scope="col"><bdi>{_token(token)}</bdi></th>' for token in sentence["tokens"]
    )
    rows = []
    for k in reversed(range(len(by_layer))):
        cells = []
        for top, full in zip(by_layer[k], by_layer[-1], strict=True):
            token, probability = top[0]
            same = " class=same" if token == full[0][0] else ""
            look = f'style="--p:{shade(probability):.3f}" title="{percent(probability)}"'
            cells.append(f"<td{same} {look}><bdi>{_token(token)}</bdi></td>")
        label = _layer_label(peek["layers"][k], peek["blocks"])
        rows.append(f'<tr><th scope="row">{label}</th>{"".join(cells)}</tr>\n')
    caption = f"{kind}: {_ABOUT.get(kind, kind)}"
    return (
        f'<details open><summary>{_text(caption)}</summary>\n<div class="scroll" tabindex="0" role="region" '
        f'aria-label="{_text(caption)}"><table class="tokens" translate="no">\n'
        f'<thead><tr><th scope="col">layer</th>{heads}</tr></thead>\n'
        f"<tbody>{''.join(rows)}</tbody></table></div></details>\n"
    )


def _widths(sentence: Sentence) -> list[int]:
    """Returns the widths of the columns in digits, equal for all maps, so that their
    tables line up.
    """
    columns = [[token] for token in sentence["tokens"]]
    for by_layer in sentence["predictions"].values():
        for tops in by_layer:
            for column, top in zip(columns, tops, strict=True):
                column.append(top[0][0])
    return [min(max(len(visible(token)) for token in column), _WIDEST) + 3 for column in columns]


def _layer_label(layer: int, blocks: int) -> str:
    note = {blocks: "full", 0: "embed"}.get(layer, "")
    return f"{layer}<small>{note}</small>" if note else str(layer)


def _cell(top: Top, full: str) -> str:
    token, probability = top[0]
    agrees = token == full
    spoken = f"{visible(token)}, {percent(probability)}{', as the full model' if agrees else ''}"
    return (
        f'<td role="gridcell" tabindex="-1"{" class=same" if agrees else ""} '
        f'style="--p:{shade(probability):.3f}" '
        f'aria-label="{_text(spoken)}"><bdi>{_token(token)}</bdi></td>'
    )


def percent(probability: float) -> str:
    """Returns a probability as people read it."""
    share = 100 * probability
    return f"{share:.0f} %" if share >= 10 else f"{share:.1f} %" if share >= 0.1 else "< 0.1 %"


def _ticks() -> str:
    marks = (0.0, 0.01, 0.1, 0.25, 0.5, 1.0)
    return "".join(f'<span style="left:{100 * shade(p):.0f}%">{100 * p:g}</span>' for p in marks)


def _token(token: str) -> str:
    """Returns a token escaped, with signs for spaces and ends of lines set back."""
    return _text(visible(token)).replace("·", "<i>·</i>")


def _text(text: str) -> str:
    return html.escape(text, quote=True)


def _script_data(peek: Peek) -> str:
    """Returns JSON that no token can break out of: `<` and the line ends that old
    JavaScript had are escaped.
    """
    seen = {
        "task": peek["task"],
        "layers": peek["layers"],
        "sentences": [
            {
                "tokens": [visible(token) for token in sentence["tokens"]],
                "predictions": {
                    kind: [
                        [[(visible(token), p) for token, p in top] for top in tops]
                        for tops in by_layer
                    ]
                    for kind, by_layer in sentence["predictions"].items()
                },
            }
            for sentence in peek["sentences"]
        ],
    }
    return json.dumps(seen, separators=(",", ":")).replace("<", "\\u003c")
