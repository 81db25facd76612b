"""Text becomes the same tokens for every part of jmat: BOS once in front, no EOS, long
and odd texts as they are.
"""

import logging
import os

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import jmat.studies.tasks.scoring
from jmat.checkpoint.tokenizer import load_tokenizer
from jmat.data import encoding, make_examples
from jmat.data.sampling import skipped_tokens
from jmat.data.text import whole_sentences
from jmat.models import read_config
from jmat.studies.peek.predictions import all_positions
from jmat.studies.probe.labels import labelled_examples
from jmat.studies.verify.differences import make_batches
from tests import llama_tokenizer
from tests.empty import empty_model
from tests.test_reference import REFERENCE

TEXTS = [
    "Return the sum of two arrays",
    "Return None if there is no value",
    "the name of the file",
    "x = 12",
] * 3


@pytest.fixture(scope="module", params=[False, True], ids=["bos", "bos and eos"])
def llama(request):
    """A tokenizer that puts `<s>` in front of a text, and one that also puts `</s>`
    behind it.
    """
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=llama_tokenizer.llama(eos=request.param), **names
    )


@pytest.fixture(scope="module")
def byte_level():
    return load_tokenizer(REFERENCE / "gpt2")


@pytest.fixture(scope="module")
def bert():
    return load_tokenizer(REFERENCE / "bert")


def expected(tokenizer, text):
    """What a model reads of a text: `<s>`, and the tokens of the text."""
    return [1, *tokenizer(text, add_special_tokens=False)["input_ids"]]


def texts_of(split):
    return [piece.tolist() for piece in np.split(split.tokens, split.starts[1:])]


def read_by_text_rows(tokenizer, lines, positions, monkeypatch):
    """The passages that the perplexity of a text is the mean over."""
    seen = []
    monkeypatch.setattr(
        jmat.studies.tasks.scoring,
        "log_likelihoods",
        lambda model, passages, **_: seen.extend(passages) or np.zeros(len(passages)) - 1,
    )
    model = empty_model(num_positions=positions)
    rows = jmat.studies.tasks.scoring.text_rows(model, tokenizer, "text", lines)
    return seen, rows


def encode_choice(tokenizer, prompt, choice, limit):
    return jmat.studies.tasks.scoring.continued(
        tokenizer, prompt, f" {choice}", limit, encoding.special_tokens(tokenizer, masked=False)
    )


def test_every_part_reads_the_same_tokens(llama, monkeypatch):
    wanted = [expected(llama, text) for text in TEXTS]
    assert all(
        llama(text)["input_ids"][: len(ids)] == ids for text, ids in zip(TEXTS, wanted, strict=True)
    )
    for protocol in ("din2023", "jmat"):
        options = {"protocol": protocol, "max_length": 64, "seed": 0, "masked": False}
        examples = make_examples(TEXTS, TEXTS[:2], llama, **options)
        assert texts_of(examples.fit) == wanted
        assert texts_of(whole_sentences(examples.eval).split) == wanted[:2]
    assert texts_of(all_positions(TEXTS, llama, max_length=64, masked=False)) == wanted
    labels = ["a", "b", "c"] * 4
    probed, _ = labelled_examples(TEXTS, labels, llama, max_length=64, masked=False, seed=0)
    assert sorted(texts_of(probed.fit) + texts_of(probed.eval)) == sorted(wanted)
    batches = make_batches(read_config(REFERENCE / "gpt2"), llama, TEXTS[0])
    assert batches[0].tokens.tolist() == wanted[:1]
    passages, rows = read_by_text_rows(llama, TEXTS, 64, monkeypatch)
    assert [passage.tokens.tolist() for passage in passages] == wanted
    assert {passage.scored_from for passage in passages} == {1}
    assert rows[0]["n"] == sum(len(ids) - 1 for ids in wanted)
    choice = encode_choice(llama, "Return the sum", "of two arrays", 64)
    assert choice.tokens.tolist() == wanted[0]
    assert choice.scored_from == len(expected(llama, "Return the sum"))


