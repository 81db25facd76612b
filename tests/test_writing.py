"""New tokens become text piece by piece; stop strings and halves of characters are held
back.
"""

import numpy as np
import pytest
import transformers

import jmat
from jmat.decode.text import Follower
from tests.llama_tokenizer import llama


@pytest.fixture(scope="module")
def tokenizer():
    return jmat.load("gpt2-docs")[1]


def follow(tokenizer, text, stop_strings=(), before="x", size=1):
    """Follows the tokens of a text that come a few at a time."""
    prompt = np.asarray(tokenizer(before)["input_ids"], np.int32)
    whole = tokenizer(before + text)["input_ids"]
    assert whole[: len(prompt)] == prompt.tolist()
    tokens, pieces = np.asarray(whole[len(prompt) :], np.int32), []
    follower = Follower(tokenizer, prompt, stop_strings, (), pieces.append)
    for at in range(size, len(tokens) + size, size):
        follower.take(tokens[:at], ended=at >= len(tokens))
    return follower, pieces, tokens


@pytest.mark.parametrize("size", [1, 3, 100])
def test_characters_of_several_tokens_come_whole(tokenizer, size):
    follower, pieces, tokens = follow(tokenizer, " naïve 🙂🙂 text", size=size)
    assert "".join(pieces) == follower.text == " naïve 🙂🙂 text"
    assert len(tokens) > len(" naïve 🙂🙂 text".split())
    assert not any("\ufffd" in piece for piece in pieces)


def test_half_a_character_at_the_end_is_written(tokenizer):
    prompt = np.asarray(tokenizer("x")["input_ids"], np.int32)
    half = np.asarray(tokenizer(" 🙂")["input_ids"][:-1], np.int32)
    pieces = []
    follower = Follower(tokenizer, prompt, (), (), pieces.append)
    follower.take(half, ended=False)
    assert "\ufffd" not in "".join(pieces)
    follower.take(half, ended=True)
    assert "".join(pieces) == follower.text
    assert follower.text.endswith("\ufffd")


@pytest.mark.parametrize("size", [1, 2, 100])
def test_a_stop_string_ends_the_text_before_it(tokenizer, size):
    follower, pieces, tokens = follow(
        tokenizer, " with the same shape and type as a", ["shape and", "nowhere"], size=size
    )
    assert follower.text == "".join(pieces) == " with the same "
    upto = tokenizer.decode(tokens[: follower.stopped].tolist())
    assert "shape and" in upto
    assert "shape and" not in tokenizer.decode(tokens[: follower.stopped - 1].tolist())


def test_the_beginning_of_a_stop_string_is_held_back(tokenizer):
    follower, pieces, _ = follow(tokenizer, " the same shape or type", [" shape and"])
    assert "".join(pieces) == follower.text == " the same shape or type"
    assert " shape" not in pieces
    assert follower.stopped is None


def test_a_stop_token_is_no_text(tokenizer):
    prompt = np.asarray(tokenizer("x")["input_ids"], np.int32)
    follower = Follower(tokenizer, prompt, (), (0,), None)
    follower.take(np.asarray([*tokenizer(" same")["input_ids"], 0], np.int32), ended=True)
    assert follower.text == " same"


def test_spaces_are_those_behind_the_prompt():
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=llama(), bos_token="<s>", eos_token="</s>"
    )
    follower, pieces, _ = follow(tokenizer, " the sum of two", before="Return")
    assert "".join(pieces) == follower.text == " the sum of two"
