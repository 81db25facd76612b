"""Hugging Face folder or hub id → model, and back.

Every key of a checkpoint is consumed or ignored on purpose, every shape is checked, and
all problems are reported together. Tensors are read one at a time, so that loading
peaks at little more than the weights themselves.
"""

import contextlib
import dataclasses
import json
import logging
import math
import pathlib
import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jmat.checkpoint.gguf_files import find_gguf, open_gguf
from jmat.checkpoint.tensor_files import FLOATS, TensorFiles, open_weights
from jmat.models import FAMILIES, build, config_from_hf, read_config
from jmat.models.config import ModelConfig
from jmat.models.family import OTHER_HEADS, Family, Transformer
from jmat.runtime.annotations import Leaf
from jmat.runtime.errors import printable, readable_errors
from jmat.runtime.files import save_together, write_tensors
from jmat.runtime.mesh import parameter_sharding, replicate


@readable_errors()
def load_model(
    folder: pathlib.Path,
    *,
    dtype: str = "float32",
    ignore_config: tuple[str, ...] = (),
    mesh: Mesh | None = None,
    shard_parameters: bool = False,
) -> Transformer:
    """Reads the model of a Hugging Face folder, or of a GGUF file, with parameters in
    `dtype`.

    Every parameter goes to the devices of the mesh as soon as it is read: a copy to
    each, or sharded, so that no device ever holds all of them.

    Args:
      folder: of the model.
      dtype: of its parameters.
      ignore_config: names of config.json fields that jmat does not know and that do not
        change the numbers.
      mesh: the devices; by default the first one alone.
      shard_parameters: split every parameter over the devices of the mesh.

    Raises:
      FileNotFoundError: no config.json, no weights.
      ValueError: a config field that is not implemented; missing, surplus or misshapen
        tensors (all of them, by name); a corrupt file; weights that are not finite.
    """
    _refuse_adapters(folder)
    gguf = find_gguf(folder)
    opened: contextlib.AbstractContextManager[TensorFiles]
    if gguf is None:
        config, opened = read_config(folder, ignore_config), open_weights(folder)
    else:
        hf, files = open_gguf(gguf)
        config, opened = (
            config_from_hf(hf, ignore_config, foreign=False),
            contextlib.nullcontext(files),
        )
    family = FAMILIES[config.family]
    with opened as files:
        if config.layers > len(files.shapes):  # before anything of that size is made
            what = f"{config.layers} blocks, but {len(files.shapes)} tensors in all"
            raise ValueError(f"{folder} does not fit its config.json: {what}.")
        names = _our_names(files, family)
        config = _settle_head(config, family, names, files)
        chosen = _match(config, family, _with_tied_table(config, family, names), files)
        model = jax.eval_shape(lambda: build(config, nnx.Rngs(0)))
        arrays: dict[str, jax.Array] = {}
        # The largest first, while there is room for a second copy of it.
        for key in sorted(
            family.keys(config), key=lambda key: -math.prod(files.shapes[chosen[key.file]])
        ):
            tensor = files.read(chosen[key.file])
            _check_finite(tensor, chosen[key.file], folder, dtype)
            for path, part in zip(key.params, key.layout.load(tensor), strict=True):
                arrays[path] = _put(part, dtype, mesh, shard_parameters)
            del tensor, part
    return with_parameters(model, arrays)


_ADAPTERS = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
    "adapters.safetensors",
)


def _refuse_adapters(folder: pathlib.Path) -> None:
    """Raises ValueError where a folder holds an adapter, which would change what the
    model beside it computes.
    """
    if name := next((name for name in _ADAPTERS if (folder / name).is_file()), None):
        raise ValueError(
            f"{folder} holds an adapter, such as of LoRA ({name}), which jmat does not apply: "
            "merge it into its model first (peft: "
            "AutoPeftModelForCausalLM.from_pretrained(folder).merge_and_unload()"
            ".save_pretrained(other)), "
            "or move the adapter's files elsewhere to load the model without it."
        )


def _put(part: np.ndarray, dtype: str, mesh: Mesh | None, shard_parameters: bool) -> jax.Array:
    if mesh is not None and shard_parameters:
        return jax.device_put(part.astype(jnp.dtype(dtype)), parameter_sharding(mesh, part.shape))
    array = jnp.asarray(part, dtype=dtype)
    return array if mesh is None else replicate(mesh, array)


def save_model(folder: pathlib.Path, model: Transformer, *, dtype: str = "float32") -> None:
    """Writes model.safetensors and config.json as transformers does; whole or not at
    all.

    config.json, without which nobody reads the folder as a model, comes last.
    """
    config, family = model.config, FAMILIES[model.config.family]
    params = parameters(model)
    tensors = {}
    for key in family.keys(config):
        tensor = key.layout.save(tuple(np.asarray(params[path]) for path in key.params))
        tensors[_full_name(key.file, family)] = np.ascontiguousarray(tensor).astype(dtype)
    hf = {**config.to_hf(), "dtype": dtype}
    folder.mkdir(parents=True, exist_ok=True)
    save_together(
        {
            folder / "model.safetensors": lambda path: write_tensors(
                path, tensors, {"format": "pt"}
            ),
            folder / "config.json": lambda path: path.write_text(
                json.dumps(hf, indent=2) + "\n", "utf-8"
            ),
        }
    )