def test_what_the_tokenizer_appends_is_never_scored(llama, monkeypatch):
    passages, _ = read_by_text_rows(llama, ["Return the sum of two arrays " * 9], 16, monkeypatch)
    passages.append(encode_choice(llama, "Return the sum", "of two arrays", 64))
    assert 2 not in np.concatenate([passage.tokens for passage in passages])


def test_each_piece_of_a_long_text_begins_with_bos(llama, byte_level, monkeypatch):
    text = "Return the sum of two arrays of the file " * 5
    for tokenizer, before in ((llama, [1]), (byte_level, [])):
        own = tokenizer(text, add_special_tokens=False)["input_ids"]
        passages, rows = read_by_text_rows(tokenizer, [text], 8, monkeypatch)
        pieces = [passage.tokens.tolist() for passage in passages]
        assert max(map(len, pieces)) == 8
        assert [piece[: len(before)] for piece in pieces] == [before] * len(pieces)
        assert [token for piece in pieces for token in piece[len(before) :]] == own
        assert rows[0]["n"] == sum(len(piece) - 1 for piece in pieces)


def test_a_choice_keeps_bos_where_the_prompt_loses_its_beginning(llama):
    prompt, choice = "Return the sum of two arrays, or None if there is no value", "of that name"
    whole, alone = expected(llama, f"{prompt} {choice}"), expected(llama, prompt)
    passage = encode_choice(llama, prompt, choice, 12)
    assert passage.tokens.tolist() == [1, *whole[-11:]]
    assert passage.tokens[passage.scored_from :].tolist() == whole[len(alone) :]
    with pytest.raises(
        ValueError, match=f"has {len(whole) - len(alone)} tokens; the model reads 3 in all"
    ):
        encode_choice(llama, prompt, choice, 3)


def test_bos_that_the_text_spells_out_is_not_doubled(llama):
    special = encoding.special_tokens(llama, masked=False)
    (plain,) = encoding.encode(["Return the sum"], llama, 64, special)
    (spelt,) = encoding.encode(["<s>Return the sum"], llama, 64, special)
    assert (plain[0], plain[1:].tolist().count(1)) == (1, 0)
    assert (spelt[0], spelt[1:].tolist().count(1)) == (1, 0)


def test_special_tokens_of_masked_and_causal_models(llama, byte_level, bert):
    assert encoding.special_tokens(bert, masked=True) == ((2,), (3,))
    assert encoding.special_tokens(bert, masked=False) == ((2,), ())
    assert encoding.special_tokens(byte_level, masked=False) == ((), ())
    assert encoding.special_tokens(llama, masked=False) == ((1,), ())


def test_jmat_leaves_out_bos(llama, byte_level):
    options = {
        "protocol": "jmat",
        "max_length": 64,
        "seed": 0,
        "masked": False,
        "positions_per_sentence": 100,
    }

    def positions(**skips):
        return make_examples(
            TEXTS[:1], TEXTS[1:2], llama, **options, **skips
        ).fit.positions.tolist()

    length = len(expected(llama, TEXTS[0]))
    assert positions() == [*range(1, length)]
    assert positions(skip_first=0) == [*range(1, length)]
    assert positions(skip_first=3) == [*range(3, length)]
    assert positions(skip_first=0, skip_special=False) == [*range(length)]
    assert set(skipped_tokens(llama, masked=False, skip_special=None)) == {1, 2}
    assert set(skipped_tokens(byte_level, masked=False, skip_special=None)) == set()


def test_the_end_is_kept_where_the_tokenizer_says_so(byte_level):
    text = "Return the sum of two arrays of the file"
    own = byte_level(text)["input_ids"]
    left = PreTrainedTokenizerFast(
        tokenizer_object=byte_level.backend_tokenizer, truncation_side="left"
    )
    for tokenizer, kept in ((byte_level, own[:4]), (left, own[-4:])):
        (tokens,) = encoding.encode([text], tokenizer, 4, encoding.SpecialTokens())
        assert tokens.tolist() == kept


