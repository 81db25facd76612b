"""Prepared examples that were made for the other kind of model are noticed before
anything is computed.
"""

import dataclasses

import numpy as np
import pytest
from transformers import AutoTokenizer

from jmat.data import Examples, Split
from jmat.data.kinds import describe_kind
from tests.test_reference import REFERENCE


@pytest.fixture(scope="module")
def tokenizers():
    return {
        family: AutoTokenizer.from_pretrained(REFERENCE / family) for family in ("gpt2", "bert")
    }


def test_examples_of_the_models_own_kind_are_not_remarked(tokenizers, gpt2_examples, bert_examples):
    assert describe_kind(gpt2_examples, tokenizers["gpt2"], masked=False) == []
    assert describe_kind(bert_examples, tokenizers["bert"], masked=True) == []


def test_a_masked_models_examples_for_a_causal_model(tokenizers, bert_examples):
    found = describe_kind(bert_examples, tokenizers["gpt2"], masked=False)
    assert len(found) == 2
    assert all(
        "begin with token 2 and end with token 3: were they made for a masked model" in note
        for note in found
    )


def test_a_causal_models_examples_for_a_masked_model(tokenizers, gpt2_examples):
    found = describe_kind(gpt2_examples, tokenizers["bert"], masked=True)
    assert len(found) == 2
    assert all(
        "do not stand between the special tokens of this masked model" in note for note in found
    )


def test_positions_on_special_tokens(tokenizers, bert_examples):
    split = dataclasses.replace(
        bert_examples.eval, positions=np.zeros_like(bert_examples.eval.positions)
    )
    examples = Examples(fit=bert_examples.fit, eval=split)
    (note,) = describe_kind(examples, tokenizers["bert"], masked=True)
    assert (
        note == f"{split.num_examples} of {split.num_examples} eval positions are those of special "
        "tokens."
    )


def test_few_sentences_may_begin_and_end_alike(tokenizers):
    split = Split(np.array([5, 6, 7] * 9, np.int32), np.full(9, 3, np.int32), np.ones(9, np.int32))
    assert describe_kind(Examples(split, split), tokenizers["gpt2"], masked=False) == []


@pytest.mark.parametrize(("framed", "remarks"), [(0, 2), (4, 2), (5, 0), (9, 0)])
def test_a_remark_is_on_half_of_the_sentences_or_more(tokenizers, framed, remarks):
    """Ten sentences, some of them between [CLS] and [SEP]; then ten positions, some of
    them on [CLS].
    """
    tokens = np.tile([2, 40, 41, 3], 10).reshape(10, 4).astype(np.int32)
    tokens[framed:] = [42, 40, 41, 43]
    split = Split(tokens.reshape(-1), np.full(10, 4, np.int32), np.ones(10, np.int32))
    found = describe_kind(Examples(split, split), tokenizers["bert"], masked=True)
    assert len(found) == remarks
    assert all(note.startswith(f"{10 - framed} of 10 ") for note in found)
    own = Split(
        np.tile(np.array([2, 40, 41, 3], np.int32), 10),
        split.lengths,
        (np.arange(10) < framed).astype(np.int32),
    )
    on_cls = 10 - framed
    found = describe_kind(Examples(own, own), tokenizers["bert"], masked=True)
    assert [note.partition(" of")[0] for note in found] == ([str(on_cls)] * 2 if on_cls > 5 else [])