def parameters(model: Transformer) -> dict[str, Leaf[jax.Array]]:
    """Returns the model's parameters by dotted path, e.g. `blocks.3.attn.q.kernel`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(model)
    return {_dotted(path): leaf for path, leaf in leaves}


def with_parameters(model: Transformer, arrays: Mapping[str, jax.Array]) -> Transformer:
    """Returns the model with other parameters, given by dotted path."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(model)
    return jax.tree.unflatten(treedef, [arrays[_dotted(path)] for path, _ in leaves])


def _dotted(path: tuple[object, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")


def _full_name(name: str, family: Family) -> str:
    """Returns the name under which a model saved with its head stores one of its base
    model's tensors.
    """
    return name if name.startswith(family.head_prefixes) else family.prefixes[0] + name


def _our_names(files: TensorFiles, family: Family) -> dict[str, str]:
    """Returns name in the key table → name in the file: without the prefix, with new
    names for old ones.
    """
    names: dict[str, str] = {}
    for stored in files.shapes:
        prefix = next((prefix for prefix in family.prefixes if stored.startswith(prefix)), "")
        name = stored.removeprefix(prefix)
        for old, new in family.renamed:
            name = re.sub(f"^{old}", new, name)
        name = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))
        names.setdefault(name, stored)
    return names


def _settle_head(
    config: ModelConfig, family: Family, names: Mapping[str, str], files: TensorFiles
) -> ModelConfig:
    """Returns the config without a head where none of the head's own tensors is stored,
    and untied where a stored head is not the embedding.

    Both are what transformers does, whatever the config says.
    """
    head = [key for key in family.keys(config) if key.file.startswith(family.head_prefixes)]
    if head and not any(name in names for key in head for name in (key.file, *key.aliases)):
        return dataclasses.replace(config, has_head=False)
    tied = [names[name] for name in family.tied if name in names]
    if config.tied_head and len(tied) == 2 and not files.equal(*tied):
        hf = {**config.to_hf(), "tie_word_embeddings": False}
        return dataclasses.replace(config, tied_head=False, hf=json.dumps(hf))
    return config


def _with_tied_table(
    config: ModelConfig, family: Family, names: Mapping[str, str]
) -> Mapping[str, str]:
    """Returns the names with the head's tensor as embedding, where they are tied and
    only the head's is stored.
    """
    head, table = family.tied
    return (
        {**names, table: names[head]}
        if config.tied_head and head in names and table not in names
        else names
    )


def _match(
    config: ModelConfig, family: Family, names: Mapping[str, str], files: TensorFiles
) -> dict[str, str]:
    """Returns, for each key, the name of its tensor in the file.

    Raises ValueError with every missing, surplus and misshapen tensor. Nothing of the
    size that the config asks for is made before: all blocks have the shapes of the
    first, which is only traced.
    """
    problems, chosen, used = [], {}, set()
    shapes = _parameter_shapes(config)
    for key in family.keys(config):
        present = [name for name in (key.file, *key.aliases) if name in names]
        used.update(present)
        if not present:
            problems.append(f"missing {_full_name(key.file, family)}")
            continue
        chosen[key.file] = names[present[0]]
        expected = key.layout.shape(tuple(shapes[_of_first_block(path)] for path in key.params))
        shape, stored_as = files.shapes[chosen[key.file]], files.dtypes[chosen[key.file]]
        if shape != expected:
            problems.append(f"{chosen[key.file]} has shape {shape}, expected {expected}")
        if stored_as not in FLOATS:
            problems.append(f"{chosen[key.file]} is {stored_as}, expected {', '.join(FLOATS)}")
    ignored = re.compile("|".join(f"(?:{pattern})" for pattern in (*family.ignored, OTHER_HEADS)))
    # a copy of the embedding, stored once more
    used.update(family.tied if config.tied_head else ())
    taken = set(names.values())
    problems += [
        f"{stored} is the same tensor as another, under an older name"
        for stored in files.shapes
        if stored not in taken
    ]
    problems += [
        f"surplus {stored}"
        for name, stored in names.items()
        if name not in used and not ignored.fullmatch(name)
    ]
    if problems:
        raise ValueError(f"{files.folder} does not fit its config.json: {_listed(problems)}.")
    if other := [
        stored
        for name, stored in names.items()
        if name not in used and re.fullmatch(OTHER_HEADS, name)
    ]:
        logging.getLogger(__name__).warning(
            "%s holds heads for other tasks, which are passed over: %s.",
            files.folder,
            printable(_listed(other, most=4), lines=False),
        )
    return chosen


def _parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the parameters of the model with its first block only, by
    dotted path.
    """
    first = dataclasses.replace(config, layers=1, windows=config.windows[:1])
    model = jax.eval_shape(lambda: build(first, nnx.Rngs(0)))
    return {path: value.shape for path, value in parameters(model).items()}


def _of_first_block(path: str) -> str:
    return re.sub(r"^blocks\.\d+\.", "blocks.0.", path)


def _check_finite(tensor: np.ndarray, name: str, folder: pathlib.Path, dtype: str) -> None:
    """Raises ValueError for NaN and infinity, and for values that overflow in `dtype`."""
    with np.errstate(invalid="ignore"):
        extremes = float(tensor.min()), float(tensor.max())
    if not np.isfinite(extremes).all():
        raise ValueError(f"{name} in {folder} holds NaN or infinity; the checkpoint is damaged.")
    largest = float(jnp.finfo(dtype).max)
    if max(-extremes[0], extremes[1]) > largest:
        raise ValueError(
            f"{name} in {folder} holds values beyond {largest:g}, the most that {dtype} can; use "
            "float32."
        )


def _listed(problems: list[str], most: int = 20) -> str:
    more = f"; and {len(problems) - most} more" if len(problems) > most else ""
    return "; ".join(problems[:most]) + more
