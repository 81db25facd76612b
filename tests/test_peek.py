"""What the layers predict, named and counted; and the page, parsed as a browser would."""

import html.parser
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmat.capture.activations import capture
from jmat.checkpoint import parameters
from jmat.checkpoint.load import load
from jmat.data.examples import mask_positions
from jmat.forward import logits, run
from jmat.maps.files import MapsInfo, save_maps
from jmat.maps.fit import fit_map
from jmat.maps.sharing import save_maps as save_lens
from jmat.maps.types import Identity, Linear
from jmat.models.sites import stream_sites
from jmat.report.notes import OVERFLOWS
from jmat.runtime.digests import model_hash
from jmat.studies.peek import Options, token_texts
from jmat.studies.peek import predictions as peeking
from jmat.studies.peek import run as run_peek
from jmat.studies.peek.page import number, page, percent, token_table
from jmat.studies.peek.token_texts import TokenTexts
from tests import scripts

REFERENCE = "tests/data/reference"
SENTENCES = ["Return a new list.", "The naïve 数 <b>&"]
HOSTILE = [
    "</script><script>x()</script>",
    "<!--",
    "-->",
    "]]>",
    '"',
    "'",
    "&amp;",
    " the",
    "\n",
    "\u2028\u202e",
    "",
    "\\xe2",
]


def read(name, sentences=SENTENCES, layers=None, top=5):
    """A `Peek` through `id` and through maps that are nearly the identity."""
    model, tokenizer = load(f"{REFERENCE}/{name}")
    L, D = model.config.layers, model.config.width
    masked = not model.config.causal
    split = peeking.all_positions(sentences, tokenizer, max_length=128, masked=masked)
    acts = capture(
        model, mask_positions(split, tokenizer.mask_token_id if masked else None), stream_sites(L)
    )
    streams = [acts[site] for site in stream_sites(L)]
    noise = np.random.default_rng(0).normal(size=(L, D, D)).astype(np.float32) / D
    layers = layers or range(L + 1)
    shortcuts = {
        "id": {layer: Identity() for layer in layers},
        "mat": {
            layer: Linear(np.eye(D, dtype=np.float32) + noise[layer]) if layer < L else Identity()
            for layer in layers
        },
    }
    found = peeking.peek(model, tokenizer, sentences, split, streams, shortcuts, name=name, top=top)
    return found, model, tokenizer, split, streams, shortcuts


@pytest.fixture(scope="module")
def gpt2():
    return read("gpt2")


@pytest.fixture(scope="module")
def bert():
    return read("bert", ["return a [MASK] list .", "the value"], layers=[0, 2, 3])


@pytest.fixture
def hostile():
    """Nine layers of nothing but trouble."""
    tokens = HOSTILE

    def tops(shift):
        return [[[tokens[(i + shift) % len(tokens)], 0.5], ["x", 0.25]] for i in range(len(tokens))]

    predictions = {
        kind: [tops(shift + k) for k in (0, 1, 0)] for kind, shift in (("id", 0), ("mat", 3))
    }
    sentence = {"text": "".join(tokens), "tokens": tokens, "shown": 0, "predictions": predictions}
    return {
        "model": "<i>gpt2</i>",
        "task": "next",
        "blocks": 4,
        "layers": [0, 1, 4],
        "sentences": [sentence],
    }


# --- predictions ----------------------------------------------------------------------------------


def test_causal_predictions_are_the_models_own(gpt2):
    found, model, _, split, streams, shortcuts = gpt2
    texts = TokenTexts(gpt2[2])
    for row, sentence in enumerate(found["sentences"]):
        start, length = split.starts[row], split.lengths[row]
        full = run(model, split.tokens[None, start : start + length], keep=("logits",))[1][
            "logits"
        ][0]
        assert len(sentence["tokens"]) == length
        for kind, maps in shortcuts.items():
            for layer, by_position in zip(
                found["layers"], sentence["predictions"][kind], strict=True
            ):
                scores = (
                    full
                    if layer == 4
                    else logits(model, maps[layer](jnp.asarray(streams[layer][split.rows == row])))
                )
                p = np.asarray(jax.nn.softmax(scores))
                for position, top in enumerate(by_position):
                    best = np.argsort(-p[position], kind="stable")[:5]
                    assert [token for token, _ in top] == [texts(token) for token in best.tolist()]
                    np.testing.assert_allclose([q for _, q in top], p[position, best], rtol=1e-3)


