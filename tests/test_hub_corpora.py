"""Corpora of the hub, read through a stand-in for it: documents, sentences, cache and
errors.
"""

import builtins
import re

import pytest
from transformers import AutoTokenizer

from jmat.data import Examples, corpus, hub_corpora, load_examples, save_examples
from jmat.data.examples import fingerprint

REFERENCE = "tests/data/reference/gpt2"
NAMES = ("wikipedia", "wikipedia-2022", "cc-news", "wikitext-103")


def split_text(paragraph):
    """Stands in for sentencex: a sentence ends with a full stop and a space."""
    return re.split(r"(?<=[.?!]) ", paragraph)


class Hub:
    """Stands in for the hub: every file has `documents` rows, each naming its file and
    its number in every sentence.
    """

    def __init__(self, documents=40, sentences=30):
        self.documents, self.sentences = documents, sentences
        self.opened = []

    def __call__(self, address):
        self.opened.append(address)
        file = re.search(r"train-(\d+)-of", address)[1]
        for document in range(self.documents):
            tag = f"{file}x{document}"
            lines = [f"Sentence {i} belongs to document {tag} here." for i in range(self.sentences)]
            yield {
                "text": (
                    "A heading without a "
                    f"stop\n{' '.join(lines[:2])}\n\n{' '.join(lines[2:])}\nShort one."
                )
            }


def documents_of(sentences):
    return {re.search(r"document (\S+)", sentence)[1] for sentence in sentences}


@pytest.mark.parametrize("name", NAMES)
def test_files_are_pinned_parquet(name):
    address = hub_corpora.SOURCES[name].address(1)
    assert re.fullmatch(
        r"hf://datasets/[\w-]+/\w+@[0-9a-f]{40}/[\w./-]+/train-00001-of-000\d\d\.parquet", address
    )


def test_fit_and_eval_come_from_different_documents():
    hub = Hub()
    fit, held_out = hub_corpora.hub_fit_eval(
        "wikipedia", 95, 42, 0, open_file=hub, split_text=split_text
    )
    assert (len(fit), len(held_out)) == (95, 42)
    assert len(set(fit + held_out)) == 95 + 42
    assert not documents_of(fit) & documents_of(held_out)
    # no headings, no scraps
    assert all(sentence.startswith("Sentence") for sentence in fit + held_out)
    # No document gives more than ten sentences, and eight files are read in turn.
    assert len(documents_of(fit)) == 10
    assert len(set(hub.opened)) == 8
    assert len({tag.split("x")[0] for tag in documents_of(fit)}) == 8


def test_seed_draws_files_sentences_and_order():
    def draw(seed):
        return hub_corpora.hub_fit_eval(
            "wikipedia", 50, 20, seed, open_file=Hub(), split_text=split_text
        )

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)
    first, second = Hub(), Hub()
    for seed, hub in ((0, first), (1, second)):
        hub_corpora.hub_fit_eval("wikipedia", 5, 5, seed, open_file=hub, split_text=split_text)
    assert first.opened != second.opened


def test_a_sentence_is_never_taken_twice():
    def same(address):
        return [{"text": "The very same sentence stands here."}] * 100 + [{"text": None}]

    with pytest.raises(ValueError, match=r"gave 1 sentences for num_fit=2"):
        hub_corpora.hub_fit_eval("wikipedia", 2, 1, 0, open_file=same, split_text=split_text)
    with pytest.raises(ValueError, match=r"gave 0 sentences for num_eval=1"):
        hub_corpora.hub_fit_eval("wikipedia", 1, 1, 0, open_file=same, split_text=split_text)


