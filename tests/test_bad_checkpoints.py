"""Checkpoints and config files that are damaged, or do not fit, are refused in one
clear sentence.
"""

import json
import os
import zipfile

import pytest
import safetensors.torch
import torch
import transformers

from jmat.checkpoint import load_model
from jmat.runtime.json_files import read_json_object
from tests import hf
from tests.memory import peak_of

CASES = {"gpt2": hf.gpt2("bad"), "bert": hf.bert("bad")}


@pytest.fixture(scope="module", params=CASES)
def torch_model(request):
    return hf.make(CASES[request.param])


@pytest.fixture(scope="module")
def gpt2():
    return hf.make(CASES["gpt2"])


def test_json_of_no_sensible_size_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"a": 1}')
    assert read_json_object(path, most_bytes=8) == {"a": 1}
    with pytest.raises(ValueError, match="it has 8 bytes, and no such file needs more than 7"):
        read_json_object(path, most_bytes=7)
    os.truncate(path, 2**24 + 1)
    assert peak_of(lambda: refused(path)) < 2**20


def refused(path):
    with pytest.raises(
        ValueError, match="it has 16777217 bytes, and no such file needs more than 16777216"
    ):
        read_json_object(path)


# --- weights --------------------------------------------------------------------------------------


def test_all_misfits_are_reported_together_by_name(gpt2, tmp_path):
    def damage(tensors):
        del tensors["transformer.h.0.ln_1.bias"], tensors["transformer.ln_f.weight"]
        fused = tensors["transformer.h.1.attn.c_attn.weight"]
        return {
            **tensors,
            "transformer.h.1.attn.c_attn.weight": fused.T,
            "transformer.h.2.ln_1.bias": torch.zeros(16),
            "transformer.h.0.lora_A": torch.zeros(3),
            "wpe.weight": tensors["transformer.wpe.weight"],
            "transformer.h.1.ln_2.bias": torch.zeros(16, dtype=torch.int8),
        }

    with pytest.raises(ValueError, match=r"does not fit its config.json") as caught:
        load_model(hf.rewrite(tmp_path, gpt2, damage))
    for problem in (
        "missing transformer.h.0.ln_1.bias",
        "missing transformer.ln_f.weight",
        "transformer.h.1.attn.c_attn.weight has shape (48, 16), expected (16, 48)",
        "surplus transformer.h.2.ln_1.bias",
        "surplus transformer.h.0.lora_A",
        "wpe.weight is the same tensor as another",
        "transformer.h.1.ln_2.bias is I8, expected F16, BF16, F32, F64",
    ):
        assert problem in str(caught.value)


def test_a_config_that_asks_for_another_model_is_refused(torch_model, tmp_path):
    layers = "n_layer" if torch_model.config.model_type == "gpt2" else "num_hidden_layers"
    hf.rewrite(tmp_path, torch_model, **{layers: 5, "vocab_size": 41})
    with pytest.raises(ValueError, match=r"missing .*and \d+ more") as caught:
        load_model(tmp_path)
    assert "has shape (37, 16), expected (41, 16)" in str(caught.value)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite_are_refused(gpt2, value, dtype, tmp_path):
    def spoil(tensors):
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        tensors["transformer.h.1.mlp.c_fc.bias"][3] = value
        return tensors

    with pytest.raises(
        ValueError, match=r"transformer.h.1.mlp.c_fc.bias in .* holds NaN or infinity"
    ):
        load_model(hf.rewrite(tmp_path, gpt2, spoil))


def test_weights_that_overflow_the_dtype_are_refused(gpt2, tmp_path):
    def enlarge(tensors):
        tensors["transformer.wpe.weight"][2, 3] = -7e4
        return tensors

    hf.rewrite(tmp_path, gpt2, enlarge)
    load_model(tmp_path, dtype="bfloat16")
    with pytest.raises(
        ValueError, match=r"transformer.wpe.weight in .* beyond 65504, the most that float16 can"
    ):
        load_model(tmp_path, dtype="float16")


@pytest.mark.parametrize("share", [0, 0.0001, 0.01, 0.5, 0.999])
@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
def test_a_truncated_file_is_one_sentence(gpt2, kind, share, tmp_path):
    gpt2.config.save_pretrained(tmp_path)
    path = tmp_path / kind
    state = {name: tensor.clone() for name, tensor in gpt2.state_dict().items()}
    safetensors.torch.save_file(state, path) if kind.startswith("model") else torch.save(
        state, path
    )
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(
        ValueError, match=r"is truncated or not a safetensors file|is corrupt or holds more"
    ) as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_text_file_instead_of_weights_is_refused(gpt2, tmp_path):
    gpt2.config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_text("<html>404: no such file</html>")
    with pytest.raises(ValueError, match="is truncated or not a safetensors file"):
        load_model(tmp_path)


