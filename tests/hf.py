"""Tiny random Hugging Face models: the independent reference that jmat is held against."""

import json
import pathlib
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
import transformers

import jmat

transformers.utils.logging.disable_progress_bar()


class Case(NamedTuple):
    """A model to make: transformers' classes, and the config fields that matter."""

    name: str
    config: str
    model: str
    fields: Mapping[str, Any]
    type_ids: bool = False  # whether to feed token type ids
    hidden: tuple[str, ...] = ()  # endings of site names that no module of transformers shows


def gpt2(
    name: str,
    *,
    model: str = "GPT2LMHeadModel",
    type_ids: bool = False,
    hidden: tuple[str, ...] = (),
    **fields: Any,
) -> Case:
    """A GPT-2 of 2 blocks, D = 16, H = 4, V = 37, with other fields as given."""
    base = {
        "vocab_size": 37,
        "n_positions": 16,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 4,
        "bos_token_id": 0,
    }
    return Case(
        f"gpt2-{name}", "GPT2Config", model, {**base, "eos_token_id": 0, **fields}, type_ids, hidden
    )


def bert(
    name: str,
    *,
    model: str = "BertForMaskedLM",
    type_ids: bool = True,
    hidden: tuple[str, ...] = (),
    **fields: Any,
) -> Case:
    """A BERT of 2 blocks, D = 16, H = 4, F = 24, V = 37, with other fields as given."""
    base = {
        "vocab_size": 37,
        "max_position_embeddings": 16,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 24,
    }
    return Case(f"bert-{name}", "BertConfig", model, {**base, **fields}, type_ids, hidden)


CASES = [
    gpt2("plain"),
    gpt2("wide", n_embd=36, n_head=3, n_inner=20, vocab_size=61),
    gpt2("one-head-one-block", n_layer=1, n_head=1, n_positions=9),
    gpt2("deep", n_layer=5, n_embd=12, n_head=6, n_inner=7, layer_norm_epsilon=1e-3),
    gpt2("relu", activation_function="relu", n_inner=33),
    gpt2("gelu", activation_function="gelu", layer_norm_epsilon=0.3),
    gpt2("silu", activation_function="silu"),
    gpt2("quick-gelu", activation_function="quick_gelu"),
    gpt2("unscaled", scale_attn_weights=False),
    gpt2("scaled-by-layer", scale_attn_by_inverse_layer_idx=True, n_layer=4),
    gpt2("scaled-by-layer-only", scale_attn_by_inverse_layer_idx=True, scale_attn_weights=False),
    gpt2("reordered", reorder_and_upcast_attn=True, scale_attn_by_inverse_layer_idx=True),
    gpt2("untied", tie_word_embeddings=False),
    gpt2("type-ids", type_ids=True),
    bert("plain"),
    bert("wide", hidden_size=36, num_attention_heads=3, intermediate_size=20, vocab_size=61),
    bert(
        "one-head-one-block", num_hidden_layers=1, num_attention_heads=1, max_position_embeddings=9
    ),
    bert("deep", num_hidden_layers=5, hidden_size=12, num_attention_heads=6, layer_norm_eps=1e-3),
    bert("relu", hidden_act="relu", type_vocab_size=5),
    bert("gelu-new", hidden_act="gelu_new", layer_norm_eps=0.3),
    bert("tanh", hidden_act="tanh"),
    bert("decoder", is_decoder=True, model="BertLMHeadModel"),
    bert("untied", tie_word_embeddings=False),
    bert("one-type", type_vocab_size=1, type_ids=False),
    bert("headless", model="BertModel", hidden=("logits",)),
]


def make(case: Case, seed: int = 0) -> Any:
    """The model of a case, in eval mode with eager attention; every parameter random.

    transformers leaves norms at 1, biases at 0 and attention nearly uniform: bugs would
    not show.
    """
    config = getattr(transformers, case.config)(**case.fields, attn_implementation="eager")
    model = getattr(transformers, case.model)(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm_scale = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.3 * noise if is_norm_scale else 0.3 * noise)
    return model


def save(model: Any, folder: pathlib.Path) -> pathlib.Path:
    """Writes a model as transformers does; returns the folder."""
    model.save_pretrained(folder)
    return folder


def rewrite(
    folder: pathlib.Path,
    model: Any,
    change: Callable[[dict], dict] = lambda tensors: tensors,
    **config: Any,
) -> pathlib.Path:
    """Writes a model whose tensors went through `change`, and whose config.json has
    some other fields.
    """
    folder.mkdir(exist_ok=True)
    path = save(model, folder) / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in safetensors.torch.load_file(path).items()}
    path.unlink()
    changed = {
        name: t.clone(memory_format=torch.contiguous_format) for name, t in change(tensors).items()
    }
    safetensors.torch.save_file(changed, path, metadata={"format": "pt"})
    rewrite_config(folder, **config)
    return folder


def rewrite_config(folder: pathlib.Path, **fields: Any) -> None:
    """Changes some fields of a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def ours(case: Case, seed: int = 0, **options: Any) -> Any:
    """The same model as jmat loads it."""
    with tempfile.TemporaryDirectory() as folder:
        return jmat.load(save(make(case, seed), pathlib.Path(folder)), **options)[0]


class Batch(NamedTuple):
    """Token ids with padding on the right, on the left, on both sides, and none."""

    tokens: np.ndarray  # int32 [4, T]
    mask: np.ndarray  # bool [4, T]
    positions: np.ndarray  # int32 [4, T]: index of a token in its text; 0 for padding
    type_ids: np.ndarray | None  # int32 [4, T]


def batch(case: Case, length: int = 9, seed: int = 1) -> Batch:
    """A batch for the model of a case."""
    rng = np.random.default_rng(seed)
    shape = (4, length)
    tokens = rng.integers(0, case.fields["vocab_size"], shape, dtype=np.int32)
    columns = np.arange(length)
    mask = np.stack(
        [columns >= 0, columns < length - 3, columns >= 4, (columns >= 2) & (columns < 5)]
    )
    positions = np.where(mask, np.cumsum(mask, axis=1) - 1, 0).astype(np.int32)
    kinds = case.fields.get("type_vocab_size", 2)
    return Batch(
        tokens,
        mask,
        positions,
        rng.integers(0, kinds, shape, dtype=np.int32) if case.type_ids else None,
    )
