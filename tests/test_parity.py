"""Every site of every architecture against transformers on PyTorch, in float32."""

import jax
import numpy as np
import pytest

import jmat
from jmat.models import sites
from jmat.studies.verify.reference import run_reference
from tests import families, hf


def compare(model, torch_model, batch):
    """Asserts that all sites agree at real tokens, to 1e-5 of a site's scale (logits 1e-4). Returns the sites."""
    theirs = run_reference(torch_model, batch.tokens, batch.mask, batch.positions, batch.type_ids)
    with jax.default_matmul_precision("highest"):
        x, ours = jmat.run(model, batch.tokens, mask=batch.mask, type_ids=batch.type_ids, keep=tuple(theirs))
    for site, expected in theirs.items():
        real = expected[batch.mask]
        tolerance = (1e-4 if site == "logits" else 1e-5) * max(1.0, float(np.abs(real).max()))
        np.testing.assert_allclose(np.asarray(ours[site])[batch.mask], real, rtol=0, atol=tolerance, err_msg=site)
    L = model.config.layers
    np.testing.assert_array_equal(x, ours[f"block.{L - 1}"])
    return set(theirs)


@pytest.mark.parametrize("case", [*hf.CASES, *families.CASES], ids=lambda case: case.name)
def test_every_site_matches_transformers(case, tmp_path):
    torch_model = hf.make(case)
    model, tokenizer = jmat.load(hf.save(torch_model, tmp_path))
    assert tokenizer is None
    compared = compare(model, torch_model, hf.batch(case))
    readable = [name for name in sites.readable(model.config.layers, model.config.heads) if ".head." not in name]
    assert compared == {name for name in readable if not name.endswith(case.hidden)}


@pytest.mark.parametrize("case", [hf.gpt2("positions"), hf.bert("positions")], ids=lambda case: case.name)
def test_given_positions_are_used(case, tmp_path):
    torch_model = hf.make(case)
    model, _ = jmat.load(hf.save(torch_model, tmp_path))
    batch = hf.batch(case)
    # Rising by 1: transformers takes a step back for the beginning of another text.
    positions = np.broadcast_to(np.arange(batch.tokens.shape[1], dtype=np.int32) + 2, batch.tokens.shape).copy()
    expected = run_reference(torch_model, batch.tokens, None, positions, batch.type_ids)["logits"]
    _, ours = jmat.run(model, batch.tokens, positions=positions, type_ids=batch.type_ids, keep=("logits",))
    np.testing.assert_allclose(ours["logits"], expected, rtol=0, atol=1e-4)
