"""The verdict on a checkpoint: right where it is right, and able to tell where it is
wrong.
"""

import sys

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jmat
from experiments.pretraining.tokenizers import train_bpe, train_wordpiece
from jmat.checkpoint import parameters, with_parameters
from jmat.studies.verify.differences import (
    SENTENCES,
    compare,
    format_report,
    make_batches,
    report_rows,
    verify,
)
from jmat.studies.verify.reference import load_reference
from tests import hf
from tests.scripts import run

GPT2 = hf.gpt2("verify", vocab_size=300, n_positions=64)
BERT = hf.bert("verify", vocab_size=80, max_position_embeddings=64)


@pytest.fixture(scope="module")
def torch_model():
    return hf.make(GPT2)


@pytest.fixture(scope="module")
def model():
    return hf.ours(GPT2)


def report(model, torch_model, dtype="float64"):
    batches = make_batches(model.config, tokenizer=None)
    return compare(model, torch_model, lambda: hf.make(GPT2).to(getattr(torch, dtype)), batches)


def changed(model, path, change):
    params = parameters(model)
    return with_parameters(model, params | {path: change(params[path])})


def test_the_same_model_matches(model, torch_model):
    found = report(model, torch_model)
    assert found.verdict == "MATCH"
    assert found.first is None
    assert 0 < found.largest < 1e-4
    assert found.same_top_1 == 1
    assert [site.site for site in found.sites][:4] == [
        "embed",
        "block.0.ln_1.in",
        "block.0.ln_1",
        "block.0.attn.in",
    ]
    assert found.sites[-1].site == "logits"


@pytest.mark.parametrize(
    ("path", "first"),
    [
        ("embed.positions.table", "embed"),
        ("blocks.0.attn.k.kernel", "block.0.attn.k"),
        ("blocks.0.attn.o.bias", "block.0.attn"),
        ("blocks.1.ln_2.bias", "block.1.ln_2"),
        ("blocks.1.ffn.up.kernel", "block.1.ffn.hidden"),
        ("final_norm.scale", "final_norm"),
    ],
)
def test_the_first_site_that_differs_is_named(model, torch_model, path, first):
    broken = changed(model, path, lambda value: value.at[..., 0].add(0.01))
    found = report(broken, torch_model)
    assert (found.verdict, found.first) == ("WRONG", first)
    assert (
        f"first site that differs by more than tolerance and rounding explain is {first}."
        in format_report(found)
    )
    unexplained = [site.site for site in found.sites if not site.explained]
    assert unexplained[0] == first
    assert f"{found.sites[-1].difference:.1e}" in format_report(found)


def test_rounding_is_told_from_a_mistake():
    narrow = hf.ours(GPT2, dtype="bfloat16")
    found = report(narrow, hf.make(GPT2), "bfloat16")
    assert found.verdict == "PRECISION"
    assert found.sites[-1].rounding > 1e-3
    broken = changed(
        narrow, "blocks.1.ln_2.bias", lambda value: value + jnp.asarray(1, value.dtype)
    )
    found = report(broken, hf.make(GPT2), "bfloat16")
    assert (found.verdict, found.first) == ("WRONG", "block.1.ln_2")


def test_what_is_not_finite_is_wrong(model, torch_model):
    broken = changed(model, "blocks.1.ffn.down.bias", lambda value: value.at[3].set(jnp.nan))
    found = report(broken, torch_model)
    assert (found.verdict, found.first, found.largest) == ("WRONG", "block.1.ffn", np.inf)
    rows = report_rows(found)
    assert {
        row["value"]
        for row in rows
        if row.get("site") == "logits" and row["metric"] == "difference"
    } == {None}
    assert all(row["value"] is not None or row["note"] == "not finite" for row in rows)


def test_texts_are_padded_on_either_side_and_cut_to_the_positions(model):
    tokenizer = train_bpe(SENTENCES, 300)
    alone, right, left = make_batches(model.config, tokenizer)
    assert alone.tokens.shape == (1, 64)
    assert right.mask[:, 0].all()
    assert left.mask[:, -1].all()
    np.testing.assert_array_equal(right.tokens[right.mask], left.tokens[left.mask])
    np.testing.assert_array_equal(
        right.tokens[0][right.mask[0]], tokenizer(SENTENCES[0])["input_ids"]
    )
    assert len(set(right.mask.sum(1))) == len(SENTENCES)
    alone, right, _ = make_batches(model.config, tokenizer, "a whole text of one's own")
    np.testing.assert_array_equal(
        alone.tokens[0], tokenizer("a whole text of one's own")["input_ids"]
    )
    assert len(right.mask) == 3
    with pytest.raises(ValueError, match="no tokens"):
        make_batches(model.config, tokenizer, "")


def test_a_text_of_one_token_is_compared(model, torch_model):
    batches = make_batches(model.config, train_bpe(SENTENCES, 300), "a")
    assert [batch.tokens.shape for batch in batches] == [(1, 1), (3, 1), (3, 1)]
    found = compare(model, torch_model, lambda: torch_model, batches)
    assert (found.verdict, found.tokens) == ("MATCH", 7)


@pytest.mark.parametrize(("case", "train"), [(GPT2, train_bpe), (BERT, train_wordpiece)])
def test_a_folder_with_a_tokenizer_matches(case, train, tmp_path):
    hf.save(hf.make(case), tmp_path)
    train(SENTENCES, case.fields["vocab_size"]).save_pretrained(tmp_path)
    model, tokenizer = jmat.load(tmp_path)
    assert verify(tmp_path, model, tokenizer).verdict == "MATCH"


def test_a_model_without_head_is_compared_up_to_its_last_site(tmp_path):
    case = hf.bert("headless", model="BertModel")
    model, _ = jmat.load(hf.save(hf.make(case), tmp_path))
    found = verify(tmp_path, model, None)
    assert (found.verdict, found.sites[-1].site) == ("MATCH", "final_norm")
    assert "the model has no head" in format_report(found)


def test_without_torch_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ValueError, match=r"torch is not installed: pip install 'jmat\[test\]'"):
        load_reference(tmp_path, "gpt2")


def test_the_command_line(tmp_path):
    hf.save(hf.make(GPT2), tmp_path / "model")
    printed, _ = run("verify", f"--model={tmp_path}/model", f"--out={tmp_path}/out")
    assert "MATCH: the logits differ by no more than 0.0001" in printed
    assert (tmp_path / "out" / "results.json").exists()
    _, said = run("verify", f"--model={tmp_path}/none", code=1)
    assert "there is no folder" in said
    _, said = run("verify", f"--model={tmp_path}/model", "--text=some words", code=1)
    assert "has no tokenizer" in said