def test_masked_positions_are_masked_in_turn(bert):
    found, model, tokenizer, split, _, _ = bert
    texts = TokenTexts(tokenizer)
    tokens = split.tokens[: split.lengths[0]]
    assert found["layers"] == [0, 2, 3]
    for position in range(len(tokens)):
        masked = np.where(
            np.arange(len(tokens)) == position, tokenizer.mask_token_id, tokens
        ).astype(np.int32)
        scores = run(model, masked[None], keep=("logits",))[1]["logits"][0, position]
        for kind in ("id", "mat"):
            assert found["sentences"][0]["predictions"][kind][-1][position][0][0] == texts(
                int(scores.argmax())
            )


def test_sentences_must_have_tokens_that_fit(gpt2):
    tokenizer = gpt2[2]
    for sentences, message in (
        ([""], "no tokens"),
        (["a", "b " * 200], r"2\d\d tokens; expected 1 to 128"),
        ([], "no sentence"),
    ):
        with pytest.raises(ValueError, match=message):
            peeking.all_positions(sentences, tokenizer, max_length=128, masked=False)
    _, model, tokenizer, split, streams, shortcuts = gpt2
    with pytest.raises(ValueError, match="top=0: expected 1 to 768"):
        peeking.peek(model, tokenizer, SENTENCES, split, streams, shortcuts, name="", top=0)


def test_measures_compare_every_reading_with_the_full_model(gpt2):
    found, model, _, split, streams, shortcuts = gpt2
    full = np.asarray(jax.nn.log_softmax(logits(model, streams[4])), np.float64)
    for kind, maps in shortcuts.items():
        for layer in found["layers"]:
            scores = np.asarray(logits(model, maps[layer](jnp.asarray(streams[layer]))), np.float64)
            log_p = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
            expected = {
                "entropy": -(np.exp(log_p) * log_p).sum(-1),
                "kl": (np.exp(full) * (full - log_p)).sum(-1),
                "rank": 1
                + (log_p > np.take_along_axis(log_p, full.argmax(-1)[:, None], -1)).sum(-1),
            }
            for row, sentence in enumerate(found["sentences"]):
                measures = sentence["measures"][kind]
                assert list(measures) == ["entropy", "kl", "rank"]
                for name, values in expected.items():
                    np.testing.assert_allclose(
                        measures[name][layer],
                        values[split.rows == row],
                        rtol=2e-3,
                        atol=2e-4,
                        err_msg=f"{kind} {layer} {name}",
                    )


def test_what_is_no_prediction_is_shown_as_none(gpt2, tmp_path):
    """A map that overflows leaves a dash everywhere, and all files are still JSON."""
    model, tokenizer = gpt2[1:3]
    D = model.config.width
    maps = {
        "mat.1.4": Linear(np.full((D, D), np.nan, np.float32)),
        "mat.2.4": gpt2[5]["mat"][2],
    }
    results = run_peek(model, SENTENCES[:1], Options(top=2), tokenizer=tokenizer, maps=maps)
    results.save(tmp_path)
    text = (tmp_path / "peek.json").read_text("utf-8")
    found = json.loads(text, parse_constant=pytest.fail)
    sentence, T = found["sentences"][0], len(found["sentences"][0]["tokens"])
    assert found["layers"] == [1, 2, 4]
    assert sentence["predictions"]["mat"][0] == [[["—", None]] * 2] * T
    assert all(measure[0] == [None] * T for measure in sentence["measures"]["mat"].values())
    for kind, layers in (("mat", (1, 2)), ("id", (0, 1, 2))):
        for measure in sentence["measures"][kind].values():
            assert None not in [value for layer in layers for value in measure[layer]]
    rows = [row for row in results.rows if row["map"] == "mat" and row["layer"] == 1]
    assert {(row["value"], row["top_1"], row["probability_1"]) for row in rows} == {
        (None, "—", None)
    }
    for table in (page(found), token_table(found, 0, "mat")):
        assert "—" in table
        assert "nan" not in table.split("<script>")[0].lower()
    (*_, (about, (_, *body))) = Page((tmp_path / "peek.html").read_text("utf-8")).tables
    assert about["data-map"] == "mat"
    for cell in body[-1][1:]:
        assert cell["text"] == cell["data-kl"] == cell["data-rank"] == "—"
        assert "same" not in cell.get("class", "")
        assert set(cell["style"].split(";")) == {
            f"--{name}:0.000" for name in ("p", "entropy", "kl", "rank")
        }
    assert "—" in results.table()
    assert {row["note"] for row in rows} == {OVERFLOWS}
    nothing = {
        **found,
        "sentences": [{**sentence, "predictions": {"mat": [[[["—", None]]] * T] * 3}}],
    }
    assert {row["value"] for row in peeking.peek_rows(nothing)} == {None}
    none = {name: [[None] * T] * 3 for name in ("entropy", "kl", "rank")}
    nothing["sentences"][0]["measures"] = {"mat": none}
    assert len(Page(page(nothing)).tables) == 1


