"""Every cell of the page of all studies is the figure of the row that its headings
name; all words on it are right.
"""

import html.parser
import itertools
import re

import pytest

from jmat.studies.overview.page import page
from jmat.studies.overview.tables import matrix

_COUNT = itertools.count(1)
TWO = ("mat", "id")
PRECISIONS = ("precision@1", "precision@5", "precision@10")


def figure(**fields):
    """A row whose value and interval no other row has."""
    k = next(_COUNT)
    return {"n": 40, "value": k / 1000, "low": k / 1000 - 0.4, "high": k / 1000 + 0.3} | fields


def written(row):
    """A cell as people read it: value, and its interval below."""
    value, low, high = (
        f"{row[key]:.3f}".replace("-", "\N{MINUS SIGN}") for key in ("value", "low", "high")
    )
    return f"{value}|{low} to {high}"


METRICS = (*PRECISIONS, "surprisal", "kl", "perplexity", "recall@1")
JUMP = [
    figure(map=m, layer=l, target=2, metric=metric)
    for m in TWO
    for l in range(3)
    for metric in METRICS
]
PAIRS = [(0, 1), (0, 2), (1, 2)]
R2 = [
    figure(map=m, layer=i, target=j, metric=x)
    for m in TWO
    for i, j in PAIRS
    for x in ("r2", "r2_weighted")
]
PARTS = [
    *(
        figure(map=m, layer=l, target=2, metric=metric)
        for m in ("mat_attn", "mat_ffn", "mat_ln1_ln2", "mat")
        for l in range(3)
        for metric in METRICS
    ),
    *(
        figure(map=part, layer=i, target=i, metric=metric)
        for part in ("ln_1", "attn", "ln_2", "ffn")
        for i in range(2)
        for metric in ("r2", "r2_weighted")
    ),
]
CURVE = ("layers", "precision@1", "precision@5", "flops", "flops_ratio", "flops_ratio_token")
EXIT = [
    *(
        figure(map=m, confidence="gap", metric=metric, **{"lambda": value})
        for m, values in (("mat", (-1.112, 0.5)), ("id", (-1.112, 0.5, 1.0112)))
        for value in values
        for metric in CURVE
    ),
    *(
        figure(map=m, confidence="gap_cheap", lambda_cheap=0.5, metric=metric)
        for m in TWO
        for metric in CURVE
    ),
    *(
        figure(map=m, confidence=c, metric=metric)
        for m in (*TWO, "mat - id")
        for c in ("gap", "entropy")
        for metric in ("layers_saved@0.95", "layers_saved@0.90")
    ),
    *(
        figure(map="mat", check=check, batch=batch, level=0.95, metric=metric)
        for check in ("naive", "cheap")
        for batch in (1, 40)
        for metric in ("time_ratio", "seconds_per_example")
    ),
]
SCORES = ("linearity", "linearity_without_residual")
STEP = (
    *(s + end for s in SCORES for end in ("", "_adjusted", "_held_out")),
    "contribution_norm",
    "cosine",
)
LINEARITY = [
    *(figure(map="mat", layer=i, target=j, metric=metric) for i, j in PAIRS for metric in STEP),
    *(
        figure(map=part, layer=i, metric=metric)
        for part in ("ln_1", "attn", "ln_2", "ffn")
        for i in range(2)
        for metric in STEP[:6]
    ),
    *(figure(map="stream", layer=layer, metric="anisotropy") for layer in range(3)),
]
COSTS = ("perplexity", "kl", "precision@1", "parameters", "flops", "microseconds_per_token")
PRUNE = [
    *(
        figure(method=method, removed=k, blocks=blocks, metric=metric)
        for method in ("delete", "map", "distil", "merge")
        for k, blocks in enumerate(("none", "1", "0-1"))
        for metric in COSTS
    ),
    *(
        figure(metric="block_score", score=s, layer=i, target=i + 1)
        for s in ("kl", "angular")
        for i in range(2)
    ),
]
PROBE = [
    *(
        figure(map=kind, layer=layer, metric="accuracy")
        for kind in ("ridge", "logistic")
        for layer in range(3)
    ),
    figure(map="majority", metric="accuracy"),
]
STUDIES = {
    "layer_jump": JUMP,
    "r2": R2,
    "submodule_ablation": PARTS,
    "early_exit": EXIT,
    "linearity": LINEARITY,
    "prune": PRUNE,
    "probe": PROBE,
    "peek": [{"metric": "precision@1", "value": 1.0, "n": 1, "map": "mat", "layer": 0}],
}
PEEK = {
    "model": "tiny",
    "task": "next",
    "blocks": 2,
    "layers": [0, 1, 2],
    "sentences": [
        {
            "text": "One two",
            "tokens": ["One", " two"],
            "shown": 1,
            "predictions": {
                "id": [
                    [[["a", 0.25]], [["b", 0.0004]]],
                    [[["x", 0.5]], [["b", 0.06]]],
                    [[["x", 1.0]], [["y", 0.16]]],
                ],
                "mat": [
                    [[["x", 0.3]], [["y", 0.2]]],
                    [[["z", 0.1]], [["q", 0.4]]],
                    [[["x", 1.0]], [["y", 0.16]]],
                ],
            },
        }
    ],
}
VERDICTS = [
    {"paper": paper, "statement": f"claim {k}", "published": f"published {k}", "rule": f"rule {k}", "verdict": verdict,
     "figures": f"here {k}"}
    for k, (paper, verdict) in enumerate(
        [("First", "holds"), ("Second", "not tested"), ("First", "does not hold"), ("First", "holds")]
    )
]  # fmt: skip
CONTENT = {
    "experiment": "report",
    "model": {"name": "tiny", "layers": 7, "width": 24, "causal": True},
    "model_hash": "0123456789abcdef",
    "text": {"source": "mails.txt", "corpus": "c" * 16, "fit": "f" * 16, "eval": "e" * 16, "num_fit": 1200,
             "num_eval": 340},
    "config": {"seed": 5, "method": ["delete", "map"], "skip_first": None},
    "studies": {
        name: {"rows": rows, "seconds": 10.0 * k + 0.25, "read_back": name == "r2", "config": {},
               "peek": PEEK if name == "peek" else None}
        for k, (name, rows) in enumerate(STUDIES.items(), 1)
    },
    "skipped": {},
    "failures": {},
    "verdicts": VERDICTS,
    "passes": 3,
    "environment": {"jmat": "9.1", "python": "3.11.7", "cpu": "a processor", "devices": ["2 x cpu", "1 x gpu"]},
}  # fmt: skip
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="{}pt" height="72pt"></svg>'
FIGURES = {
    "layer_jump": {"layer_jump": SVG.format(72)},
    "r2": {"r2": SVG.format(720)},
    "linearity": {name: SVG.format(360) for name in ("linearity", "geometry", "errors")},
}


