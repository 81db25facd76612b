"""GGUF files: written here from tiny Hugging Face models as llama.cpp's converter
writes them, and read back.
"""

import struct
import sys
import time

import gguf
import numpy as np
import pytest
import torch

import jmat
from jmat import checkpoint
from jmat.checkpoint import gguf_files, load_model
from tests import families, hf
from tests.memory import peak_of

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CASES = [
    families.llama("untied", rms_norm_eps=1e-3, **SIZES),
    families.llama("bias", attention_bias=True, tie_word_embeddings=True, **SIZES),
    families.llama("plain", "Qwen2", **SIZES),
    families.llama("plain", "Qwen3", head_dim=16, tie_word_embeddings=True, **SIZES),
    families.llama("plain", "Gemma", head_dim=16, **SIZES),
]
STEMS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write(model, path, *, kind="F32", metadata=(), tensors=()):
    """Converts a transformers model; `kind` is how matrices are stored."""
    config = model.config
    arch = config.model_type
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if arch == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    elif arch != "qwen2":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    for name, value in metadata:
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    for name, value in model.state_dict().items():
        stem, _, end = name.rpartition(".")
        if stem == "lm_head" and config.tie_word_embeddings:
            continue
        layer = stem.split(".")
        ours = (
            f"blk.{layer[2]}.{PARTS['.'.join(layer[3:])]}"
            if layer[1:2] == ["layers"]
            else STEMS[stem]
        )
        array = value.float().numpy()
        if arch == "gemma" and "norm" in name:
            array = array + 1
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(
            ours.split(".")[-1]
        )
        if arch == "llama" and heads:
            halves = array.reshape(heads, 2, -1, *array.shape[1:])
            array = halves.swapaxes(1, 2).reshape(array.shape)
        stored = gguf.GGMLQuantizationType[kind if array.ndim == 2 else "F32"]
        writer.add_tensor(
            f"{ours}.{end}", gguf.quantize(np.ascontiguousarray(array), stored), raw_dtype=stored
        )
    for name, value in tensors:
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def llama():
    return hf.make(CASES[0])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_gguf_file_is_the_model_that_it_was_made_from(case, tmp_path):
    ours, tokenizer = jmat.load(write(hf.make(case), tmp_path / "model.gguf"))
    assert tokenizer is None
    expected = hf.ours(case)
    assert ours.config == expected.config
    for path, value in checkpoint.parameters(expected).items():
        np.testing.assert_allclose(
            checkpoint.parameters(ours)[path], value, rtol=0, atol=1e-6, err_msg=path
        )


def test_quantised_weights_are_expanded(llama, tmp_path):
    write(llama, tmp_path / "model.gguf", kind="Q8_0")
    ours, _ = jmat.load(tmp_path)  # the only GGUF file of a folder stands for it
    for path, value in checkpoint.parameters(hf.ours(CASES[0])).items():
        error = float(np.abs(checkpoint.parameters(ours)[path] - value).max())
        assert error < 0.01, path
        assert error > 0 or value.ndim == 1, path
    saved = tmp_path / "saved"
    checkpoint.save_model(saved, ours)
    again = checkpoint.parameters(jmat.load(saved)[0])
    for path, value in checkpoint.parameters(ours).items():
        np.testing.assert_array_equal(again[path], value)