# --- tokens ---------------------------------------------------------------------------------------


def test_byte_level_tokens_are_named_by_their_bytes(gpt2):
    _, _, tokenizer, *_ = gpt2
    texts = TokenTexts(tokenizer)
    text = "Return the value of x[0].\n\tNaïve — 数学"
    names = [texts(token) for token in tokenizer(text)["input_ids"]]
    raw = b"".join(name.encode().decode("unicode_escape").encode("latin-1") for name in names)
    assert raw.decode() == text
    assert " the" in names
    assert "\\xe6" in names
    assert texts(tokenizer.eos_token_id) == "<|endoftext|>"
    assert texts(100_000) == "[token 100000]"


def test_every_byte_has_one_letter(gpt2):
    letters = token_texts._byte_letters()
    assert sorted(letters.values()) == list(range(256))
    assert set(letters) <= set(gpt2[2].get_vocab())


def test_wordpiece_tokens_are_named_as_they_are(bert):
    tokens = bert[0]["sentences"][0]["tokens"]
    assert [tokens[0], tokens[-1]] == ["[CLS]", "[SEP]"]
    assert "[MASK]" in tokens
    assert any(token.startswith("##") for token in bert[0]["sentences"][1]["tokens"])


@pytest.mark.parametrize(
    ("token", "seen"),
    [
        (" the", "·the"),
        ("\n\n", "⏎⏎"),
        ("\t", "⇥"),
        ("", "(empty)"),
        ("a\x00\u202e\xa0", "a\\x00\\u202e\\xa0"),
        ("数", "数"),
    ],
)
def test_visible(token, seen):
    assert token_texts.visible(token) == seen


# --- results and the terminal ---------------------------------------------------------------------


def test_rows_hold_every_cell(gpt2):
    found = gpt2[0]
    rows = peeking.peek_rows(found)
    assert len(rows) == sum(len(s["tokens"]) for s in found["sentences"]) * 2 * 5
    for row in rows:
        top = found["sentences"][row["sentence"]]["predictions"][row["map"]][row["layer"]][
            row["position"]
        ]
        assert [[row[f"top_{k}"], row[f"probability_{k}"]] for k in range(1, 6)] == top
        assert (row["value"] == 1) == (row["top_1"] == row["full"])
        assert row["value"] == 1 or row["layer"] < row["target"] == 4
        assert all(isinstance(value, str | int | float) for value in row.values())


def test_terminal_shows_the_last_word_or_the_mask_layers_up(gpt2, bert):
    assert [s["shown"] for s in gpt2[0]["sentences"]] == [
        len(s["tokens"]) - 1 for s in gpt2[0]["sentences"]
    ]
    first, second = bert[0]["sentences"]
    assert first["tokens"][first["shown"]] == "[MASK]"
    assert second["shown"] == len(second["tokens"]) - 2  # before [SEP]
    text = peeking.format_peek(bert[0], 0)
    assert f"position {first['shown']}, with '[MASK]' masked" in text
    layers = [
        line.split()[0] for line in text.splitlines() if line.split() and line.split()[0].isdigit()
    ]
    assert layers == ["3", "2", "0"]
    for kind in ("id", "mat"):
        for k, line in zip(
            (2, 1, 0),
            [line for line in text.splitlines() if line.strip()[:1].isdigit()],
            strict=True,
        ):
            for token, _ in first["predictions"][kind][k][first["shown"]]:
                assert token_texts.visible(token) in line.split()


