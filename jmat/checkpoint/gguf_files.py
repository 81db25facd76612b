"""GGUF files (llama.cpp) of LLaMA and its relatives, read as the Hugging Face folders
that they were made from.

Needs the package `gguf` (the extra `jmat[gguf]`). Quantised weights are given back as
float32.
"""

import pathlib
import re
import types

import numpy as np

from jmat.checkpoint.gguf_header import GgufHeader, GgufTensor, read_header
from jmat.checkpoint.tensor_files import TensorFiles
from jmat.models.config import Rotary
from jmat.models.config_reader import is_number
from jmat.models.rotary import frequencies
from jmat.runtime.annotations import JsonObject
from jmat.runtime.errors import shortened

# `general.architecture` is the model_type. Metadata → config.json; all begin with the
# architecture's name.
_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma")
_FIELDS = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
# Said by other fields already, checked below, or of no consequence.
_NEUTRAL = {
    "rope.dimension_count",
    "attention.value_length",
    "tensor_data_layout",
    "rope.scaling.finetuned",
}
_SCALING = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FREQUENCY_FACTORS = "rope_freqs.weight"


def find_gguf(folder: pathlib.Path) -> pathlib.Path | None:
    """Returns the GGUF file that stands for a folder: the path itself, or the only one
    in a folder without config.json.

    Raises ValueError if there are several, or if it is one part of several.
    """
    is_model_folder = (folder / "config.json").is_file()
    gguf = (
        [folder] if folder.is_file() else [] if is_model_folder else sorted(folder.glob("*.gguf"))
    )
    for path in gguf:
        if part := re.search(r"-(\d{5,})-of-(\d{5,})$", path.stem):
            raise ValueError(_is_a_part(path, int(part[1]), int(part[2])))
    if len(gguf) > 1:
        raise ValueError(
            f"{folder} holds {len(gguf)} GGUF files; name one of them, such as {gguf[0]}."
        )
    return gguf[0] if gguf else None


def _is_a_part(path: pathlib.Path, number: int, count: int) -> str:
    return (
        f"{path} is part {number} of {count} of a split GGUF file: join them first with "
        "llama.cpp's `llama-gguf-split --merge FIRST_PART WHOLE.gguf`, and load the whole."
    )


def open_gguf(path: pathlib.Path) -> tuple[JsonObject, TensorFiles]:
    """Returns the config.json and the tensors, under Hugging Face's names, of a GGUF
    file.

    Raises:
      ValueError: the package `gguf` is missing; the file is truncated or corrupt, one
        part of several, or of another architecture. What else jmat does not implement
        is left in the config for its reader to refuse by name.
    """
    gguf, header = _read(path)
    metadata = {
        name: value for name, value in header.metadata.items() if not name.startswith("tokenizer.")
    }
    parts = metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        number = metadata.get("split.no", 0)
        raise ValueError(_is_a_part(path, 1 + number if isinstance(number, int) else 1, parts))
    tensors = {_hf_name(name): (name, tensor) for name, tensor in header.tensors.items()}
    if len(tensors) < len(header.tensors):
        raise ValueError(f"{path} holds a tensor under two names; download it again.")

    def expand(stored_name: str, tensor: GgufTensor) -> np.ndarray:
        kind = gguf.GGMLQuantizationType(tensor.kind)
        stored = np.fromfile(path, np.uint8, tensor.size, offset=tensor.start)
        by_row = stored.reshape(*tensor.shape[:-1], -1) if stored.size and tensor.shape else stored
        try:
            return (
                gguf.dequantize(by_row, kind).astype(np.float32, copy=False).reshape(tensor.shape)
            )
        except NotImplementedError:
            raise ValueError(
                f"{stored_name} in {path} is {kind.name}, which the package gguf cannot expand."
            ) from None

    def read(name: str, rows: slice = slice(None)) -> np.ndarray:
        stored_name, tensor = tensors[name]
        values = _as_in_hugging_face(expand(stored_name, tensor), stored_name, hf)
        return values[rows].copy() if values.ndim else values.copy()

    factors = tensors.pop(_FREQUENCY_FACTORS, None)
    shapes = {name: tensor.shape for name, (_, tensor) in tensors.items()}
    hf = _config(path, metadata, shapes)
    if factors is not None:
        hf["rope_scaling"] = _llama3_scaling(expand(*factors).reshape(-1), hf, path)
    return hf, TensorFiles(path, shapes, dict.fromkeys(shapes, "F32"), read)


def holds_tokenizer(path: pathlib.Path) -> bool:
    """Returns whether a GGUF file says how to split text into its tokens."""
    return "tokenizer.ggml.tokens" in _read(path)[1].metadata


