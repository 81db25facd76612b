"""Writes the overview of a model as one HTML page that needs nothing else: no script,
no file, no network.

Every piece of text, whatever characters it has, is escaped on its way into the page.
"""

import base64
import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path

from jmat.report.notes import format_notes
from jmat.runtime.annotations import Fields
from jmat.studies.overview.claims import DOES_NOT_HOLD, HOLDS, NOT_TESTED
from jmat.studies.overview.sections import COLOURED, SECTIONS
from jmat.studies.overview.tables import facts, listed, text
from jmat.studies.peek.page import token_table
from jmat.studies.peek.predictions import Peek

_BADGES = {HOLDS: "yes", DOES_NOT_HOLD: "no", NOT_TESTED: "open"}


def page(content: Fields, figures: Mapping[str, Mapping[str, str]]) -> str:
    """Returns the whole page.

    Args:
      content: of report.json.
      figures: study → name of a figure → the figure as SVG.
    """
    template = string.Template(Path(__file__).with_name("page.html").read_text("utf-8"))
    studies = content["studies"]
    count = {word: sum(each["verdict"] == word for each in content["verdicts"]) for word in _BADGES}
    links = {
        "claims": "Claims",
        **{name: SECTIONS[name].title for name in studies},
        "run": "How it was made",
    }
    return template.substitute(
        model=text(content["model"]["name"]),
        summary=text(_summary(content)),
        counts=" ".join(
            f'<span class="badge {_BADGES[word]}">{word}: {number}</span>'
            for word, number in count.items()
        ),
        links="".join(
            f'<li><a href="#{key}">{text(title)}</a></li>' for key, title in links.items()
        ),
        claims="\n".join(_claims(content["verdicts"])),
        sections="\n".join(
            _section(name, studies[name], figures.get(name, {})) for name in studies
        ),
        missing=_missing(content),
        run=_run(content),
    )


def _summary(content: Fields) -> str:
    model, read = content["model"], content["text"]
    kind = "causal" if model["causal"] else "masked"
    return (
        f"A {kind} model of {model['layers']} blocks, {model['width']} wide. Maps were fitted at "
        f"{read['num_fit']:,} positions of {read['source']} and evaluated at {read['num_eval']:,} "
        "of other sentences."
    )


def _claims(verdicts: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns the claims of each paper under its name."""
    papers = list(dict.fromkeys(each["paper"] for each in verdicts))
    return [
        f"<h3>{text(paper)}</h3>\n<ul class=claims>"
        + "".join(_claim(each) for each in verdicts if each["paper"] == paper)
        + "</ul>"
        for paper in papers
    ]


def _claim(each: Mapping[str, str]) -> str:
    return (
        f'<li><p><span class="badge {_BADGES[each["verdict"]]}">{each["verdict"]}</span> '
        f"<b>{text(each['statement'])}</b></p>"
        + facts({"here": each["figures"], "published": each["published"], "rule": each["rule"]})
        + "</li>\n"
    )


def _section(name: str, study: Fields, figures: Mapping[str, str]) -> str:
    about = SECTIONS[name]
    drawn = "".join(
        _figure(key, about.figures.get(key, about.title), svg) for key, svg in figures.items()
    )
    notes = "".join(f"<li>{text(note)}</li>" for note in format_notes(study["rows"]))
    return (
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{text(about.title)}</h2>\n'
        f"<p>{text(about.text)}</p>\n{drawn}{about.tables(study['rows'])}{_peek(study.get('peek'))}"
        + (f"<details open><summary>Notes</summary><ul>{notes}</ul></details>" if notes else "")
        + f"<p class=small>{text(_remark(name, study))}</p></section>"
    )


def _remark(name: str, study: Fields) -> str:
    counts = {row["n"] for row in study["rows"] if isinstance(row.get("n"), int)}
    n = (
        f" n = {min(counts):,}" + (f" to {max(counts):,}." if len(counts) > 1 else ".")
        if counts
        else ""
    )
    bootstraps = (
        " Intervals are 95 % bootstraps over sentences."
        if any("low" in row for row in study["rows"])
        else ""
    )
    return f"Study {name}: {len(study['rows']):,} rows.{n}{bootstraps}"


def _figure(key: str, words: str, svg: str) -> str:
    """Returns a figure at its natural size, or as wide as the page; dark pages invert
    those of lines.
    """
    data = base64.b64encode(svg.encode()).decode()
    points = re.search(r'<svg[^>]*? width="([\d.]+)pt"', svg)
    width = float(points[1]) * 4 / 3 if points else 900.0  # a point is 4/3 of a CSS pixel
    kind = "" if key in COLOURED else " class=lines"
    caption = (
        words[0].upper()
        + words[1:]
        + "."
        + ("" if key in COLOURED else " Bands are 95 % intervals.")
    )
    return (
        f'<figure{kind} style="--width:{1.1 * width:.0f}px"><div class="scroll" tabindex="0" '
        f'role="region" aria-label="Figure: {text(words)}"><img alt="Figure: {text(words)}. The '
        'tables below hold its numbers." '
        f'src="data:image/svg+xml;base64,{data}"></div><figcaption>{text(caption)}</figcaption></figure>\n'
    )


def _peek(peek: Peek | None) -> str:
    """Returns the tables of what is predicted at every layer of some sentences."""
    if peek is None:
        return ""
    parts = []
    for number, sentence in enumerate(peek["sentences"]):
        tables = "".join(token_table(peek, number, kind) for kind in sentence["predictions"])
        parts.append(f'<h3 id="s{number}"><bdi>{text(sentence["text"])}</bdi></h3>\n{tables}')
    return "\n".join(parts)


def _missing(content: Fields) -> str:
    """Returns which studies are not there, and why."""
    reasons = {**content["skipped"], **content["failures"]}
    lines = "".join(
        f"<li>{text(SECTIONS[name].title)} ({name}): {text(why)}</li>"
        for name, why in reasons.items()
    )
    return f"<h3>Studies that are not here</h3><ul>{lines}</ul>" if lines else ""


def _run(content: Fields) -> str:
    read, machine = content["text"], content["environment"]
    about = {
        "model": content["model"]["name"],
        "hash of its weights": content["model_hash"],
        "text": read["source"],
        **({"fingerprint of the corpus": read["corpus"]} if "corpus" in read else {}),
        "fingerprint of what was fitted on": read["fit"],
        "fingerprint of what was evaluated on": read["eval"],
        "passes that read activations": content["passes"],
        "processor": machine["cpu"],
        "devices": ", ".join(machine["devices"]),
    }
    versions = {key: value for key, value in machine.items() if key not in ("cpu", "devices")}
    durations = [[name, _duration(study)] for name, study in content["studies"].items()]
    durations.append(
        ["all", f"{sum(study['seconds'] for study in content['studies'].values()):.0f} s"]
    )
    settings = [[name, _setting(value)] for name, value in content["config"].items()]
    return (
        facts(about)
        + listed("How long the studies took", ("study", "time"), durations)
        + listed("Versions", ("package", "version"), list(versions.items()))
        + listed("Settings", ("setting", "value"), settings)
    )


def _duration(study: Fields) -> str:
    return f"{study['seconds']:.1f} s" + (", in an earlier run" if study["read_back"] else "")


def _setting(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "–" if value is None else str(value)
