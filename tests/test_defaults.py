"""Fields that a config.json leaves out mean what they mean to transformers, in every
family.
"""

import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jmat import models
from jmat.models import rotary
from tests import families, hf

# Fields whose own defaults show only beside others.
BESIDE = {
    "qwen2": {"use_sliding_window": True, "num_hidden_layers": 40, "max_position_embeddings": 8192},
    "qwen3": {"use_sliding_window": True, "num_hidden_layers": 40, "num_attention_heads": 64},
    "gpt_neo": {"hidden_size": 1024, "num_heads": 4, "max_position_embeddings": 100},
    "llama": {"hidden_size": 1024, "num_attention_heads": 16},
    "mistral": {"num_attention_heads": 16, "max_position_embeddings": 8192},
    "opt": {"do_layer_norm_before": False, "hidden_size": 96},
    "bloom": {"hidden_size": 96},
    "gpt_neox": {"hidden_size": 512, "num_attention_heads": 4, "intermediate_size": 300},
}


@pytest.mark.parametrize("fields", [{}, BESIDE], ids=["alone", "beside others"])
@pytest.mark.parametrize("family", models.FAMILIES)
def test_absent_fields_are_those_of_transformers(family, fields):
    given = fields.get(family, {})
    full = transformers.AutoConfig.for_model(family, **given).to_dict()
    whole = models.config_from_hf(
        {name: value for name, value in full.items() if value is not None}
    )
    assert models.config_from_hf({"model_type": family, **given}) == whole


@pytest.mark.parametrize(
    "case", [hf.gpt2("plain"), hf.bert("plain"), *families.CASES], ids=lambda case: case.name
)  # fmt: skip
def test_norms_add_what_those_of_transformers_add(case):
    norms = [module for module in hf.make(case).modules() if "Norm" in type(module).__name__]
    found = {getattr(norm, "eps", getattr(norm, "variance_epsilon", None)) for norm in norms}
    assert found == {families.config_of(case).norm_eps}


def yarn(**fields):
    return {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 1000.0,
        "original_max_position_embeddings": 64,
        **fields,
    }


@pytest.mark.parametrize(
    "scaling",
    [
        yarn(),
        yarn(original_max_position_embeddings=790),  # the default of beta_fast matters from 202 on
        yarn(beta_fast=8.0),
        yarn(beta_slow=0.5, truncate=False),
        yarn(attention_factor=0.7),
        yarn(mscale=0.7),
        yarn(mscale=0.7, mscale_all_dim=0.3),
        # Few turns and a small base: the ramp ends beyond the last pair, at 3/4 of the coordinates,
        # or beyond them.
        yarn(rope_theta=10.0, original_max_position_embeddings=200, beta_fast=30.0),
        yarn(rope_theta=4.0, original_max_position_embeddings=200, beta_fast=20.0, truncate=False),
        {"rope_type": "linear", "factor": 3.0, "rope_theta": 300.0},
        {"rope_type": "llama3", "factor": 8.0, "rope_theta": 500.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
    ],
    ids=str,
)  # fmt: skip
def test_scaled_rotary_positions_are_those_of_transformers(scaling):
    case = families.llama(
        "scaled", head_dim=32, max_position_embeddings=800, rope_parameters=scaling
    )
    theirs, amplitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](
        transformers.LlamaConfig(**case.fields)
    )
    ours = families.config_of(case).rotary
    np.testing.assert_allclose(rotary.frequencies(ours), theirs, rtol=3e-7)
    assert ours.amplitude == pytest.approx(amplitude)