class Page(html.parser.HTMLParser):
    """The tables by section and caption: their headings, and cell by row and column
    heading.
    """

    def __init__(self, content):
        super().__init__()
        self.section, self.text, self.tables, self.facts = "", "", {}, {}
        self._caption = self._down = self._term = ""
        self._head, self._span = [], 1
        self.feed(content)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag == "section":
            self.section = given["id"]
        if tag in ("caption", "th", "td", "dt", "dd", "summary"):
            self.text = ""
        if tag == "small" and self.text:
            self.text += "|"
        if tag == "tr":
            self._row = []
        if tag == "thead":
            self._head = []
        self._given = given if tag in ("th", "td") else getattr(self, "_given", {})
        if tag == "th":
            self._cell = given

    def handle_data(self, data):
        self.text += data

    def handle_endtag(self, tag):
        if tag == "caption":
            self._caption = self.text
            self.tables[self.section, self._caption] = {}
        elif tag == "summary":
            self._caption = self.text
        elif tag == "th" and self._cell.get("scope") == "row":
            self._down = self.text
        elif tag == "th":
            self._row.append(
                (self.text, int(self._cell.get("colspan", 1)), "rowspan" in self._cell)
            )
        elif tag == "td":
            self._row.append((self.text, self._given))
        elif tag == "tr" and self._row and len(self._row[0]) == 3:
            self._head.append(self._row)
        elif tag == "tr":
            table = self.tables.setdefault((self.section, self._caption), {})
            for column, (text, given) in zip(self._columns(), self._row, strict=True):
                table[(self._down, *column)] = (text, given)
        elif tag == "dt":
            self._term = self.text
        elif tag == "dd":
            self.facts.setdefault(self._term, []).append(self.text)

    def _columns(self):
        first = self._head[0][1:]
        if len(self._head) == 1:
            return [(text,) for text, *_ in first]
        outer = [text for text, span, _ in first for _ in range(span)]
        return [(group, text) for group, (text, *_) in zip(outer, self._head[1], strict=True)]


@pytest.fixture(scope="module")
def content():
    return page(CONTENT, FIGURES)


@pytest.fixture(scope="module")
def shown(content):
    return Page(content)


MAPS = {"mat": "linear map", "id": "logit lens", "mat - id": "difference", "mat_attn": "linear map of attention",
        "mat_ffn": "linear map of feed-forward", "mat_ln1_ln2": "linear map of norms"}  # fmt: skip
