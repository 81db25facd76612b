"""Tokenizers: round trips, special tokens, and folders that transformers loads."""

import pytest
from transformers import AutoTokenizer

from experiments.pretraining import tokenizers

SENTENCES = [
    "Return the value of `x`, or None if it is missing.",
    "Raise ValueError when the shape is wrong.",
] * 20


def test_bpe_round_trips_any_text_and_adds_nothing(tmp_path):
    trained = tokenizers.train_bpe(SENTENCES, 300)
    assert len(trained) == 300
    trained.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in [SENTENCES[0], "naïve — 数学 \t tabs", " leading space"]:
        assert loaded.decode(loaded(text)["input_ids"]) == text
        assert loaded(text)["input_ids"] == trained(text)["input_ids"]
    assert loaded.eos_token_id == loaded.bos_token_id == 0
    assert 0 not in loaded(SENTENCES[0])["input_ids"]
    assert loaded("<|endoftext|>")["input_ids"] == [0]


def test_wordpiece_wraps_a_sentence_and_keeps_case(tmp_path):
    trained = tokenizers.train_wordpiece(SENTENCES, 150)
    trained.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    ids = loaded(SENTENCES[1])["input_ids"]
    assert ids == trained(SENTENCES[1])["input_ids"]
    assert [ids[0], ids[-1]] == [loaded.cls_token_id, loaded.sep_token_id] == [2, 3]
    assert loaded.mask_token_id == 4
    assert loaded.pad_token_id == 0
    assert "ValueError" in loaded.decode(ids)
    assert loaded.unk_token_id not in ids
    assert loaded("数")["input_ids"] == [2, 1, 3]
    assert loaded("a", "b")["token_type_ids"] == [0, 0, 0, 1, 1]


def test_same_sentences_same_tokenizer():
    first, second = (tokenizers.train_bpe(SENTENCES, 290).get_vocab() for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("train", "size"), [(tokenizers.train_bpe, 256), (tokenizers.train_wordpiece, 5)]
)
def test_too_small_a_vocabulary_is_refused(train, size):
    with pytest.raises(ValueError, match="too small"):
        train(SENTENCES, size)


@pytest.mark.parametrize("train", [tokenizers.train_bpe, tokenizers.train_wordpiece])
def test_too_large_a_vocabulary_is_refused_before_memory_is_taken(train):
    with pytest.raises(
        ValueError, match="A vocabulary of 1000000001 is too large: at most 1000000 can be trained"
    ):
        train(SENTENCES, 1_000_000_001)
