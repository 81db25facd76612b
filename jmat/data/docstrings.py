"""Docstrings → English sentences: code, doctests, tables, headings and markup go, whole
sentences for people stay.
"""

import re
from collections.abc import Iterator

# --------------------------------------------------------------------------------------------------
# Docstring → paragraphs: each rule rewrites one kind of markup, a blank line meaning "a paragraph
# ends here"

# a paragraph that describes a parameter, whose name stood before it and is dropped
_DESCRIPTION = "\n\n\x02"
_NAME = r"[*`'\"\w.\[\]~]+(?:, ?[*`'\"\w.]+)*"
_HEADINGS = (
    r"(?:[Aa]rgs?|[Aa]rguments|[Pp]arameters|Keyword [Aa]rg(?:ument)?s|[Kk]wargs|Attributes|Fields|Inputs?|Outputs?"  # noqa: E501
    r"|[Rr]eturns?|[Yy]ields?|[Rr]aises|[Ee]xamples?|Example usage|Usage|Notes?|Warnings?|Shapes?)"
)
_ADMONITIONS = "(?:note|warning|tip|important|caution|hint|attention)"
_RULES = [
    (re.compile(pattern, re.MULTILINE), replacement)
    for pattern, replacement in [
        # fenced code; literal blocks (what is indented more than the line that ends in "::");
        # doctests and shell lines
        (r"^ *(```|~~~)(?:.|\n)*?(?:^ *\1 *$|\Z)", "\n\n"),
        (r"^( *)(?!\.\. )(.*)::$(?:(?:\n *$)*\n\1 +\S.*)*", r"\1\2:\n\n"),
        (r"^ *(?:>>>|\$ |% |In \[).*(?:\n *\S.*)*", "\n\n"),
        # directives, citations and comments go with their body, but admonitions keep it
        (rf"^( *)\.\.(?! {_ADMONITIONS}::)(?: .*)?$(?:(?:\n *$)*\n\1 +\S.*)*", "\n\n"),
        (rf"^ *\.\. {_ADMONITIONS}::", "\n\n"),
        # sections of links, then underlined headings, then headings with a colon, of Markdown or of
        # HTML; tables, rules
        (
            r"^ *(?:See Also|References?|Bibliography)\n *-{3,} *\n(?:(?!.*\n *-{3,} *$).*(?:\n|\Z))*",  # noqa: E501
            "\n\n",
        ),
        (
            r"^( *)(?:See [Aa]lso|References?|Bibliography|TODO.*): *$(?:(?:\n *$)*\n\1 +\S.*)*",
            "\n\n",
        ),
        (r"^.*\n *([=~^\"'*+#\-])\1{2,} *$", "\n\n"),
        (r"^ *(?:#+ .*|</?\w.*|[|+=\-].*[|+=\-]|.*\S {3,}\S.* {3,}\S.*|.* \| .*)$", "\n\n"),
        # NumPy "name : type", Sphinx ":param name:", Hugging Face "name (`type`):", bullets
        (rf"^ *{_NAME} : .*$", _DESCRIPTION),
        (rf"^ *(?:[-*] )?{_NAME} ?\([^()]*\) ?:(?=\s)", _DESCRIPTION),
        (r"^ *:(?:type|rtype)\b.*$", "\n\n"),
        (r"^ *:\w+(?: [^:\n`]*)?:(?=\s)", _DESCRIPTION),
        (rf"^ *(?:[-*] )?{_NAME} ?\((?=.*`).*?\) ?:(?=\s)", _DESCRIPTION),
        (r"^ *\*{1,2}\w+ ?:(?=\s)", _DESCRIPTION),
        (r"^ *(?:[-*•+]|\(?\d{1,2}[.)]|\(?[a-z]\)) +", "\n\n"),
    ]
]
_SECTION = re.compile(rf"^( *){_HEADINGS}: *$\n((?:(?:\1 +\S.*|[ ]*)(?:\n|\Z))*)", re.MULTILINE)


def _section(match: re.Match[str]) -> str:
    """Returns a Google-style section without its heading; entries stand at the first
    line's indentation.
    """
    body = match[2]
    indent = body[: len(body) - len(body.lstrip())].rpartition("\n")[2]
    return "\n\n" + re.sub(
        rf"^{indent}{_NAME}(?: ?\(.*?\))? ?: ", _DESCRIPTION, body, flags=re.MULTILINE
    )


def _paragraphs(docstring: str) -> list[str]:
    """Returns the paragraphs of prose in a docstring, without code, doctests, tables,
    headings and parameter names.
    """
    text = _SECTION.sub(_section, docstring)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    paragraphs = (" ".join(p.split()) for p in re.split(r"\n(?: *\n)+", text))
    return [
        re.sub("\x02 ?([a-z]+ )?", lambda m: (m[1] or "").capitalize(), p) for p in paragraphs if p
    ]