def test_giant_texts_are_cut_before_they_become_tokens(
    byte_level, llama, bert, caplog, monkeypatch
):
    text = " ".join(llama_tokenizer.lines(800)) * 3
    sizes = []

    def watched(texts, tokenizer, **options):
        sizes.extend(map(len, texts))
        return tokenizer(list(texts), add_special_tokens=False)["input_ids"]

    for tokenizer in (byte_level, llama):
        whole = tokenizer(text, add_special_tokens=False)["input_ids"]
        with (
            monkeypatch.context() as patch,
            caplog.at_level(logging.WARNING, logger="jmat.data.encoding"),
        ):
            patch.setattr(encoding, "_ids", watched)
            (tokens,) = encoding.encode([text], tokenizer, 128, encoding.SpecialTokens())
            end = encoding.ending(text, tokenizer, 128)
        assert tokens.tolist() == whole[:128]
        assert tokenizer(end, add_special_tokens=False)["input_ids"][-128:] == whole[-128:]
        assert max(sizes) < len(text) / 10
        assert "Sentences that were cut at 128 tokens: 1 of 1." in caplog.text
    spaces = " " * 50_000 + "Return the sum"  # few tokens for so many characters, and none is lost
    (tokens,) = encoding.encode([spaces], bert, 64, encoding.special_tokens(bert, masked=True))
    assert tokens.tolist() == bert("Return the sum")["input_ids"]


def test_a_giant_line_is_scored_in_parts(byte_level, caplog, monkeypatch):
    monkeypatch.setattr(encoding, "_PART", 1000)
    text = " ".join(llama_tokenizer.lines(100))
    (pieces,) = encoding.encode_pieces([text], byte_level, 96, encoding.SpecialTokens())
    assert np.concatenate(pieces).tolist() == byte_level(text)["input_ids"]
    assert "Texts that are longer than 1000 characters" in caplog.text
    assert "tokens: 1 of 1." in caplog.text


@pytest.mark.parametrize(
    "text", ["bad \ud800 here", "x \udc00 y", b"bad \xff byte".decode("utf-8", "surrogateescape")]
)
def test_half_characters_are_one_sentence(byte_level, text):
    with pytest.raises(
        ValueError, match=r"is no Unicode text: character \d+, in '.*', is half of a character"
    ) as caught:
        all_positions([text], byte_level, max_length=64, masked=False)
    str(caught.value).encode()


def slow_or_broken(pattern):
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, [], unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_exploding_regular_expressions_are_one_sentence(capfd, monkeypatch):
    tokenizer = slow_or_broken(Regex(r"(a+)+$|(\w+\s?)*$"))
    with pytest.raises(ValueError, match=r"the tokenizer fails on a text: .*retry-limit") as caught:
        encoding.encode(["word " * 60 + "(more)."], tokenizer, 64, encoding.SpecialTokens())
    assert "\n" not in str(caught.value)
    assert "panicked" not in capfd.readouterr().err
    monkeypatch.setattr(encoding, "_SECONDS", -1.0)
    with pytest.raises(
        ValueError, match=r"regular expression in its tokenizer\.json takes exponential time"
    ):
        encoding.encode(["ab"] * 20, tokenizer, 64, encoding.SpecialTokens())


def test_other_messages_on_standard_error_are_passed_on(capfd):
    def fail(error):
        with encoding.panics_as_errors("it fails"):
            os.write(2, f"before {type(error).__name__}\n".encode())
            raise error

    with pytest.raises(ValueError, match="it fails: 3"):
        fail(TypeError(3))
    with pytest.raises(KeyboardInterrupt):
        fail(KeyboardInterrupt())
    assert capfd.readouterr().err == "before TypeError\nbefore KeyboardInterrupt\n"


def test_a_masked_model_without_cls_is_not_probed(llama):
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "[MASK]": 1, "one": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", mask_token="[MASK]"
    )
    with pytest.raises(
        ValueError, match=r"probed at \[CLS\], and its tokenizer puts no token in front"
    ):
        labelled_examples(
            ["one one"] * 8, ["a", "b"] * 4, tokenizer, max_length=16, masked=True, seed=0
        )