PART = {"ln_1": "first norm", "attn": "attention", "ln_2": "second norm", "ffn": "feed-forward"}
METHODS = {"delete": "deleted", "map": "linear map", "distil": "distilled map", "merge": "merged"}
WORDS = {
    **{metric: metric for metric in PRECISIONS},
    "surprisal": "surprisal (nats)",
    "kl": "KL (nats)",
    "r2": "R²",
    "layers": "blocks run",
    "flops_ratio": "FLOPs, whole text",
    "flops_ratio_token": "FLOPs, one token",
    "layers_saved@0.95": "blocks saved at 95 %",
    "layers_saved@0.90": "blocks saved at 90 %",
    "time_ratio": "time / full pass",
    "linearity": "in sample",
    "linearity_adjusted": "adjusted",
    "linearity_held_out": "held out",
    "linearity_without_residual": "without residual, in sample",
    "linearity_without_residual_held_out": "without residual, held out",
    "contribution_norm": "norm added / norm of stream",
    "cosine": "cosine of neighbours",
    "perplexity": "perplexity",
    "parameters": "parameters",
    "flops": "flops",
    "microseconds_per_token": "µs a token",
}
LAMBDAS = {-1.112: "\N{MINUS SIGN}1.112", 0.5: "0.5"}


def by_layer(rows, metrics, names=MAPS):
    return {
        (str(row["layer"]), WORDS[row["metric"]], names[row["map"]]): row
        for row in rows
        if row["metric"] in metrics and row["map"] in names
    }


def at_steps(metrics):
    steps = [row for row in LINEARITY if row["map"] == "mat" and row["target"] == row["layer"] + 1]
    return {
        (str(row["layer"]), WORDS[row["metric"]]): row for row in steps if row["metric"] in metrics
    }


def parts(rows, metric):
    return {
        (str(row["layer"]), PART[row["map"]]): row
        for row in rows
        if row["map"] in PART and row["metric"] == metric
    }


def exits(**wanted):
    return [row for row in EXIT if all(row.get(key) == value for key, value in wanted.items())]


# Section and caption → heading of the line and of the columns → row.
TABLES = {
    ("layer_jump", "Predictions by layer, with 95 % intervals"): by_layer(
        JUMP, (*PRECISIONS, "surprisal")
    ),
    **{
        ("r2", f"Held-out R² of the {words}: from layer (down) to layer (across)"): {
            (str(row["layer"]), "R²", str(row["target"])): row
            for row in R2
            if (row["map"], row["metric"]) == (kind, "r2")
        }
        for kind, words in (("mat", "linear map"), ("id", "identity"))
    },
    ("submodule_ablation", "Predictions where parts are replaced from a layer on"): by_layer(
        PARTS, ("precision@1", "surprisal", "kl")
    ),
    ("submodule_ablation", "Held-out R² of each part's map alone, by block"): parts(PARTS, "r2"),
    ("early_exit", "Share of the blocks saved, by confidence"): {
        (row["confidence"], WORDS[row["metric"]], MAPS[row["map"]]): row
        for row in EXIT
        if row["metric"].startswith("layers_saved")
    },
    ("early_exit", "The paper's rule, by its threshold"): {
        (LAMBDAS[row["lambda"]], WORDS[row["metric"]], MAPS[row["map"]]): row
        for row in exits(confidence="gap")
        if row.get("lambda") in LAMBDAS
        and row["metric"] in ("layers", "precision@1", "flops_ratio", "flops_ratio_token")
    },
    ("early_exit", "Measured time against the full pass"): {
        (f"{row['check']}, batch of {row['batch']}", "time / full pass"): row
        for row in exits(metric="time_ratio")
    },
    ("linearity", "Linearity of the step from a layer to the next"): at_steps(
        (*STEP[:3], "linearity_without_residual", "linearity_without_residual_held_out")
    ),
    ("linearity", "What a block does to the stream"): at_steps(("contribution_norm", "cosine")),
    ("linearity", "Linearity of each part, held out, by block"): parts(
        LINEARITY, "linearity_held_out"
    ),
    ("prune", "Pruned models, by the blocks that are removed"): {
        (row["blocks"], WORDS[row["metric"]], METHODS[row["method"]]): row
        for row in PRUNE
        if "blocks" in row
    },
    ("prune", "Scores of every block of the whole model"): {
        (str(row["layer"]), {"kl": "KL (nats)", "angular": "angle"}[row["score"]]): row
        for row in PRUNE
        if row["metric"] == "block_score"
    },
    ("probe", "Accuracy of the probe, by layer"): {
        (
            str(row["layer"]),
            {"ridge": "ridge classifier", "logistic": "logistic regression"}[row["map"]],
        ): row
        for row in PROBE
        if "layer" in row
    },
}


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{table[0]}-{table[1][:20]}")
def test_every_cell_is_the_figure_that_its_headings_name(shown, table):
    found = {place: text for place, (text, _) in shown.tables[table].items() if text}
    assert found == {place: written(row) for place, row in TABLES[table].items()}