# --- the page -------------------------------------------------------------------------------------


class Page(html.parser.HTMLParser):
    """Reads tables back from a page; refuses tags that do not match."""

    VOID = frozenset({"meta", "input", "br"})

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.tables, self.script, self.attributes = [], [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        assert len(given) == len(attrs), f"an attribute twice: {tag} {attrs}"
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append((given, []))
        elif tag == "tr":
            self.tables[-1][1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][1][-1].append({"tag": tag, "text": "", **given})
        elif tag == "script":
            self.script.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "script" in self.open:
            self.script[-1] += data
        elif "th" in self.open or "td" in self.open:
            self.tables[-1][1][-1][-1]["text"] += data


@pytest.mark.parametrize("which", ["gpt2", "bert", "hostile"])
def test_page_shows_every_token_and_layer_as_the_json_has_them(which, request):
    found = request.getfixturevalue(which)
    found = found if which == "hostile" else found[0]
    found = json.loads(json.dumps(found))  # as in peek.json
    read_back = Page(page(found))
    assert len(read_back.tables) == 2 * len(found["sentences"])
    for about, (head, *body) in read_back.tables:
        sentence = found["sentences"][int(about["data-sentence"])]
        by_layer = sentence["predictions"][about["data-map"]]
        assert [cell["text"] for cell in head[1:]] == [
            token_texts.visible(token) for token in sentence["tokens"]
        ]
        assert [int("".join(filter(str.isdigit, row[0]["text"]))) for row in body] == found[
            "layers"
        ][::-1]
        for row, tops in zip(body, reversed(by_layer), strict=True):
            for cell, top, full in zip(row[1:], tops, by_layer[-1], strict=True):
                assert cell["text"] == token_texts.visible(top[0][0])
                assert ("same" in cell.get("class", "")) == (top[0][0] == full[0][0])
                assert cell["style"].split(";")[0] == f"--p:{np.sqrt(top[0][1]):.3f}"
                assert cell["aria-label"].startswith(f"{cell['text']}, {percent(top[0][1])}")
    data = json.loads(read_back.script[0])
    for shown, sentence in zip(data["sentences"], found["sentences"], strict=True):
        for kind, by_layer in sentence["predictions"].items():
            named = [
                [[[token_texts.visible(t), p] for t, p in top] for top in tops] for tops in by_layer
            ]
            assert shown["predictions"][kind] == named


def test_cells_hold_measures_and_buttons_show_them(gpt2, hostile):
    found, text = gpt2[0], page(gpt2[0])
    values = [
        v
        for s in found["sentences"]
        for m in s["measures"].values()
        for row in m["kl"]
        for v in row
    ]
    for about, (_, *body) in Page(text).tables:
        measures = found["sentences"][int(about["data-sentence"])]["measures"][about["data-map"]]
        for k, row in enumerate(reversed(body)):
            for t, cell in enumerate(row[1:]):
                style = dict(part.split(":") for part in cell["style"].split(";"))
                for name, by_layer in measures.items():
                    assert cell[f"data-{name}"] == number(by_layer[k][t])
                    assert 0 <= float(style[f"--{name}"]) <= 1
                fill = np.sqrt(max(measures["kl"][k][t], 0) / max(values))
                assert float(style["--kl"]) == pytest.approx(fill, abs=6e-4)
                assert cell["aria-label"].endswith(
                    f", entropy {cell['data-entropy']}, KL {cell['data-kl']}, rank {cell['data-rank']}"
                )
                assert (cell["data-rank"] == "1") == ("same" in cell.get("class", ""))
    buttons = {"every", "only-0", "only-1", "view-token", "view-entropy", "view-kl", "view-rank"}
    assert {value for name, value in Page(text).attributes if name == "id"} >= buttons
    for n in range(2):
        assert f":root:has(#only-{n}:checked) figure:not([data-n='{n}'])" in text
    shown = Page(text).script
    data = json.loads(shown[0])["sentences"]
    assert [each["measures"] for each in data] == [s["measures"] for s in found["sentences"]]
    # a page of an older peek.json has none
    assert "view-kl" not in {
        value for name, value in Page(page(hostile)).attributes if name == "id"
    }


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (3.0, "3"), (0.126, "0.13"), (12.345, "12.35"), (123.4, "123")]
)
def test_measures_are_short(value, text):
    assert number(value) == text


