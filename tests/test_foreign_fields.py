"""Fields of a config.json that are not jmat's: other names, what transformers does not
know, what is to be ignored.
"""

import ast
import functools
import json
import logging
import pathlib

import pytest
import transformers

from jmat import models
from jmat.models import FAMILIES
from jmat.models.transformers_fields import READ_UNDECLARED, known_to_transformers

SOURCE = pathlib.Path(transformers.__file__).parent
SHARED = [
    "cache_utils.py",
    "configuration_utils.py",
    "core_model_loading.py",
    "fusion_mapping.py",
    "integrations/flash_attention.py",
    "integrations/sdpa_attention.py",
    "masking_utils.py",
    "modeling_layers.py",
    "modeling_rope_utils.py",
    "modeling_utils.py",
    "quantizers/auto.py",
    "utils/generic.py",
]
# Read by that code from something else than a model's config, for training, for other heads or for
# other families.
ELSEWHERE = set(
    """
    attention_dropout classifier_dropout hidden_dropout init_std initializer_factor initializer_range
    summary_last_dropout sep_token_id
    first_k_dense_replace mlp_layer_types number_of_conv_states in_channels patch_size temporal_patch_size
    compile_config create_compatible_mapping dequantize device_mesh disable_mmap disk_offload_folder gguf_file
    ignore_mismatched_sizes load_in_8bit offload_buffers pretrained_model_name_or_path sanitize_kernel_mapping
    sharded_metadata weights_only get items attn_implementation
    """.split()
)


def is_config(node):
    name = (
        node.id
        if isinstance(node, ast.Name)
        else node.attr
        if isinstance(node, ast.Attribute)
        else ""
    )
    return name.endswith("config")


@functools.cache
def reads(file):
    """The fields that a file of transformers reads from anything called config, or
    takes out of config.json.
    """
    names = set()
    for node in ast.walk(ast.parse((SOURCE / file).read_text("utf-8"))):
        if isinstance(node, ast.Attribute) and is_config(node.value):
            names.add(node.attr)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr")
        ):
            if is_config(node.args[0]) and isinstance(node.args[1], ast.Constant):
                names.add(node.args[1].value)
        elif isinstance(node, ast.FunctionDef) and node.name in (
            "__post_init__",
            "convert_rope_params_to_dict",
        ):
            taken = [call for call in ast.walk(node) if isinstance(call, ast.Call) and call.args]
            taken = [
                call
                for call in taken
                if isinstance(call.func, ast.Attribute) and call.func.attr in ("pop", "get")
            ]
            names |= {
                call.args[0].value for call in taken if isinstance(call.args[0], ast.Constant)
            }
    return names


def module_of(family):
    return family.replace("-", "_")