# --------------------------------------------------------------------------------------------------
# Paragraph → sentences

_INLINE = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r":(?:math|eq):`[^`\n]*`", "$"),  # no prose: the sentence that holds it will be refused
        (r":[\w:+-]+:(?=`)", ""),
        (r"`([\w.]+)'", r"'\1'"),  # quotes of another age
        (r"`~[\w.]*?(\w+)`", r"\1"),  # :func:`~jax.numpy.sum` shows as sum
        # also `text <link>`_
        (r"`+!?(?:\.(?=[A-Z]))?([^`<\n]+?)(?: *<[^`>\n]*>)?`+(?:__?\b)?", r"\1"),
        (r"\[([^\[\]\n]*)\]\((?:[^()\s]|\([^()\s]*\))*\)", r"\1"),
        (r" ?\[(?:\d+|[A-Z]\w*\d)\]_", ""),
        (r"\[([A-Z~][\w.]+)\]", r"\1"),
        (r"(?<![\w*])(\*\*?)(?=\S)([^*\n]+?)(?<=\S)\1(?![\w*])", r"\2"),
        (r"\\([*_`|\\ ])", r"\1"),
        (r"[\u2018\u2019]", "'"),
        (r"[\u201c\u201d]|''", '"'),
        (r"[\u2013\u2014]", "-"),
        (r" {2,}", " "),
        (r" ([,.;:!?)])(?=\s|$)", r"\1"),
    ]
]
_ABBREVIATIONS = frozenset(
    "e.g. i.e. eg. ie. cf. vs. resp. approx. al. fig. figs. eq. eqs. sec. secs. nos. vol. p. pp. "
    "ch. dr. mr. prof. st. inc. ltd. jr. a.k.a. w.r.t. incl. esp. ...".split()
)
# A capital before the full stop is an initial ("J. Smith"), unless an opening word follows ("the
# matrix A. It is").
_OPENING = r"(?=(?:The|This|These|That|If|In|It|Its|A|An|For|When|Then|To|By|As|At|On|Note|We|You|Use|See|Default)\b)"  # noqa: E501
_BOUNDARY = re.compile(
    rf"""(?:(?<=[.!?])|(?<=[.!?]["')])) (?:(?<!\b[A-Z]\. )|{_OPENING})(?=["'(]?[A-Z])"""
)
_CHARACTERS = re.compile(r"""[A-Z][\w ,.;:'"()/!?%-]*[.!?]["')]?""", re.ASCII)
_REFUSED = re.compile(
    r"(?:TODO|FIXME|XXX|NB|Copyright|Licensed|Defaults?|Shape|Adapted|Copied)\b|.*(?:www|http|TODO|(?<![\d ])%)"  # noqa: E501
)
_CODE_WORD = re.compile(r"_|[A-Za-z]\.\w\w|\w\w\.[A-Za-z]|\(\)|[a-z][A-Z]|[a-z]\d|\d[a-z]|\w/\w")
_STOP_WORDS = frozenset(
    "a about after all also an and are as at be been before but by can do does each either for "
    "from has have how if in into is it its may more must no not of on one only or other out over "
    "same should so such than that the their them then there these they this to two under up use "
    "used using was we were what when where whether which while will with within without would you "
    "your".split()
)


def sentences(docstring: str) -> Iterator[str]:
    """Returns the clean English sentences of a docstring, in their order; whatever is
    not one is dropped.
    """
    text = "\n".join(_paragraphs(docstring))
    for pattern, replacement in _INLINE:
        text = pattern.sub(replacement, text)
    for paragraph in text.split("\n"):
        sentence = ""
        for piece in _BOUNDARY.split(paragraph.strip()):
            sentence = f"{sentence} {piece}" if sentence else piece
            if piece.rpartition(" ")[2].lstrip("(\"'").lower() not in _ABBREVIATIONS:
                if _reads_well(sentence):
                    yield sentence
                sentence = ""


def _reads_well(sentence: str) -> bool:
    """Returns whether this is one sentence of English: its shape, its length, few
    identifiers, enough of the small words.
    """
    if not _CHARACTERS.fullmatch(sentence) or _REFUSED.match(sentence):
        return False
    words = sentence.split()
    identifiers = sum(bool(_CODE_WORD.search(word)) for word in words)
    small = sum(word in _STOP_WORDS for word in sentence.lower().split())
    return (
        5 <= len(words) <= 60
        and not _CODE_WORD.search(words[0])
        and identifiers <= min(2, len(words) / 8)
        and small >= max(2, len(words) / 5)
        and sum(map(str.islower, sentence)) >= 0.75 * sum(map(len, words))
        and sentence.count("(") == sentence.count(")")
        and sentence.count('"') % 2 == 0
    )