def test_there_are_no_other_tables(shown):
    figures = {table for table in shown.tables if table[0] in STUDIES and table[0] != "peek"}
    assert figures == set(TABLES)


def test_columns_come_in_the_order_of_the_metrics(shown):
    columns = list(
        dict.fromkeys(place[1] for place in shown.tables["layer_jump", next(iter(TABLES))[1]])
    )
    assert columns == ["precision@1", "precision@5", "precision@10", "surprisal (nats)"]
    lines = list(
        dict.fromkeys(
            place[0] for place in shown.tables["early_exit", "The paper's rule, by its threshold"]
        )
    )
    assert lines == ["\N{MINUS SIGN}1.112", "0.5"]


def test_figures_without_value_or_interval_say_so():
    rows = [figure(map="mat", layer=0, metric="accuracy") | {"value": None, "note": "too few"}]
    rows += [
        {"map": "mat", "layer": 1, "metric": "accuracy", "value": 0.25, "n": 9, "note": "too few"}
    ]
    made = page(
        {**CONTENT, "studies": {"probe": {**CONTENT["studies"]["probe"], "rows": rows}}}, {}
    )
    cells = Page(made).tables["probe", "Accuracy of the probe, by layer"]
    assert [text for text, _ in cells.values()] == ["–", "0.250"]
    assert "1 of 2 rows (mat from layer 0) have no value: too few" in made


@pytest.mark.parametrize("kind", TWO)
def test_tokens_are_shown_with_their_probabilities_and_what_the_full_model_says_too(shown, kind):
    words = {
        "id": "the layer's stream, read directly",
        "mat": "the same through a linear map to the final layer",
    }
    cells = shown.tables["peek", f"{kind}: {words[kind]}"]
    read = PEEK["sentences"][0]["predictions"][kind]
    said = {
        0.25: "25 %",
        0.0004: "< 0.1 %",
        0.5: "50 %",
        0.06: "6.0 %",
        1.0: "100 %",
        0.16: "16 %",
        0.3: "30 %",
    }
    said |= {0.2: "20 %", 0.1: "10 %", 0.4: "40 %"}
    assert list(dict.fromkeys(place[0] for place in cells)) == ["2|full", "1", "0|embed"]
    for label, layer in (("0|embed", 0), ("1", 1), ("2|full", 2)):
        for position, token in enumerate(("One", "·two")):
            ((top, probability),) = read[layer][position]
            text, given = cells[label, token]
            assert (text, given["title"]) == (top, said[probability])
            assert (given.get("class") == "same") == (top == ("x", "y")[position])
            assert float(given["style"].removeprefix("--p:")) == pytest.approx(
                probability**0.5, abs=6e-4
            )


def test_what_was_read_and_made_is_told(shown, content):
    said = {term: values[0] for term, values in shown.facts.items()}
    assert {term: said[term] for term in list(said)[3:]} == {
        "model": "tiny",
        "hash of its weights": "0123456789abcdef",
        "text": "mails.txt",
        "fingerprint of the corpus": "c" * 16,
        "fingerprint of what was fitted on": "f" * 16,
        "fingerprint of what was evaluated on": "e" * 16,
        "passes that read activations": "3",
        "processor": "a processor",
        "devices": "2 x cpu, 1 x gpu",
    }
    assert (
        "A causal model of 7 blocks, 24 wide. Maps were fitted at 1,200 positions of mails.txt and "
        "evaluated at 340 of other sentences." in content
    )
    cells = {caption: {place[0]: text for place, (text, _) in table.items()}
             for (_, caption), table in shown.tables.items()}  # fmt: skip
    assert cells["Versions"] == {"jmat": "9.1", "python": "3.11.7"}
    assert cells["Settings"] == {"seed": "5", "method": "delete, map", "skip_first": "–"}
    taken = {name: f"{10 * k + 0.25:.1f} s" for k, name in enumerate(STUDIES, 1)}
    assert cells["How long the studies took"] == taken | {
        "r2": "20.2 s, in an earlier run",
        "all": "362 s",
    }