def base(family, **fields):
    full = transformers.AutoConfig.for_model(family).to_dict()
    return {
        **{name: value for name, value in full.items() if value is not None},
        "model_type": family,
        **fields,
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_that_transformers_reads_is_known(family):
    """Else a field that changes what transformers computes could be passed over."""
    own = [
        f"models/{module_of(family)}/{kind}_{module_of(family)}.py"
        for kind in ("modeling", "configuration")
    ]
    read = set().union(*map(reads, [*SHARED, *own]))
    assert len(read) > 100
    unknown = {name for name in read - known_to_transformers(family) if not name.startswith("_")}
    # of rotary families
    own_sizes = {"max_position_embeddings", "num_key_value_heads", "rms_norm_eps"}
    # GPT-Neo's is read by jmat
    assert unknown - ELSEWHERE - own_sizes - {"attention_layers"} == set()


@pytest.mark.parametrize("family", FAMILIES)
def test_foreign_fields_are_passed_over_with_one_line(family, caplog):
    foreign = {
        "unsloth_version": "2024.9",
        "residual_scale": 2,
        "rotary_kind": {"a": [1]},
        "note": None,
    }
    with caplog.at_level(logging.WARNING):
        config = models.config_from_hf(base(family, **foreign))
    assert config == models.config_from_hf(base(family))
    (line,) = caplog.messages
    assert "residual_scale=2" in line
    assert "unsloth_version='2024.9'" in line
    with pytest.raises(
        ValueError, match=r"residual_scale=2 is a field that jmat does not know .*ignore_config="
    ):
        models.config_from_hf(base(family, residual_scale=2), foreign=False)
    caplog.clear()
    models.config_from_hf(base(family, **foreign), ignore=tuple(foreign))
    assert not caplog.messages


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_that_shared_code_of_transformers_reads_stay_refused(family):
    for name in (
        "is_causal",
        "attention_chunk_size",
        "text_config",
        "transformers_weights",
        "per_layer_config",
    ):
        assert name in READ_UNDECLARED
        with pytest.raises(ValueError, match=f"{name}=3 is"):
            models.config_from_hf(base(family, **{name: 3}))
    models.config_from_hf(base(family, attention_chunk_size=None, text_config=None))
    with pytest.raises(ValueError, match="is_causal=None"):
        models.config_from_hf(base(family, is_causal=None))


def test_long_and_many_foreign_fields_are_cut(caplog):
    models.config_from_hf(base("gpt2", vocabulary=["word"] * 100_000, **{"a" * 100_000: 1}))
    assert len(caplog.text) < 400
    caplog.clear()
    models.config_from_hf(base("gpt2", **{f"foreign_{i}": i for i in range(10_000)}))
    (line,) = caplog.messages
    assert len(line) < 1000
    assert line.endswith("foreign_19=19, and 9980 more.")


# --- other names ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_other_names_are_those_of_transformers(family):
    extra = {"n_embed": "hidden_size"} if family == "bloom" else {}
    assert FAMILIES[family].aliases == transformers.CONFIG_MAPPING[family].attribute_map | extra


@pytest.mark.parametrize("family", [family for family in FAMILIES if FAMILIES[family].aliases])
def test_either_name_of_a_field_is_read(family):
    plain = base(family)
    aliases = FAMILIES[family].aliases
    other = {
        {name: alias for alias, name in aliases.items()}.get(name, name): value
        for name, value in plain.items()
    }
    assert set(other) >= set(aliases)
    config = models.config_from_hf(other)
    assert config == models.config_from_hf(plain)
    # saved under the usual names only
    assert config.to_hf() == models.config_from_hf(plain).to_hf()
    assert models.config_from_hf({**other, **plain}) == config  # both, and both the same
    for alias, name in aliases.items():
        wrong = {**plain, alias: plain[name] * 2}
        with pytest.raises(
            ValueError,
            match=rf"{alias}=\d+ and {name}=\d+ are two names of one field.*take {alias}",
        ):
            models.config_from_hf(wrong)
        assert models.config_from_hf(wrong, ignore=(alias,)) == config
        assert models.config_from_hf({**plain, alias: None}) == config


def test_transformers_takes_the_other_name():
    """As the message says."""
    assert transformers.GPT2Config(n_embd=32, hidden_size=64).n_embd == 64
    assert transformers.BloomConfig(hidden_size=32, n_embed=64).hidden_size == 64


# --- fields to ignore -----------------------------------------------------------------------------


def test_a_field_to_ignore_that_is_not_there_is_refused_with_the_near_names():
    with pytest.raises(
        ValueError, match="there is no field 'residual_scal' to ignore; there is residual_scale"
    ):
        models.config_from_hf(base("gpt2", residual_scale=2), ignore=("residual_scal",))
    with pytest.raises(ValueError, match=r"there is no field 'zzz' to ignore\.$"):
        models.config_from_hf(base("gpt2"), ignore=("zzz",))


def test_of_two_models_only_one_need_have_a_field_to_ignore(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(base("gpt2", residual_scale=2)))
    assert models.fields_among(tmp_path, ["residual_scale", "other"]) == ("residual_scale",)
    assert models.fields_among(tmp_path, ["other"]) == ()
    assert (
        models.read_config(tmp_path, models.fields_among(tmp_path, ["residual_scale"])).layers == 12
    )