def test_no_token_breaks_out_and_nothing_is_loaded(hostile):
    text = page(hostile)
    read_back = Page(text)
    assert len(read_back.script) == 2
    assert "x()" not in read_back.script[1]
    assert json.loads(read_back.script[0])["sentences"][0]["tokens"] == [
        token_texts.visible(token) for token in HOSTILE
    ]
    assert not {"link", "img", "iframe", "b2", "object"} & set(read_back.tags)
    assert not {"src", "href", "onclick", "srcset"} & {name for name, _ in read_back.attributes}
    assert not any(part in text for part in ("http:", "https:", "url(", "@import"))
    assert "&lt;i&gt;gpt2&lt;/i&gt;" in text


def test_tables_are_grids_that_the_keyboard_can_enter(gpt2):
    for about, (head, *body) in Page(page(gpt2[0])).tables:
        assert about["role"] == "grid"
        assert {cell["scope"] for cell in head} == {"col"}
        assert {row[0]["scope"] for row in body} == {"row"}
        cells = [cell for row in body for cell in row[1:]]
        assert {cell["role"] for cell in cells} == {"gridcell"}
        assert [cell["tabindex"] for cell in cells].count("0") == 1
        assert cells[0]["tabindex"] == "0"


@pytest.mark.parametrize(
    ("p", "text"), [(1.0, "100 %"), (0.123, "12 %"), (0.0123, "1.2 %"), (1e-9, "< 0.1 %")]
)
def test_percent(p, text):
    assert percent(p) == text


# --- kinds of maps ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kinds_of(gpt2, gpt2_examples):
    """Reads a sentence through some kinds of maps."""
    model, tokenizer = gpt2[1:3]

    def read_kinds(maps=None, **options):
        examples = None if maps is not None else gpt2_examples
        found = run_peek(
            model,
            SENTENCES[:1],
            Options(**options),
            tokenizer=tokenizer,
            maps=maps,
            examples=examples,
        )
        return found.peek["layers"], found.peek["sentences"][0]["measures"]

    return read_kinds


def test_kinds_are_fitted_and_read_in_order(gpt2, gpt2_examples, kinds_of):
    layers, measures = kinds_of(kinds=["rank:3", "id", "mat"], layers=[1, 3])
    assert (layers, list(measures)) == ([1, 3, 4], ["rank:3", "id", "mat"])
    assert list(kinds_of(layers=[1])[1]) == ["id", "mat"]
    model, tokenizer = gpt2[1:3]
    fit = fit_map(model, gpt2_examples.fit, 3, 4, kind="rank:3")
    split = peeking.all_positions(SENTENCES[:1], tokenizer, max_length=128, masked=False)
    acts = capture(model, split, ["block.2", "block.3"])
    full, low = (
        jax.nn.log_softmax(logits(model, x)) for x in (acts["block.3"], fit.map(acts["block.2"]))
    )
    expected = (jnp.exp(full) * (full - low)).sum(-1)
    np.testing.assert_allclose(measures["rank:3"]["kl"][1], expected, rtol=1e-2)


def test_the_last_layer_can_be_read_alone(kinds_of):
    layers, measures = kinds_of(kinds=["affine", "mat"], layers=[4])
    assert (layers, list(measures)) == ([4], ["affine", "mat"])


def test_given_kinds_are_found_however_their_parameter_is_written(gpt2, kinds_of):
    mat = gpt2[5]["mat"][1]
    for saved in ("ridge:0.01", "ridge:1e-2"):
        for asked in ("ridge:0.01", "ridge:1e-2"):
            assert list(kinds_of({f"{saved}.1.4": mat}, kinds=[asked])[1]) == ["ridge:0.01"]


