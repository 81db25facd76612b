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
from collections.abc import Mapping, Sequence
from pathlib import Path

from jmat.report.names import readable
from jmat.studies.peek.measures import MEASURES
from jmat.studies.peek.predictions import Peek, Sentence, agrees
from jmat.studies.peek.token_texts import NOTHING, Top, visible

_ABOUT = {
    "id": "the layer's stream, read directly",
    "mat": "the same through a linear map to the final layer",
}
_SHOWN = {"entropy": "entropy", "kl": "KL", "rank": "rank"}  # measures → what a button says
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
    kinds = list(dict.fromkeys(kind for each in peek["sentences"] for kind in each["predictions"]))
    return template.substitute(
        rules=_rules(len(kinds)),
        shows=_buttons(
            "show", ["all", *kinds], ["every", *(f"only-{n}" for n in range(len(kinds)))]
        ),
        views=_views(peek),
        model=_text(peek["model"]),
        task=_TASK[peek["task"]],
        blocks=peek["blocks"],
        ticks=_ticks(),
        sections="\n".join(sections),
        data=_script_data(peek),
    )


def _rules(kinds: int) -> str:
    """Returns style rules by which a button hides the tables of all other kinds."""
    return "\n".join(
        f":root:has(#only-{n}:checked) figure:not([data-n='{n}']) {{ display: none; }}"
        for n in range(kinds)
    )


def _buttons(name: str, texts: Sequence[str], ids: Sequence[str]) -> str:
    """Returns buttons of which one is pressed, at first the first."""
    return "".join(
        f'<label><input type="radio" name="{name}" id="{id_}"{"" if k else " checked"}>'
        f"<span>{_text(text)}</span></label>"
        for k, (id_, text) in enumerate(zip(ids, texts, strict=True))
    )


def _views(peek: Peek) -> str:
    """Returns the buttons that choose what cells show, and what their colours mean;
    nothing where there are no measures.
    """
    largest = _largest(peek)
    if not largest:
        return ""
    buttons = _buttons(
        "view", ["token", *_SHOWN.values()], ["view-token", *map("view-{}".format, _SHOWN)]
    )
    keys = "".join(
        f'<div class="key for-{name}">{_text(MEASURES[name])}{", nats" if name != "rank" else ""}: '
        f'<div class="ramp" aria-hidden="true"><span style="left:0%">{1 if name == "rank" else 0}</span>'
        f'<span style="left:100%">{number(most)}</span></div></div>'
        for name, most in largest.items()
    )
    return f"<fieldset><legend>In cells</legend>\n{buttons}</fieldset>{keys}"


def _largest(peek: Peek) -> dict[str, float]:
    """Returns the largest value of each measure on the page."""
    measured = [
        each for sentence in peek["sentences"] for each in sentence.get("measures", {}).values()
    ]
    return {
        name: max(
            (
                value
                for each in measured
                for row in each[name]
                for value in row
                if value is not None
            ),
            default=1.0,
        )
        for name in (_SHOWN if measured else ())
    }


def number(value: float | None) -> str:
    """Returns a measure as people read it, to three digits or as a whole number; a dash
    where there is none.
    """
    if value is None:
        return NOTHING
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.2f}"


def _fill(name: str, value: float | None, most: float) -> float:
    """Returns how full a cell's colour is for a measure, 0..1; small values of KL and
    rank differ visibly.
    """
    if value is None:
        return 0.0
    if name == "rank":
        return math.log(value) / math.log(most) if most > 1 else 0.0
    share = value / most if most > 0 else 0.0
    return math.sqrt(max(share, 0.0)) if name == "kl" else share


def shade(probability: float | None) -> float:
    """Returns how full a cell's colour is, 0..1: a square root, so that 1 % and 5 %
    differ visibly.
    """
    if probability is None:
        return 0.0
    return math.sqrt(min(max(probability, 0.0), 1.0))