def test_what_is_not_there_is_named(gpt2, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no config.json"):
        load_model(tmp_path)
    gpt2.config.save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"holds no weights; expected model.safetensors"):
        load_model(tmp_path)


def sharded(folder, torch_model):
    torch_model.save_pretrained(folder, max_shard_size="12KB")
    index = folder / "model.safetensors.index.json"
    return index, json.loads(index.read_text())["weight_map"]


def test_missing_shards_are_named(gpt2, tmp_path):
    _, weight_map = sharded(tmp_path, gpt2)
    shard = next(iter(weight_map.values()))
    (tmp_path / shard).unlink()
    with pytest.raises(FileNotFoundError, match=rf"lacks 1 of \d+ shards: {shard}"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "outside", ["../secret.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ".", ""]
)
def test_an_index_may_not_name_files_outside_its_folder(gpt2, outside, tmp_path):
    index, weight_map = sharded(tmp_path, gpt2)
    weight_map["transformer.wte.weight"] = outside
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match="outside its folder"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": ["a"]}', "[" * 100_000]
)
def test_an_index_that_is_none_is_refused(gpt2, content, tmp_path):
    index, _ = sharded(tmp_path, gpt2)
    index.write_text(content)
    with pytest.raises(ValueError, match="is not a shard index"):
        load_model(tmp_path)


def test_a_tensor_in_two_shards_is_refused(gpt2, tmp_path):
    _, weight_map = sharded(tmp_path, gpt2)
    first, second = sorted(set(weight_map.values()))[:2]
    tensors = safetensors.torch.load_file(tmp_path / first) | safetensors.torch.load_file(
        tmp_path / second
    )
    safetensors.torch.save_file(tensors, tmp_path / second)
    with pytest.raises(ValueError, match=f"is stored twice, in {first} and in {second}"):
        load_model(tmp_path)


# --- config.json ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("\x00\xff", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[1]", "holds a list; expected an object"),
        ("{}", r"model_type=None is not implemented; jmat implements .*bert.*gpt2"),
        ('{"model_type": "t5"}', "model_type='t5' is not implemented"),
        ('{"model_type": ["gpt2"]}', "model_type=.* is not implemented"),
    ],
)
def test_a_config_that_is_none_is_refused(content, message, tmp_path):
    (tmp_path / "config.json").write_text(content, "latin-1")
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path)


REFUSED = [
    ("gpt2", {"activation_function": "mish"}, "activation_function='mish' is not implemented"),
    (
        "gpt2",
        {"activation_function": ["gelu"]},
        r"activation_function=\['gelu'\] is not implemented",
    ),
    ("gpt2", {"n_layer": 0}, "n_layer=0 should be a whole number above 0"),
    ("gpt2", {"n_layer": "2"}, "n_layer='2' should be a whole number"),
    ("gpt2", {"n_embd": 16.0}, "n_embd=16.0 should be a whole number"),
    ("gpt2", {"n_head": 5}, "n_embd=16 is not a multiple of n_head=5"),
    (
        "gpt2",
        {"layer_norm_epsilon": "small"},
        "layer_norm_epsilon='small' should be a finite number",
    ),
    (
        "gpt2",
        {"layer_norm_epsilon": float("nan")},
        "layer_norm_epsilon=nan should be a finite number",
    ),
    ("gpt2", {"layer_norm_epsilon": 10**400}, "should be a finite number"),
    ("gpt2", {"scale_attn_weights": "yes"}, "scale_attn_weights='yes' should be true or false"),
    ("gpt2", {"tie_word_embeddings": 1}, "tie_word_embeddings=1 should be true or false"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True is not implemented"),
    ("gpt2", {"pruned_heads": {"0": [1]}}, "pruned_heads="),
    ("gpt2", {"quantization_config": {"bits": 4}}, "quantization_config="),
    ("gpt2", {"auto_map": {"AutoModel": "x.Y"}}, "auto_map="),
    ("gpt2", {"is_causal": False}, "is_causal=False is a field that jmat does not know"),
    (
        "gpt2",
        {"kv_sharing_modes": 2},
        r"kv_sharing_modes=2 .* load with ignore_config=\('kv_sharing_modes',\)",
    ),
    ("bert", {"hidden_act": "mish"}, "hidden_act='mish' is not implemented"),
    (
        "bert",
        {"position_embedding_type": "relative_key"},
        "position_embedding_type='relative_key' is not implemented",
    ),
    ("bert", {"embedding_size": 8}, "embedding_size=8 is not implemented"),
    (
        "bert",
        {"num_attention_heads": 5},
        "hidden_size=16 is not a multiple of num_attention_heads=5",
    ),
    ("bert", {"type_vocab_size": 0}, "type_vocab_size=0 should be a whole number above 0"),
    ("bert", {"is_decoder": "no"}, "is_decoder='no' should be true or false"),
    (
        "bert",
        {"add_cross_attention": True, "is_decoder": True},
        "add_cross_attention=True is not implemented",
    ),
    (
        "bert",
        {"layer_norm_eps": None, "dtype_plan": True},
        "dtype_plan=True is a field that jmat does not know",
    ),
]


@pytest.mark.parametrize(
    ("family", "fields", "message"), REFUSED, ids=lambda value: str(value)[:40]
)
def test_every_field_that_is_not_implemented_is_refused_by_name(family, fields, message, tmp_path):
    getattr(transformers, CASES[family].config)(**CASES[family].fields).save_pretrained(tmp_path)
    hf.rewrite_config(tmp_path, **fields)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path)