def test_given_maps_are_of_any_kind(gpt2, kinds_of, tmp_path):
    model, mats = gpt2[1], gpt2[5]["mat"]
    maps = {f"tuned.{layer}.4": mats[layer] for layer in range(4)}
    maps |= {f"jacobian.{layer}.4": mats[layer] for layer in (1, 3)}
    maps |= {"mat.1.2": mats[1], "attn.1": mats[1]}
    layers, measures = kinds_of(maps)
    assert (layers, list(measures)) == ([1, 3, 4], ["id", "tuned", "jacobian"])
    assert measures["tuned"] == measures["jacobian"] != measures["id"]
    layers, measures = kinds_of(maps, kinds=["tuned"])
    assert (layers, list(measures)) == ([0, 1, 2, 3, 4], ["tuned"])
    save_lens(
        tmp_path / "lens",
        {name: each for name, each in maps.items() if "tuned" in name},
        model=model,
        format="tuned-lens",
    )
    assert kinds_of(tmp_path / "lens", kinds=["tuned"])[0] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("maps", "options", "message"),
    [
        (None, {"kinds": ["rnk:3"]}, "'rnk:3' is no kind of map; did you mean 'rank'"),
        (None, {"kinds": ["rank:65"]}, "rank 65, above the width 64"),
        (None, {"kinds": ["jacobian"]}, "'jacobian' is derived from gradients, and peek does not"),
        (None, {"kinds": ["future_sum"]}, "derived from sums of future streams, and peek does not"),
        (None, {"kinds": "mat"}, "kinds='mat': expected a list"),
        ({}, {"kinds": ["tuned"]}, "maps= has no kind 'tuned'; it has id, mat"),
        ({}, {"layers": [2]}, "maps= has no map mat.2.4"),
        ({"mat.1.2": None}, {}, "maps= has no map to layer 4, the last"),
        ({"tuned.2.4": None}, {}, "no layer from which maps of all kinds lead: id, tuned, mat"),
    ],
)  # fmt: skip
def test_kinds_that_there_are_not_are_refused(gpt2, kinds_of, maps, options, message):
    given = None if maps is None else dict.fromkeys(maps, Identity())
    if given is not None and "mat.1.2" not in given:
        given["mat.1.4"] = gpt2[5]["mat"][1]
    with pytest.raises(ValueError, match=message):
        kinds_of(given, **options)


# --- the experiment -------------------------------------------------------------------------------


@pytest.mark.slow
def test_experiment_with_saved_maps(gpt2, tmp_path):
    _, model, _, split, _, shortcuts = gpt2
    info = MapsInfo("gpt2", model_hash(parameters(model)), "din2023", "docs", 9, 0, "float32")
    save_maps(tmp_path, {f"mat.{layer}.4": shortcuts["mat"][layer] for layer in (0, 2)}, info)
    out = tmp_path / "out"
    # Prepared examples, so that no corpus is read; nothing is fitted on them.
    ids = split.tokens[: split.lengths[0]]
    arrays = {"tokens": ids, "lengths": split.lengths[:1], "positions": np.zeros(1, np.int32)}
    np.savez(
        tmp_path / "few.npz",
        **{f"{part}_{name}": value for part in ("fit", "eval") for name, value in arrays.items()},
    )
    common = [
        f"--model={REFERENCE}/gpt2",
        f"--examples={tmp_path}/few.npz",
        f"--maps={tmp_path}",
        f"--out={out}",
    ]
    printed, _ = scripts.run(
        "peek", *common, "--layers=0,2", f"--sentences={SENTENCES[0]}", "--top=3"
    )
    assert "peek.html" in printed
    found = json.loads((out / "peek.json").read_text("utf-8"))
    results = json.loads((out / "results.json").read_text("utf-8"))
    expected, whole = gpt2[0]["sentences"][0], found["sentences"][0]
    assert found["layers"] == [0, 2, 4]
    for kind in ("id", "mat"):
        for k, layer in enumerate(found["layers"]):
            tokens = [[token for token, _ in top] for top in whole["predictions"][kind][k]]
            assert tokens == [
                [token for token, _ in top[:3]] for top in expected["predictions"][kind][layer]
            ]
    assert results["rows"] == peeking.peek_rows(found)
    assert len(Page((out / "peek.html").read_text("utf-8")).tables) == 2
    _, said = scripts.run("peek", *common, "--layers=1", "--overwrite", code=1)
    assert "has no map mat.1.4" in said
