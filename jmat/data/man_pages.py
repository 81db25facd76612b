"""Manual pages → paragraphs of prose: roff requests and escapes go, examples and tables
too.
"""

import re
from collections.abc import Iterator

# requests that begin another paragraph
_BREAKS = frozenset("SH SS PP P LP TP TQ IP HP br sp RS RE UR MT nf fi".split())
_FONTS = frozenset("B I R SM SB BI BR IB IR RB RI".split())
_LITERAL = {"nf": "fi", "EX": "EE", "TS": "TE", "de": ".", "ig": "."}  # from one to the other
_ESCAPES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r'\\".*', ""),
        (r"\\f(?:\[[^]]*\]|\(..|.)", ""),
        (r"\\s(?:[-+]?\d|\[[^]]*\])", ""),
        (r"\\(?:\(aq|\[aq\]|\(cq|\[cq\]|\(oq|\[oq\]|')", "'"),
        (r"\\(?:\(dq|\[dq\]|\(lq|\[lq\]|\(rq|\[rq\]|\*\(lq|\*\(rq)", '"'),
        (r"\\(?:\(em|\[em\]|\(en|\[en\]|-|\(hy|\[hy\])", "-"),
        (r"\\(?:\(bu|\[bu\])", " "),
        (r"\\[ ~0]", " "),
        (r"\\[&:%,/^|)c]", ""),
        (r"\\(?:e|\(rs|\[rs\])", r"\\"),
    ]
]
_ARGUMENT = re.compile(r'"((?:[^"]|"")*)"?|(\S+)')


def man_paragraphs(page: str) -> Iterator[str]:
    """Returns the paragraphs of a manual page in the macros `man`; none of one in
    `mdoc`, whose text stands in its macros.
    """
    if re.search(r"^\.(?:Dd|Nm)\b", page, re.MULTILINE):
        return
    held: list[str] = []
    until, tag = "", False  # the request that ends what is skipped; whether a label comes next
    for line in page.splitlines():
        request, arguments = _request(line)
        if until:
            until = "" if request == until else until
            continue
        if request in _LITERAL:
            until = _LITERAL[request]
        if request in _BREAKS or request in _LITERAL or not line.strip():
            yield from _joined(held)
            held, tag = [], request in ("TP", "TQ")
            continue
        words = line if request is None else "".join(arguments) if request in _FONTS else ""
        if request in ("B", "I", "SM", "SB", "R"):
            words = " ".join(arguments)
        if words and tag:  # the label of a list is no prose
            tag = False
        elif words:
            held.append(_plain(words))
    yield from _joined(held)


def _request(line: str) -> tuple[str | None, list[str]]:
    """Returns the request of a line and its arguments; None for a line of text."""
    if not line.startswith((".", "'")):
        return None, []
    name, _, rest = line[1:].strip().partition(" ")
    arguments = [quoted or plain for quoted, plain in _ARGUMENT.findall(rest)]
    return name, arguments


def _plain(text: str) -> str:
    for pattern, replacement in _ESCAPES:
        text = pattern.sub(replacement, text)
    return text


def _joined(lines: list[str]) -> Iterator[str]:
    text = " ".join(" ".join(lines).split())
    if text:
        yield text
