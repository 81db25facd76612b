"""Computes, site by site, what transformers does on PyTorch: the independent reference
for jmat.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int

from jmat.checkpoint.gguf_files import find_gguf
from jmat.runtime.annotations import Fields, JsonObject, TorchModel, TorchTensor
from jmat.runtime.errors import first_line


@runtime_checkable
class Handle(Protocol):
    """Describes what PyTorch returns for a hook."""

    def remove(self) -> None:
        """Takes the hook off its module."""
        ...


# --- where a site lives in transformers -----------------------------------------------------------


class Hook(NamedTuple):
    """Names one side of a PyTorch module: its first input, or its (first) output, or a
    part of that.
    """

    module: str  # path in the base model, i.e. below `transformer.`, `bert.`, …
    side: str  # "in" or "out"
    # by the value [B, T, W] and the number of heads
    part: Callable[[np.ndarray, int], np.ndarray] | None = None


def _third(index: int) -> Callable[[np.ndarray, int], np.ndarray]:
    """Returns q, k or v of those that lie side by side."""
    return lambda value, _: np.split(value, 3, axis=-1)[index]


def _third_of_heads(index: int) -> Callable[[np.ndarray, int], np.ndarray]:
    """Returns q, k or v of those that lie head by head: q of head 0, k of head 0, …"""

    def part(value: np.ndarray, heads: int) -> np.ndarray:
        by_head = value.reshape(*value.shape[:2], heads, 3, -1)
        return by_head[..., index, :].reshape(*value.shape[:2], -1)

    return part


def _fused(module: str, third: Callable[[int], Callable]) -> dict[str, Hook]:
    """Returns the hooks of queries, keys and values, which one projection computes."""
    return {f"attn.{name}": Hook(module, "out", third(index)) for index, name in enumerate("qkv")}


def _apart(query: str, key: str, value: str) -> dict[str, Hook]:
    """Returns the hooks of queries, keys and values, each with a projection of its own."""
    return {"attn.q": Hook(query, "out"), "attn.k": Hook(key, "out"), "attn.v": Hook(value, "out")}


def _around(site: str, first: str, last: str | None = None) -> dict[str, Hook]:
    """Returns input and output of a sub-module that is one PyTorch module, or several
    in a row.
    """
    return {f"{site}.in": Hook(first, "in"), site: Hook(last or first, "out")}


def _blocks(layers: int, block: str, parts: Mapping[str, Hook]) -> dict[str, Hook]:
    """Returns the sites of all blocks, and `embed`, which is what block 0 gets."""
    sites = {"embed": Hook(f"{block}.0", "in")}
    for i in range(layers):
        for site, hook in parts.items():
            sites[f"block.{i}.{site}"] = hook._replace(module=f"{block}.{i}.{hook.module}")
        sites[f"block.{i}"] = Hook(f"{block}.{i}", "out")
    return sites


def _gpt2(hf: Fields) -> dict[str, Hook]:
    parts = {
        **_around("ln_1", "ln_1"),
        **_around("attn", "attn"),
        **_fused("attn.c_attn", _third),
        "attn.z": Hook("attn.c_proj", "in"),
        "mid": Hook("ln_2", "in"),
        **_around("ln_2", "ln_2"),
        **_around("ffn", "mlp"),
        "ffn.hidden": Hook("mlp.c_proj", "in"),
    }
    return {**_blocks(hf["n_layer"], "h", parts), **_around("final_norm", "ln_f")}


def _bert(hf: Fields) -> dict[str, Hook]:
    parts = {
        **_around("attn", "attention.self", "attention.output.dense"),
        **_apart(*(f"attention.self.{part}" for part in ("query", "key", "value"))),
        "attn.z": Hook("attention.output.dense", "in"),
        "mid": Hook("attention.output.LayerNorm", "in"),
        **_around("ln_1", "attention.output.LayerNorm"),
        **_around("ffn", "intermediate.dense", "output.dense"),
        "ffn.hidden": Hook("output.dense", "in"),
        **_around("ln_2", "output.LayerNorm"),
    }
    layers = hf["num_hidden_layers"]
    last = Hook(f"encoder.layer.{layers - 1}", "out")  # there is no final norm
    return {**_blocks(layers, "encoder.layer", parts), "final_norm.in": last, "final_norm": last}


def _opt(hf: Fields) -> dict[str, Hook]:
    pre_norm = hf["do_layer_norm_before"]
    parts = {
        **_around("ln_1", "self_attn_layer_norm"),
        **_around("attn", "self_attn"),
        **_apart(*(f"self_attn.{part}_proj" for part in "qkv")),
        "attn.z": Hook("self_attn.out_proj", "in"),
        "mid": Hook("final_layer_norm" if pre_norm else "self_attn_layer_norm", "in"),
        **_around("ln_2", "final_layer_norm"),
        **_around("ffn", "fc1", "fc2"),
        "ffn.hidden": Hook("fc2", "in"),
    }
    sites = _blocks(hf["num_hidden_layers"], "decoder.layers", parts)
    if pre_norm and not hf["_remove_final_layer_norm"]:
        return {**sites, **_around("final_norm", "decoder.final_layer_norm")}
    last = sites[f"block.{hf['num_hidden_layers'] - 1}"]  # there is no final norm
    return {**sites, "final_norm.in": last, "final_norm": last}


def _llama(hf: Fields) -> dict[str, Hook]:
    parts = {
        **_around("ln_1", "input_layernorm"),
        **_around("attn", "self_attn"),
        **_apart(*(f"self_attn.{part}_proj" for part in "qkv")),
        "attn.z": Hook("self_attn.o_proj", "in"),
        "mid": Hook("post_attention_layernorm", "in"),
        **_around("ln_2", "post_attention_layernorm"),
        **_around("ffn", "mlp"),
        "ffn.hidden": Hook("mlp.down_proj", "in"),
    }
    return {**_blocks(hf["num_hidden_layers"], "layers", parts), **_around("final_norm", "norm")}


def _gpt_neox(hf: Fields) -> dict[str, Hook]:
    # In a parallel block no module reads or writes `mid`.
    mid = {} if hf["use_parallel_residual"] else {"mid": Hook("post_attention_layernorm", "in")}
    parts = {
        **_around("ln_1", "input_layernorm"),
        **_around("attn", "attention"),
        **_fused("attention.query_key_value", _third_of_heads),
        "attn.z": Hook("attention.dense", "in"),
        **mid,
        **_around("ln_2", "post_attention_layernorm"),
        **_around("ffn", "mlp"),
        "ffn.hidden": Hook("mlp.dense_4h_to_h", "in"),
    }
    return {
        **_blocks(hf["num_hidden_layers"], "layers", parts),
        **_around("final_norm", "final_layer_norm"),
    }


def _bloom(hf: Fields) -> dict[str, Hook]:
    parts = {
        **_around("ln_1", "input_layernorm"),
        # the module itself adds the residual
        **_around("attn", "self_attention", "self_attention.dense"),
        **_fused("self_attention.query_key_value", _third_of_heads),
        "attn.z": Hook("self_attention.dense", "in"),
        "mid": Hook("post_attention_layernorm", "in"),
        **_around("ln_2", "post_attention_layernorm"),
        **_around("ffn", "mlp", "mlp.dense_4h_to_h"),
        "ffn.hidden": Hook("mlp.dense_4h_to_h", "in"),
    }
    return {**_blocks(hf["n_layer"], "h", parts), **_around("final_norm", "ln_f")}


def _gpt_neo(hf: Fields) -> dict[str, Hook]:
    parts = {
        **_around("ln_1", "ln_1"),
        **_around("attn", "attn"),
        **_apart(*(f"attn.attention.{part}_proj" for part in "qkv")),
        "attn.z": Hook("attn.attention.out_proj", "in"),
        "mid": Hook("ln_2", "in"),
        **_around("ln_2", "ln_2"),
        **_around("ffn", "mlp"),
        "ffn.hidden": Hook("mlp.c_proj", "in"),
    }
    return {**_blocks(hf["num_layers"], "h", parts), **_around("final_norm", "ln_f")}


def _distilbert(hf: Fields) -> dict[str, Hook]:
    parts = {
        **_around("attn", "attention"),
        **_apart(*(f"attention.{part}_lin" for part in "qkv")),
        "attn.z": Hook("attention.out_lin", "in"),
        "mid": Hook("sa_layer_norm", "in"),
        **_around("ln_1", "sa_layer_norm"),
        **_around("ffn", "ffn"),
        "ffn.hidden": Hook("ffn.lin2", "in"),
        **_around("ln_2", "output_layer_norm"),
    }
    last = Hook(f"transformer.layer.{hf['n_layers'] - 1}", "out")  # there is no final norm
    return {
        **_blocks(hf["n_layers"], "transformer.layer", parts),
        "final_norm.in": last,
        "final_norm": last,
    }


@dataclasses.dataclass(frozen=True)
class Reference:
    """Describes the way transformers runs an architecture: the class that loads it with
    its head, and where each site is.
    """

    auto: str
    sites: Callable[[Fields], dict[str, Hook]]  # config.json → site → hook
    takes_positions: bool = True  # else it derives positions from the mask
    after_padding_id: bool = False  # its position 0 is called pad_token_id + 1


# By Hugging Face's `model_type`.
REFERENCES: dict[str, Reference] = {
    "bert": Reference("AutoModelForMaskedLM", _bert),
    "bloom": Reference("AutoModelForCausalLM", _bloom, takes_positions=False),
    "camembert": Reference("AutoModelForMaskedLM", _bert, after_padding_id=True),
    "distilbert": Reference("AutoModelForMaskedLM", _distilbert),
    "gemma": Reference("AutoModelForCausalLM", _llama),
    "gpt2": Reference("AutoModelForCausalLM", _gpt2),
    "gpt_neo": Reference("AutoModelForCausalLM", _gpt_neo),
    "gpt_neox": Reference("AutoModelForCausalLM", _gpt_neox),
    "llama": Reference("AutoModelForCausalLM", _llama),
    "mistral": Reference("AutoModelForCausalLM", _llama),
    "opt": Reference("AutoModelForCausalLM", _opt),
    "qwen2": Reference("AutoModelForCausalLM", _llama),
    "qwen3": Reference("AutoModelForCausalLM", _llama),
    "roberta": Reference("AutoModelForMaskedLM", _bert, after_padding_id=True),
    "xlm-roberta": Reference("AutoModelForMaskedLM", _bert, after_padding_id=True),
}


# --- running it -----------------------------------------------------------------------------------


def load_reference(
    folder: pathlib.Path, family: str, *, dtype: str = "float32", has_head: bool = True
) -> TorchModel:
    """Loads the model of a folder by transformers, with eager attention.

    Raises ValueError if torch is not installed, or if transformers does not load the
    folder.
    """
    try:
        import torch
    except ImportError:
        raise ValueError(
            "the reference is transformers on PyTorch, and torch is not installed: pip install "
            "'jmat[test]'."
        ) from None
    import transformers

    auto = getattr(transformers, REFERENCES[family].auto if has_head else "AutoModel")
    options: JsonObject = {
        "attn_implementation": "eager",
        "local_files_only": True,
        "trust_remote_code": False,
    }
    gguf = find_gguf(folder)
    where = folder if gguf is None else gguf.parent
    options |= {} if gguf is None else {"gguf_file": gguf.name}
    try:
        return auto.from_pretrained(where, dtype=getattr(torch, dtype), **options).eval()
    except Exception as error:
        raise ValueError(f"transformers does not load {folder}: {first_line(error)}") from None


def run_reference(
    torch_model: TorchModel,
    tokens: Int[np.ndarray, "B T"],
    mask: Bool[np.ndarray, "B T"] | None,
    positions: Int[np.ndarray, "B T"],
    type_ids: Int[np.ndarray, "B T"] | None = None,
    *,
    patterns: bool = False,
) -> dict[str, np.ndarray]:
    """Runs a transformers model on PyTorch: every site that `REFERENCES` names, in the
    order of computation.

    Values are [B, T, W], heads side by side. `logits` are last; a model without head
    has none. With `patterns`, attention patterns follow, [B, T, H · T].
    """
    import torch

    hf = torch_model.config.to_dict()
    reference = REFERENCES[hf["model_type"]]
    values: dict[str, np.ndarray] = {}

    heads = torch_model.config.num_attention_heads

    def keep(site: str, hook: Hook, value: TorchTensor | tuple[TorchTensor, ...]) -> None:
        value = value if isinstance(value, torch.Tensor) else value[0]
        array = value.reshape(*tokens.shape, -1).double().numpy()
        values[site] = array if hook.part is None else hook.part(array, heads)

    def attach(site: str, hook: Hook) -> Handle:
        module = torch_model.base_model.get_submodule(hook.module)
        if hook.side == "out":
            return module.register_forward_hook(lambda _, __, output: keep(site, hook, output))
        return module.register_forward_pre_hook(
            lambda _, args, kwargs: keep(site, hook, args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )

    handles = [attach(site, hook) for site, hook in reference.sites(hf).items()]
    given = {"input_ids": tokens, "attention_mask": mask, "token_type_ids": type_ids}
    first = hf["pad_token_id"] + 1 if reference.after_padding_id else 0
    given |= {"position_ids": positions + first} if reference.takes_positions else {}
    tensors = {
        name: torch.tensor(np.array(value, order="C"), dtype=torch.long)
        for name, value in given.items()
        if value is not None
    }
    try:
        with torch.no_grad():
            out = torch_model(**tensors, use_cache=False, output_attentions=patterns)
    finally:
        for handle in handles:
            handle.remove()
    if "logits" in out:
        values["logits"] = out["logits"].double().numpy()
    for i, pattern in enumerate(out["attentions"] if patterns else ()):
        values[f"block.{i}.attn.pattern"] = np.moveaxis(pattern.double().numpy(), 1, 2).reshape(
            *tokens.shape, -1
        )
    return values