def _read(path: pathlib.Path) -> tuple[types.ModuleType, GgufHeader]:
    """Returns the package `gguf`, which expands tensors, and the file's header."""
    try:
        import gguf
    except ImportError:
        raise ValueError(
            f"reading {path} needs the package gguf: pip install 'jmat[gguf]'."
        ) from None
    try:
        return gguf, read_header(
            path, {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
        )
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{path} is truncated or not a GGUF file ({error}); download it again."
        ) from None


def _config(
    path: pathlib.Path, metadata: JsonObject, shapes: dict[str, tuple[int, ...]]
) -> JsonObject:
    family = metadata.get("general.architecture")
    if family not in _ARCHITECTURES:
        raise ValueError(
            f"{path} holds a {shortened(family)} model; of GGUF files jmat reads "
            f"{', '.join(_ARCHITECTURES)}."
        )
    own = {
        name.removeprefix(f"{family}."): value
        for name, value in metadata.items()
        if name.startswith(f"{family}.")
    }
    # Numbers are stored in float32: 1e-5 is read as 9.999999747378752e-06.
    own = {
        name: _as_stored(value) if isinstance(value, float) else value
        for name, value in own.items()
    }
    scaling = {_SCALING[name]: value for name, value in own.items() if name in _SCALING}
    # What has no name in config.json keeps its own: the config's reader refuses it.
    hf = {
        _FIELDS.get(name, name): value
        for name, value in own.items()
        if name not in _NEUTRAL and name not in _SCALING
    }
    hf |= {"model_type": family, "tie_word_embeddings": "lm_head.weight" not in shapes}
    hf["vocab_size"] = (*shapes.get("model.embed_tokens.weight", ()), 0)[0]
    hf.setdefault("num_key_value_heads", hf.get("num_attention_heads"))
    if "head_dim" not in hf and "rope.dimension_count" in own:
        hf["head_dim"] = own["rope.dimension_count"]
    for name in ("rope.dimension_count", "attention.value_length"):
        if own.get(name, hf.get("head_dim")) != hf.get("head_dim"):
            raise ValueError(
                f"{path}: {family}.{name}={shortened(own[name])} differs from the width of a head; "
                "not implemented."
            )
    if scaling.get("rope_type", "none") != "none":
        hf["rope_scaling"] = scaling
    if family != "qwen2":
        hf["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in shapes
    return hf


def _as_stored(value: float) -> float:
    """Returns the shortest number that float32 stores like this one; one that float32
    cannot hold stays.
    """
    return float(str(np.float32(value))) if is_number(value) else value


def _hf_name(name: str) -> str:
    """Returns Hugging Face's name of a tensor, `model.layers.3.self_attn.q_proj.weight`
    of `blk.3.attn_q.weight`; names that are not known stay.
    """
    stem, _, kind = name.rpartition(".")
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if block and block[2] in _BLOCK_TENSORS:
        return f"model.layers.{block[1]}.{_BLOCK_TENSORS[block[2]]}.{kind}"
    return f"{_TENSORS[stem]}.{kind}" if stem in _TENSORS else name


def _as_in_hugging_face(values: np.ndarray, name: str, hf: JsonObject) -> np.ndarray:
    """Undoes the changes of llama.cpp's converter: in LLaMA files the two halves of
    each rotary head are interleaved, and Gemma's norms hold 1 + scale.
    """
    if hf["model_type"] == "gemma" and "norm" in name:
        return values - 1
    heads = {"attn_q": hf["num_attention_heads"], "attn_k": hf["num_key_value_heads"]}
    part = name.split(".")[-2]
    if hf["model_type"] != "llama" or part not in heads:
        return values
    pairs = values.reshape(heads[part], -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _llama3_scaling(factors: np.ndarray, hf: JsonObject, path: pathlib.Path) -> JsonObject:
    """Recovers the parameters of Llama 3.1's rotary scaling from factors, by which each
    pair of coordinates is slowed.

    The values tried are those that all of Meta's models use; a file is refused where
    they do not explain its factors.
    """
    theta = hf.get("rope_theta", 10000.0)
    factor = float(factors.max(initial=0))
    scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    plain = Rotary(
        width=2 * len(factors), theta=float(theta) if is_number(theta) and theta >= 1 else 1.0
    )
    scaled = Rotary(
        plain.width,
        plain.theta,
        "llama3",
        factor,
        trained_positions=8192,
        slow_turns=1.0,
        fast_turns=4.0,
    )
    with np.errstate(all="ignore"):
        explained = np.allclose(frequencies(plain) / factors, frequencies(scaled), rtol=1e-4)
    if not explained:
        raise ValueError(
            f"{path}: {_FREQUENCY_FACTORS} is not Llama 3.1's scaling; other scalings are not "
            "implemented."
        )
    return {"rope_type": "llama3", **scaling, "original_max_position_embeddings": 8192}