def test_what_follows_from_a_malformed_field_is_not_reported(tmp_path):
    transformers.GPT2Config(**CASES["gpt2"].fields).save_pretrained(tmp_path)
    hf.rewrite_config(tmp_path, n_embd="24")
    with pytest.raises(
        ValueError, match=r"config\.json: n_embd='24' should be a whole number above 0\.$"
    ):
        load_model(tmp_path)


def test_all_refused_fields_are_reported_together(tmp_path):
    config = transformers.GPT2Config(**CASES["gpt2"].fields)
    config.save_pretrained(tmp_path)
    hf.rewrite_config(tmp_path, activation_function="mish", n_head=-1, is_causal=False)
    with pytest.raises(ValueError, match=r"activation_function='mish'") as caught:
        load_model(tmp_path)
    assert "n_head=-1" in str(caught.value)
    assert "is_causal=False" in str(caught.value)


def test_a_git_lfs_pointer_says_so(gpt2, tmp_path):
    hf.rewrite(tmp_path, gpt2)
    (tmp_path / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    )
    with pytest.raises(ValueError, match="git lfs pull"):
        load_model(tmp_path)


def test_an_epsilon_of_a_norm_is_above_zero(gpt2, tmp_path):
    with pytest.raises(ValueError, match=r"layer_norm_epsilon=-1\.0 should be above 0"):
        load_model(hf.rewrite(tmp_path, gpt2, layer_norm_epsilon=-1))


def test_many_more_blocks_than_tensors_are_refused_at_once(gpt2, tmp_path):
    with pytest.raises(ValueError, match="1000000 blocks, but"):
        load_model(hf.rewrite(tmp_path, gpt2, n_layer=1_000_000))


def test_sizes_are_held_against_the_file_before_memory_is_taken(gpt2, tmp_path):
    def refused():
        with pytest.raises(ValueError, match=r"does not fit its config\.json"):
            load_model(tmp_path)

    hf.rewrite(tmp_path, gpt2)
    for fields in (
        {"n_embd": 60_000},
        {"n_embd": 2**28},
        {"vocab_size": 2**31 - 1},
        {"n_inner": 2**31 - 1},
    ):
        hf.rewrite_config(tmp_path, **{"n_embd": 16, "vocab_size": 37, "n_inner": None, **fields})
        assert peak_of(refused) < 20_000_000


@pytest.mark.parametrize("size", [0, 1 << 25])
def test_a_config_of_any_size_is_one_sentence(size, tmp_path):
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(size)
    with pytest.raises(ValueError, match=r"is not valid JSON|it has 33554432 bytes"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "name", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"]
)
@pytest.mark.parametrize("beside_a_model", [True, False])
def test_an_adapter_in_the_folder_is_refused(gpt2, name, beside_a_model, tmp_path):
    if beside_a_model:
        hf.rewrite(tmp_path, gpt2)
    (tmp_path / name).write_text("{}")
    with pytest.raises(
        ValueError, match=rf"holds an adapter, .*\({name}\).* merge it into its model first"
    ):
        load_model(tmp_path)


def test_a_pickle_that_announces_more_than_it_holds_is_refused(gpt2, tmp_path):
    gpt2.config.save_pretrained(tmp_path)
    path = tmp_path / "pytorch_model.bin"
    torch.save({"transformer.wte.weight": torch.zeros(1, 1).expand(2**20, 2**20)}, path)
    with pytest.raises(
        ValueError, match=r"announces the shape \(1048576, 1048576\), and holds 4 bytes"
    ):
        load_model(tmp_path)
    torch.save({"transformer.wte.weight": torch.zeros(1 << 20)}, path)
    with (
        zipfile.ZipFile(path) as archive,
        zipfile.ZipFile(tmp_path / "new", "w", zipfile.ZIP_DEFLATED) as compressed,
    ):
        for part in archive.infolist():
            compressed.writestr(part.filename, archive.read(part))
    (tmp_path / "new").rename(path)
    with pytest.raises(
        ValueError, match=r"is corrupt or holds more than tensors \(.* is compressed\)"
    ):
        load_model(tmp_path)
