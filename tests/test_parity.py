"""Every site of every architecture against transformers on PyTorch, in float32."""

import jax
import numpy as np
import pytest

import jmat
from jmat.models import sites
from jmat.studies.verify.reference import run_reference
from tests import families, hf


def compare(model, torch_model, batch):
    """Asserts that all sites agree at real tokens, to 1e-5 of a site's scale (logits
    1e-4). Returns the sites.
    """
    given = (batch.tokens, batch.mask, batch.positions, batch.type_ids)
    theirs = run_reference(torch_model, *given, patterns=True)
    scores = [f"block.{i}.attn.scores" for i in range(model.config.layers)]
    with jax.default_matmul_precision("highest"):
        x, ours = jmat.run(
            model, batch.tokens, mask=batch.mask, type_ids=batch.type_ids, keep=(*theirs, *scores)
        )
    patterns = [site for site in theirs if site.endswith(".pattern")]
    for site, expected in theirs.items():
        real = expected[batch.mask]
        tolerance = (1e-4 if site == "logits" else 1e-5) * max(1.0, float(np.abs(real).max()))
        value = np.moveaxis(ours[site], 1, 2) if site in patterns else np.asarray(ours[site])
        value = value.reshape(expected.shape)[batch.mask]
        np.testing.assert_allclose(value, real, rtol=0, atol=tolerance, err_msg=site)
    for pattern, site in zip(patterns, scores, strict=True):
        check_scores(np.asarray(ours[site]), np.asarray(ours[pattern]), batch.mask)
    L = model.config.layers
    np.testing.assert_array_equal(x, ours[f"block.{L - 1}"])
    return {*theirs, *scores}


def check_scores(scores, pattern, mask):
    """Asserts that the pattern, which agrees with transformers', is the softmax of the
    scores that count.
    """
    looked_at = pattern > 0
    exponents = np.where(looked_at, scores.astype(np.float64), -np.inf)
    weights = np.exp(exponents - exponents.max(-1, keepdims=True))
    expected = weights / weights.sum(-1, keepdims=True)
    real = np.broadcast_to(mask[:, None], pattern.shape[:3])
    np.testing.assert_allclose(pattern[real], expected[real], atol=1e-6)
    assert np.isfinite(scores).all()


@pytest.mark.parametrize("case", [*hf.CASES, *families.CASES], ids=lambda case: case.name)
def test_every_site_matches_transformers(case, tmp_path):
    torch_model = hf.make(case)
    model, tokenizer = jmat.load(hf.save(torch_model, tmp_path))
    assert tokenizer is None
    compared = compare(model, torch_model, hf.batch(case))
    readable = [
        name
        for name in sites.readable(model.config.layers, model.config.heads)
        if ".head." not in name
    ]
    assert compared == {name for name in readable if not name.endswith(case.hidden)}


@pytest.mark.parametrize(
    "case", [hf.gpt2("positions"), hf.bert("positions")], ids=lambda case: case.name
)
def test_given_positions_are_used(case, tmp_path):
    torch_model = hf.make(case)
    model, _ = jmat.load(hf.save(torch_model, tmp_path))
    batch = hf.batch(case)
    # Rising by 1: transformers takes a step back for the beginning of another text.
    positions = np.broadcast_to(
        np.arange(batch.tokens.shape[1], dtype=np.int32) + 2, batch.tokens.shape
    ).copy()
    expected = run_reference(torch_model, batch.tokens, None, positions, batch.type_ids)["logits"]
    _, ours = jmat.run(
        model, batch.tokens, positions=positions, type_ids=batch.type_ids, keep=("logits",)
    )
    np.testing.assert_allclose(ours["logits"], expected, rtol=0, atol=1e-4)