def _section(peek: Peek, number: int, sentence: Sentence) -> str:
    largest = _largest(peek)
    tables = [
        _table(peek, number, kind, n, largest) for n, kind in enumerate(sentence["predictions"])
    ]
    heading = f'<h2 id="s{number}"><bdi>{_text(sentence["text"])}</bdi></h2>'
    return (
        f'<section aria-labelledby="s{number}">{heading}\n<div '
        f'class="maps">\n{"".join(tables)}</div></section>'
    )


def _table(peek: Peek, number: int, kind: str, n: int, largest: Mapping[str, float]) -> str:
    """Returns a table of the layers from the last, on top, to the embedding; the first
    cell of the top row is where the Tab key enters.
    """
    sentence = peek["sentences"][number]
    by_layer, measures = sentence["predictions"][kind], sentence.get("measures", {}).get(kind, {})
    heads = "".join(
        '<th scope="col" role="columnheader" '
        f'style="min-width:{width}ch"><bdi>{_token(token)}</bdi></th>'
        for token, width in zip(sentence["tokens"], _widths(sentence), strict=True)
    )
    rows = []
    for k in reversed(range(len(by_layer))):
        label = _layer_label(peek["layers"][k], peek["blocks"])
        cells = [
            _cell(
                top,
                full,
                {name: (values[k][t], largest[name]) for name, values in measures.items()},
            )
            for t, (top, full) in enumerate(zip(by_layer[k], by_layer[-1], strict=True))
        ]
        rows.append(
            f'<tr role="row"><th scope="row" role="rowheader">{label}</th>{"".join(cells)}</tr>\n'
        )
    rows[0] = rows[0].replace('tabindex="-1"', 'tabindex="0"', 1)
    caption = f"<b>{_text(kind)}</b> {_text(_about(kind))}"
    return (
        f'<figure data-n="{n}"><figcaption id="c{number}-{n}">{caption}</figcaption>\n'
        f'<div class="scroll"><table role="grid" translate="no" aria-labelledby="s{number} c{number}-{n}"'
        f' data-sentence="{number}" data-map="{_text(kind)}">\n'
        f'<thead><tr role="row"><th scope="col" role="columnheader" class="corner">layer</th>{heads}</tr></thead>\n'
        f"<tbody>{''.join(rows)}</tbody></table></div></figure>\n"
    )


def _about(kind: str) -> str:
    """Returns how a kind of map reads a layer."""
    return _ABOUT.get(kind, f"the same through the {readable(kind)}")


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
            same = " class=same" if agrees(top, full) else ""
            look = f'style="--p:{shade(probability):.3f}" title="{percent(probability)}"'
            cells.append(f"<td{same} {look}><bdi>{_token(token)}</bdi></td>")
        label = _layer_label(peek["layers"][k], peek["blocks"])
        rows.append(f'<tr><th scope="row">{label}</th>{"".join(cells)}</tr>\n')
    caption = f"{kind}: {_about(kind)}"
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


def _cell(top: Top, full: Top, measures: Mapping[str, tuple[float | None, float]]) -> str:
    """Returns a cell; `measures` are values, and the largest ones on the page."""
    token, probability = top[0]
    same = agrees(top, full)
    spoken = f"{visible(token)}, {percent(probability)}{', as the full model' if same else ''}"
    fills = {"p": shade(probability)}
    data = ""
    for name, (value, most) in measures.items():
        spoken += f", {_SHOWN[name]} {number(value)}"
        fills[name] = _fill(name, value, most)
        data += f' data-{name}="{number(value)}"'
    style = ";".join(f"--{name}:{fill:.3f}" for name, fill in fills.items())
    return (
        f'<td role="gridcell" tabindex="-1"{" class=same" if same else ""} style="{style}"{data} '
        f'aria-label="{_text(spoken)}"><bdi>{_token(token)}</bdi></td>'
    )


def percent(probability: float | None) -> str:
    """Returns a probability as people read it; a dash where there is none."""
    if probability is None:
        return NOTHING
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
                "measures": sentence.get("measures", {}),
            }
            for sentence in peek["sentences"]
        ],
    }
    return json.dumps(seen, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