def test_every_study_says_how_many_rows_and_examples_it_has(content):
    rows = [{**row, "n": 1000 + row["layer"]} for row in JUMP]
    made = page(
        {**CONTENT, "studies": {"layer_jump": {**CONTENT["studies"]["layer_jump"], "rows": rows}}},
        {},
    )
    assert (
        "Study layer_jump: 42 rows. n = 1,000 to 1,002. Intervals are 95 % bootstraps over "
        "sentences." in made
    )
    assert f"Study prune: {len(PRUNE)} rows. n = 40. Intervals" in content
    assert "Study peek: 1 rows. n = 1.<" in content
    assert f"<p>The most frequent label is right at {PROBE[-1]['value']:.3f}.</p>" in content


def test_claims_stand_under_their_papers_with_their_verdicts(content):
    before = content.partition('id="layer_jump"')[0]
    order = re.findall(
        r"<h3>(\w+)</h3>|badge (\w+)\">([^<]+)<|<b>claim (\d)</b>|<dd>([^<]+)</dd>", before
    )
    words = ["".join(found) for found in order]
    assert words[:3] == ["yesholds: 2", "nodoes not hold: 1", "opennot tested: 1"]
    assert words[3:] == [
        "First", "yesholds", "0", "here 0", "published 0", "rule 0", "nodoes not hold", "2", "here 2", "published 2",
        "rule 2", "yesholds", "3", "here 3", "published 3", "rule 3", "Second", "opennot tested", "1", "here 1",
        "published 1", "rule 1",
    ]  # fmt: skip
    terms = re.findall(r"<dt>(\w+)</dt>", before)
    assert terms == ["here", "published", "rule"] * 4


def test_figures_have_their_own_words_size_and_colours(content):
    found = re.findall(
        r'<figure(.*?) style="--width:(\d+)px">.*?aria-label="Figure: (.*?)".*?<figcaption>(.*?)</figcaption>',
        content,
    )
    assert [(kind.strip(), int(width)) for kind, width, *_ in found] == [
        ("class=lines", 106), ("", 1056), ("class=lines", 528), ("class=lines", 528), ("", 528)
    ]  # fmt: skip
    words = [
        "precision@1, @5 and @10 and surprisal by layer, of the linear map and the logit lens",
        "two heat maps of R² by source and target layer, of the linear map and of the identity",
        "linearity of the step from each layer to the next, and of each sub-module",
        "norm of what each block adds, cosine of neighbouring layers, and anisotropy, by layer",
        "histogram of the tokens&#x27; squared errors, by step",
    ]
    for (kind, _, label, caption), said in zip(found, words, strict=True):
        assert label == said
        bands = " Bands are 95 % intervals." if kind else ""
        assert caption == f"{said[0].upper()}{said[1:]}.{bands}"


def test_studies_that_are_missing_are_listed_with_their_reasons():
    made = page(
        {**CONTENT, "skipped": {"probe": "no tokenizer"}, "failures": {"prune": "it diverged"}}, {}
    )
    listed = re.findall(r"<li>([^<]* \((?:probe|prune)\)[^<]*)</li>", made)
    assert listed == [
        "What a linear probe reads off each layer (probe): no tokenizer", "Which blocks can go (prune): it diverged"
    ]  # fmt: skip
    assert "Studies that are not here" not in page(CONTENT, {})


def test_wide_tables_come_in_parts_that_fit_a_page():
    rows = [
        figure(map="mat", layer=i, target=j, metric="r2") for j in range(1, 31) for i in range(j)
    ]
    made = matrix(rows, "R² of all pairs")
    tables = re.findall(r"<details.*?</details>", made, re.DOTALL)
    summaries = [re.search(r"<summary>(.*?)</summary>", table)[1] for table in tables]
    assert summaries == [
        "R² of all pairs, target layers 1 to 15",
        "R² of all pairs, target layers 16 to 30",
    ]
    for table, targets, layers in zip(
        tables, (range(1, 16), range(16, 31)), (range(15), range(30)), strict=True
    ):
        heads = re.findall(r'<th scope="col">(\d+)</th>', table)
        assert heads == [str(j) for j in targets]
        lines = re.findall(r'<tr><th scope="row">(\d+)</th>(.*?)</tr>', table)
        assert [line for line, _ in lines] == [str(i) for i in layers]
        for i, cells in lines:
            found = re.findall(r"<td>([\d.−]*)(?:<small>.*?</small>)?</td>", cells)
            values = {(row["layer"], row["target"]): f"{row['value']:.3f}" for row in rows}
            assert found == [values.get((int(i), j), "") for j in targets]
    assert len(re.findall("<details", matrix(rows[: 16 * 17 // 2], "R²"))) == 1
