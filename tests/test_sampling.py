"""From text to tokens and the positions that are read."""

import logging

import numpy as np
import pytest

from experiments.pretraining.tokenizers import train_bpe, train_wordpiece
from jmat.data import make_examples, tokenize

TEXT = [
    f"The function number {n} returns {'a list of ' * (n % 7)}values for key {n * n}."
    for n in range(400)
]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(TEXT, 400)


@pytest.fixture(scope="module")
def wordpiece():
    return train_wordpiece(TEXT, 200)


def test_causal_tokens_read_back_as_the_text(bpe):
    tokens = tokenize(TEXT, bpe, max_length=200, special_tokens=False)
    assert [bpe.decode(ids) for ids in tokens] == TEXT
    assert {ids.dtype for ids in tokens} == {np.dtype(np.int32)}


def test_long_text_is_cut_and_counted(bpe, wordpiece, caplog):
    long = "a list of values and a list of values and a list of values"
    with caplog.at_level(logging.WARNING, logger="jmat.data.encoding"):
        short, cut = tokenize(["a list.", long], wordpiece, max_length=8, special_tokens=True)
    assert "Sentences that were cut at 8 tokens: 1 of 2." in caplog.text
    assert len(cut) == 8
    assert (cut[0], cut[-1]) == (wordpiece.cls_token_id, wordpiece.sep_token_id)
    assert len(short) < 8
    whole, first = (
        tokenize([long], bpe, 100, special_tokens=False),
        tokenize([long], bpe, 4, special_tokens=False),
    )
    np.testing.assert_array_equal(first[0], whole[0][:4])


def test_sentences_without_tokens_are_left_out(bpe, wordpiece):
    assert len(tokenize(["a list", "", "values"], bpe, 8, special_tokens=False)) == 2
    assert len(tokenize(["a list", " ", "values"], wordpiece, 8, special_tokens=True)) == 2
    assert tokenize([], bpe, 8, special_tokens=False) == []
    with pytest.raises(ValueError, match="no room for text beside 2 special tokens"):
        tokenize(TEXT, wordpiece, 2, special_tokens=True)


# Positions


def test_din2023_draws_every_position_alike(wordpiece):
    """Chi-squared over the relative position; [CLS], position 0, and [SEP] are as
    likely as any other.
    """
    sentences = ["The function returns a list of values for key 7."] * 1500
    split = make_examples(
        sentences, sentences[:1], wordpiece, protocol="din2023", max_length=64, seed=0, masked=True
    ).fit
    T = int(split.lengths[0])
    assert split.num_examples == split.num_sentences == 1500
    assert split.tokens[0] == wordpiece.cls_token_id
    assert split.tokens[T - 1] == wordpiece.sep_token_id
    counts = np.bincount(split.positions, minlength=T)
    assert ((counts - 1500 / T) ** 2 / (1500 / T)).sum() < T + 5 * np.sqrt(2 * T)


def test_din2023_gives_causal_models_what_stands_in_front(bpe, wordpiece):
    split = make_examples(
        TEXT, TEXT[:9], bpe, protocol="din2023", max_length=64, seed=0, masked=False
    ).fit
    assert bpe.decode(split.tokens[: split.lengths[0]]) == TEXT[0]
    assert (split.positions == 0).any()
    split = make_examples(
        TEXT, TEXT[:9], wordpiece, protocol="din2023", max_length=64, seed=0, masked=False
    ).fit
    assert (split.tokens[split.starts] == wordpiece.cls_token_id).all()
    assert (split.positions == 0).any()
    assert wordpiece.sep_token_id not in split.tokens


def test_jmat_draws_different_eligible_positions(bpe, wordpiece):
    options = {"protocol": "jmat", "max_length": 64, "seed": 0, "positions_per_sentence": 12}
    split = make_examples([*TEXT, "T"], TEXT[:9], bpe, masked=False, **options).fit
    assert split.num_sentences == len(TEXT)  # "T" is one token, and the first is never read
    counts = np.bincount(split.rows)
    np.testing.assert_array_equal(counts, np.minimum(12, split.lengths - 1))
    assert (
        len({*zip(split.rows.tolist(), split.positions.tolist(), strict=True)})
        == split.num_examples
    )
    assert split.positions.min() == 1

    split = make_examples(TEXT, TEXT[:9], wordpiece, masked=True, **options).fit
    read = split.tokens[split.starts[split.rows] + split.positions]
    assert not np.isin(read, [wordpiece.cls_token_id, wordpiece.sep_token_id]).any()
    assert split.positions.min() == 1

    split = make_examples(TEXT, TEXT[:9], bpe, masked=False, skip_first=3, **options).fit
    assert split.positions.min() == 3


def test_a_position_depends_on_its_own_sentence_and_on_how_often_it_was_seen(bpe):
    def positions(text):
        examples = make_examples(
            text, TEXT[:1], bpe, protocol="din2023", max_length=64, seed=0, masked=False
        )
        return examples.fit.positions.tolist()

    whole = positions(TEXT)
    assert positions(TEXT[::-1]) == whole[::-1]
    assert positions([*TEXT[:7], *TEXT[8:]]) == [*whole[:7], *whole[8:]]
    assert len(set(positions([TEXT[6]] * 40))) > 5


def test_the_seed_decides_the_positions(bpe):
    def positions(seed):
        examples = make_examples(
            TEXT[:60], TEXT[:60], bpe, protocol="din2023", max_length=64, seed=seed, masked=False
        )
        return examples.fit.positions.tolist(), examples.eval.positions.tolist()

    assert positions(3) == positions(3)
    assert positions(3)[0] != positions(4)[0]
    assert positions(3)[0] != positions(3)[1]  # the same sentences: the streams are independent


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"protocol": "din2024"}, "protocol 'din2024' is unknown; choose one of din2023, jmat"),
        ({"protocol": "din2023", "positions_per_sentence": 2}, "choose protocol jmat"),
        ({"protocol": "din2023", "skip_first": 1}, "choose protocol jmat"),
        ({"protocol": "jmat", "positions_per_sentence": 0}, "positions_per_sentence=0"),
        ({"protocol": "jmat", "skip_first": 1000}, "none of the 400 fit sentences has a position"),
    ],
)
def test_settings_that_make_no_examples_are_refused(bpe, options, message):
    with pytest.raises(ValueError, match=message):
        make_examples(TEXT, TEXT, bpe, max_length=64, seed=0, masked=False, **options)