def test_wikitext_lines_become_articles_and_ordinary_text():
    lines = [
        " The end of an article whose title another file holds . \n",
        " = Some Title = \n",
        "",
        ' The game \'s " first run " sold 1 @,@ 500 well @-@ made copies ( in Japan ) , she didn '
        "'t say . \n",
        " = = A Section = = \n",
        " Players ' scores rose by 2 @.@ 5 % here . \n",
        " = Other Title = \n",
        " It has a sentence of its own ; it stands alone . \n",
    ]
    articles = list(hub_corpora._articles(iter(lines), "line"))
    assert len(articles) == 2
    first = hub_corpora._sentences(articles[0], split_text)
    assert first == [
        "The game's \"first run\" sold 1,500 well-made copies (in Japan), she didn't say.",
        "Players ' scores rose by 2.5% here.",
    ]
    assert articles[1] == "It has a sentence of its own; it stands alone."


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JMAT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_examples_are_cached_by_everything_that_matters(cache):
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE)
    hub = Hub()
    given = dict(num_fit=40, num_eval=20, seed=0, protocol="din2023", max_length=128, masked=False)

    def make(**changes):
        return hub_corpora.hub_examples(
            "cc-news", tokenizer, **{**given, **changes}, open_file=hub, split_text=split_text
        )

    first = make()
    assert (first.fit.num_examples, first.eval.num_examples) == (40, 20)
    opened = len(hub.opened)
    again = make()
    assert len(hub.opened) == opened  # nothing was read
    assert again.fit.tokens.tolist() == first.fit.tokens.tolist()
    (file,) = cache.glob("cc-news-*.npz")
    assert load_examples(file).eval.positions.tolist() == first.eval.positions.tolist()
    for change in (
        {"num_fit": 41},
        {"num_eval": 21},
        {"seed": 1},
        {"protocol": "jmat"},
        {"max_length": 4},
    ):
        make(**change)
    tokenizer.add_tokens(["document"])
    make()
    assert len(list(cache.glob("*.npz"))) == 7
    assert len(hub.opened) == 7 * opened


def test_a_damaged_cache_is_made_anew(cache):
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE)
    given = dict(num_fit=4, num_eval=4, seed=0, protocol="din2023", max_length=128, masked=False)

    def make():
        return hub_corpora.hub_examples(
            "wikipedia", tokenizer, **given, open_file=Hub(), split_text=split_text
        )

    first = make()
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    other = Examples(fit=first.eval, eval=first.fit)
    for damage in (lambda: file.write_bytes(whole[:50]), lambda: save_examples(file, other)):
        damage()
        assert make().fit.tokens.tolist() == first.fit.tokens.tolist()
        assert fingerprint(load_examples(file)) == fingerprint(first)


def test_unknown_name_lists_the_names():
    with pytest.raises(ValueError, match="'wiki'.*" + ", ".join(NAMES)):
        hub_corpora.hub_fit_eval("wiki", 1, 1, 0, open_file=Hub(), split_text=split_text)


@pytest.mark.parametrize("missing", ["datasets", "sentencex"])
def test_without_the_extra_the_error_says_what_to_install(missing, monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == missing:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    given = {"split_text": split_text} if missing == "datasets" else {"open_file": Hub()}
    with pytest.raises(ValueError, match=r"corpus wikipedia .* pip install 'jmat\[hub\]'"):
        hub_corpora.hub_fit_eval("wikipedia", 1, 1, 0, **given)


def test_unreachable_hub_is_one_sentence():
    def offline(address):
        yield {"text": "One sentence came through before."}
        raise RuntimeError("connection lost\nand a long traceback")

    with pytest.raises(
        ConnectionError, match=r"corpus cc-news cannot be read .*RuntimeError: connection lost\)"
    ):
        hub_corpora.hub_fit_eval("cc-news", 9, 1, 0, open_file=offline, split_text=split_text)


def test_corpus_finds_hub_names(monkeypatch):
    monkeypatch.setattr(hub_corpora, "stream", lambda name, columns: Hub())
    monkeypatch.setattr(hub_corpora, "_sentencex", lambda name: split_text)
    fit, held_out = corpus.fit_eval("wikipedia", 30, 15, 0)
    assert not documents_of(fit) & documents_of(held_out)
    monkeypatch.setattr(hub_corpora, "LOADED", 25)
    assert len(corpus.load_corpus("cc-news")) == 25
    with pytest.raises(
        FileNotFoundError, match=r"docs, wikipedia, wikipedia-2022, cc-news, wikitext-103"
    ):
        corpus.load_corpus("wikipedia-2021")