def test_frequency_factors_of_llama3(tmp_path):
    fields = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    scaling = {**fields, "original_max_position_embeddings": 8192}
    case = families.llama("3", **{**SIZES, "head_dim": 64, "rope_parameters": scaling})
    theirs = hf.make(case)
    plain = 5e5 ** (-np.arange(0, 64, 2) / 64)
    factors = (plain / theirs.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert factors[0] == pytest.approx(1)
    assert factors[-1] == pytest.approx(8)
    ours, _ = jmat.load(
        write(theirs, tmp_path / "a.gguf", tensors=[("rope_freqs.weight", factors)])
    )
    assert ours.config.rotary == hf.ours(case).config.rotary
    other = write(theirs, tmp_path / "b.gguf", tensors=[("rope_freqs.weight", np.sqrt(factors))])
    with pytest.raises(ValueError, match=r"not Llama 3\.1's scaling"):
        jmat.load(other)


def test_linear_scaling(llama, tmp_path):
    metadata = [("llama.rope.scaling.type", "linear"), ("llama.rope.scaling.factor", 4.0)]
    ours, _ = jmat.load(write(llama, tmp_path / "model.gguf", metadata=metadata))
    assert (ours.config.rotary.kind, ours.config.rotary.factor) == ("linear", 4.0)


def test_what_is_not_implemented_is_refused(llama, tmp_path):
    def load(**options):
        jmat.load(write(llama, tmp_path / "model.gguf", **options))

    with pytest.raises(ValueError, match="expert_count=4 is a field that jmat does not know"):
        load(metadata=[("llama.expert_count", 4)])
    with pytest.raises(ValueError, match="value_length=5 differs"):
        load(metadata=[("llama.attention.value_length", 5)])
    with pytest.raises(ValueError, match=r"surplus blk\.0\.attn_sinks\.weight"):
        load(tensors=[("blk.0.attn_sinks.weight", np.ones(4, np.float32))])
    with pytest.raises(ValueError, match="part 1 of 2 of a split GGUF file"):
        load(metadata=[("split.count", 2)])
    llama.config.model_type = "starcoder2"
    with pytest.raises(ValueError, match="holds a 'starcoder2' model"):
        load()


def test_damaged_and_ambiguous_files(llama, tmp_path, monkeypatch):
    path = write(llama, tmp_path / "model.gguf")
    for cut in (10, 200, path.stat().st_size // 2):
        (tmp_path / "cut.gguf").write_bytes(path.read_bytes()[:cut])
        with pytest.raises(ValueError, match=r"cut\.gguf is (truncated or )?not a GGUF file"):
            jmat.load(tmp_path / "cut.gguf")
    with pytest.raises(ValueError, match="holds 2 GGUF files"):
        jmat.load(tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"jmat\[gguf\]"):
        jmat.load(path)


def test_half_precision_is_exact(llama, tmp_path):
    llama.to(torch.bfloat16)
    ours, _ = jmat.load(write(llama, tmp_path / "model.gguf", kind="BF16"))
    table = llama.model.embed_tokens.weight.detach().float().numpy()
    np.testing.assert_array_equal(ours.embed.tokens.table[...], table)


def gguf_bytes(*metadata, tensors=b"", count=0, version=3):
    """A file with these fields, (name, type, bytes of the value), and these
    descriptions of tensors.
    """
    content = b"GGUF" + struct.pack("<IQQ", version, count, len(metadata))
    for name, kind, value in metadata:
        content += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value
    return content + tensors


def tensor_bytes(name, shape, kind=0, offset=0):
    sizes = struct.pack(f"<{len(shape)}Q", *shape)
    return (
        struct.pack("<Q", len(name))
        + name.encode()
        + struct.pack("<I", len(shape))
        + sizes
        + (struct.pack("<IQ", kind, offset))
    )


HOSTILE = {
    "array of 2^40 numbers": gguf_bytes(("a", 9, struct.pack("<IQ", 0, 2**40) + b"x" * 64)),
    "array of 2^40 texts": gguf_bytes(("a", 9, struct.pack("<IQ", 8, 2**40) + b"\0" * 6400)),
    "array of arrays": gguf_bytes(
        ("a", 9, struct.pack("<IQ", 9, 2**20) + struct.pack("<IQ", 9, 2) * 64)
    ),
    "text of 2^63 bytes": gguf_bytes(("a", 8, struct.pack("<Q", 2**63) + b"x")),
    "2^60 fields": b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60) + b"\0" * 4000,
    "2^60 tensors": b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0),
    "tensor of 2^40 numbers": gguf_bytes(tensors=tensor_bytes("t", (2**20, 2**20)), count=1),
    "tensor of 2^32 axes": gguf_bytes(
        tensors=b"\1" + b"\0" * 7 + b"t" + b"\xff" * 4 + b"\0" * 64, count=1
    ),
    "tensors on top of one another": gguf_bytes(
        tensors=tensor_bytes("a", (100,)) + tensor_bytes("b", (100,)) + b"\0" * 500, count=2
    ),
    "tensor of type 999": gguf_bytes(tensors=tensor_bytes("t", (4,), 999) + b"\0" * 99, count=1),
    "torn block": gguf_bytes(tensors=tensor_bytes("t", (33,), 8) + b"\0" * 99, count=1),
    "alignment 0": gguf_bytes(("general.alignment", 4, struct.pack("<I", 0))),
    "field twice": gguf_bytes(("a", 0, b"x"), ("a", 0, b"x")),
    "name that is no text": gguf_bytes(("a", 8, struct.pack("<Q", 1) + b"\xff")),
    "version 1": gguf_bytes(version=1),
    "big-endian": gguf_bytes(version=3 << 24),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_announced_sizes_are_held_against_the_file_before_anything_is_read(content, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    start = time.process_time()

    def refused():
        with pytest.raises(ValueError, match=r"model\.gguf is truncated or not a GGUF file \(it"):
            load_model(path)

    assert peak_of(refused) < 5_000_000
    assert time.process_time() - start < 1


def test_a_split_file_says_what_to_do(llama, tmp_path):
    for number in (1, 2):
        path = tmp_path / f"model-{number:05}-of-00002.gguf"
        path.write_bytes(b"GGUF")
        for name in (path, tmp_path):
            with pytest.raises(
                ValueError,
                match=r"is part [12] of 2 of a split GGUF file: join .*llama-gguf-split --merge",
            ):
                load_model(name)
    write(llama, tmp_path / "renamed.gguf", metadata=[("split.count", 3), ("split.no", 1)])
    with pytest.raises(ValueError, match="is part 2 of 3 of a split"):
        load_model(tmp_path / "renamed.gguf")


# What llama.cpp's files say → what config.json says; each number is its own.
FIELDS = {
    "context_length": ("max_position_embeddings", 2049),
    "embedding_length": ("hidden_size", 65),
    "block_count": ("num_hidden_layers", 3),
    "feed_forward_length": ("intermediate_size", 130),
    "attention.head_count": ("num_attention_heads", 9),
    "attention.head_count_kv": ("num_key_value_heads", 4),
    "attention.key_length": ("head_dim", 16),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", 1e-5),
    "rope.freq_base": ("rope_theta", 500000.0),
}
SCALING = {
    "rope.scaling.type": ("rope_type", "yarn"),
    "rope.scaling.factor": ("factor", 4.0),
    "rope.scaling.original_context_length": ("original_max_position_embeddings", 512),
    "rope.scaling.attn_factor": ("attention_factor", 1.5),
    "rope.scaling.yarn_beta_fast": ("beta_fast", 31.0),
    "rope.scaling.yarn_beta_slow": ("beta_slow", 2.0),
}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma"])
def test_every_field_of_the_header_has_its_own_name_in_the_config(family, tmp_path):
    metadata = {"general.architecture": family, "general.name": "x"}
    metadata |= {f"{family}.{name}": value for name, (_, value) in (FIELDS | SCALING).items()}
    shapes = {"model.embed_tokens.weight": (77, 65), "lm_head.weight": (77, 65)}
    found = gguf_files._config(tmp_path / "x.gguf", metadata, shapes)
    scaling = found.pop("rope_scaling")
    assert scaling == dict(SCALING.values())
    wanted = {
        "model_type": family,
        "vocab_size": 77,
        "tie_word_embeddings": False,
        **dict(FIELDS.values()),
    }
    assert {name: found[name] for name in wanted} == wanted
    assert found.get("attention_bias") == (None if family == "qwen2" else False)
    tied = gguf_files._config(
        tmp_path / "x.gguf", metadata, {"model.embed_tokens.weight": (77, 65)}
    )
    assert tied["tie_word_embeddings"] is True
