"""Each field of each family's config.json with values of wrong types and sizes: refused
in one sentence, at once.
"""

import json
import random
import resource
import time

import pytest
import transformers

from jmat.models import FAMILIES, config_from_hf

DEEP = json.loads("[" * 900 + "]" * 900)
VALUES = [
    *(
        None,
        True,
        0,
        -1,
        2**31 - 1,
        2**31,
        10**30,
        10**400,
        1e-40,
        1e-50,
        1e200,
        float("nan"),
        float("-inf"),
        0.5,
    ),
    *(
        "",
        "x",
        "\ud800",
        "y" * 100_000,
        [],
        ["x"],
        [[]],
        {},
        {"a": [1]},
        DEEP,
        ["full_attention"] * 10,
    ),
    *([[["global"], 10**9]], [[[], 10**30]], [[["local"], -3]], ["global", 2]),
    *(
        {"rope_type": ["x"]},
        {"rope_type": {"a": 1}},
        {"type": 5},
        {"rope_type": "linear", "factor": True},
    ),
    *(
        {"rope_type": "yarn", "factor": 2.0, "truncate": [1]},
        {"rope_type": "yarn", "factor": 1e308},
    ),
    *(
        {"partial_rotary_factor": 1e30},
        {"partial_rotary_factor": "1"},
        {"rope_theta": 1e-30},
        {"rope_theta": None},
    ),
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 1},
]
NESTED = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "attention_types",
    "layer_types",
    "pad_token_id",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_mutated_configs_are_read_or_refused_in_one_sentence(family):
    full = json.loads(transformers.AutoConfig.for_model(family).to_json_string(use_diff=False))
    read, longest = 0, 0.0
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for field in {**full, **dict.fromkeys(NESTED)}:
        for value in (
            VALUES if field in NESTED else random.Random(f"{family} {field}").sample(VALUES, 5)
        ):
            start = time.process_time()
            try:
                config_from_hf({**full, "model_type": family, field: value})
                read += 1
            except ValueError as error:  # nothing else
                assert len(str(error)) < 1000, (field, value)  # noqa: PT017 (most of them are refused)
                assert "\n" not in str(error), (field, value)  # noqa: PT017
            longest = max(longest, time.process_time() - start)
    assert read > 30  # such as dropout rates
    assert longest < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 200 * 1024


@pytest.mark.parametrize(
    ("family", "field", "value", "message"),
    [
        (
            "gpt2",
            "layer_norm_epsilon",
            1e200,
            r"layer_norm_epsilon=1e\+200 should be a finite number of float32",
        ),
        ("bert", "layer_norm_eps", 1e-50, "layer_norm_eps=1e-50 is 0 in float32"),
        ("llama", "rms_norm_eps", 0, "rms_norm_eps=0.0 should be above 0"),
        ("llama", "num_hidden_layers", 10**30, "num_hidden_layers=10+ is too large"),
        ("gpt_neo", "num_layers", 2**31, "num_layers=2147483648 is too large"),
        ("llama", "rope_parameters", {"rope_type": ["x"]}, r"rope_type=\['x'\] should be text"),
        ("mistral", "rope_scaling", {"type": 5}, "type=5 should be text"),
        (
            "llama",
            "rope_parameters",
            {"rope_type": "yarn", "factor": 2.0, "truncate": 1},
            "truncate=1 should be true",
        ),
        (
            "llama",
            "rope_parameters",
            {"rope_type": "linear", "factor": True},
            "factor should be numbers above 0",
        ),
        ("gpt_neox", "rope_parameters", {"rope_theta": 0.5}, "rope_theta=0.5 should be at least 1"),
        (
            "llama",
            "rope_parameters",
            {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0},
            "should be above 1",
        ),
        ("llama", "head_dim", 5, "turn 6 of a head's 5 coordinates"),
        ("roberta", "pad_token_id", "x", "pad_token_id='x' should be a whole number above -1"),
        ("camembert", "pad_token_id", [1], r"pad_token_id=\[1\] should be a whole number"),
        (
            "gpt_neo",
            "attention_types",
            [[["global"], 10**9]],
            "attention_types=.* should name global or local",
        ),
        ("qwen3", "layer_types", [["full_attention"]], None),
    ],
)
def test_wrong_types_and_sizes_are_named(family, field, value, message):
    full = transformers.AutoConfig.for_model(family, use_sliding_window=True).to_dict()
    fields = {name: entry for name, entry in full.items() if entry is not None}
    with pytest.raises(ValueError, match=message):
        config_from_hf({**fields, "model_type": family, field: value})
