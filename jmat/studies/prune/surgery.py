"""The pruned model itself: an ordinary smaller checkpoint, or the whole one with maps;
written, and read back.
"""

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Collection, Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from jmat.checkpoint import parameters, save_model, with_parameters
from jmat.checkpoint.load import PRUNED, find, load
from jmat.checkpoint.tokenizer import TOKENIZER_FILES
from jmat.data.encoding import Tokenizer
from jmat.maps.files import MapsInfo, read_maps, save_maps
from jmat.maps.types import Linear
from jmat.models import build
from jmat.models.config import ModelConfig
from jmat.models.family import Transformer
from jmat.models.sites import Site
from jmat.models.stack import model_dtype
from jmat.runtime.annotations import Keywords
from jmat.runtime.digests import model_hash
from jmat.runtime.files import save_atomically
from jmat.runtime.json_files import read_json_object
from jmat.studies.prune.merge import fold
from jmat.studies.prune.stand_ins import Stretch, label, stand_ins, stretches

# What config.json calls the number of blocks, where that is not num_hidden_layers.
_LAYERS = {"gpt2": "n_layer", "bloom": "n_layer", "distilbert": "n_layers", "gpt_neo": "num_layers"}
_MAPS = ("maps.safetensors", "maps.json")
_COPIED = (*TOKENIZER_FILES, "generation_config.json")


def remove_blocks(model: Transformer, removed: Collection[int]) -> Transformer:
    """Returns the model without some blocks; the blocks that stay are numbered anew
    from 0.

    What depended on a block's number goes with it: attention windows and, for GPT-2's
    scaling by `1/(i + 1)`, the queries, which are multiplied by `(new + 1)/(old + 1)`.

    Raises:
      ValueError: a block that the model does not have, or none would be left.
    """
    config = model.config
    check_removable(config, removed)
    kept = [i for i in range(config.layers) if i not in removed]
    smaller = _smaller(config, kept)
    arrays = parameters(model)
    chosen: dict[str, jax.Array] = {}
    shell = jax.eval_shape(lambda: build(smaller, nnx.Rngs(0)))
    for path in parameters(shell):
        head, _, rest = path.partition(".")
        if head != "blocks":
            chosen[path] = arrays[path]
            continue
        new, _, part = rest.partition(".")
        value = arrays[f"blocks.{kept[int(new)]}.{part}"]
        if config.scale_attention_by_layer and part.startswith("attn.q."):
            factor = (int(new) + 1) / (kept[int(new)] + 1)
            value = (value.astype(jnp.float32) * factor).astype(value.dtype)
        chosen[path] = value
    return with_parameters(shell, chosen)


def check_removable(config: ModelConfig, removed: Collection[int]) -> None:
    """Raises ValueError for a block that the model does not have, and where none would
    be left.
    """
    foreign = [i for i in removed if not 0 <= i < config.layers]
    if foreign:
        raise ValueError(
            f"block {foreign[0]} cannot be removed: the model has blocks 0 .. {config.layers - 1}."
        )
    if len(set(removed)) >= config.layers:
        raise ValueError(
            f"{len(set(removed))} of {config.layers} blocks are to be removed: at least one must "
            "be left; remove fewer."
        )


def save_pruned(
    folder: str | pathlib.Path,
    model: Transformer,
    method: str,
    removed: Collection[int],
    maps: Mapping[Stretch, Linear],
    info: MapsInfo | None,
    *,
    source: pathlib.Path | None = None,
    tokenizer: Tokenizer | None = None,
) -> Transformer:
    """Writes a pruned model, with the tokenizer files of the folder `source` or, where
    that is none, the tokenizer.

    `delete` and `merge` give a Hugging Face folder of the smaller model, which
    transformers loads, too. `map` and `distil` give a Hugging Face folder of the whole
    model, with the maps beside it and `pruned.json`, which says which blocks they
    replace; `load_pruned` reads both kinds. config.json is written last: while it is
    missing, nobody reads a folder that is half-saved.

    Returns:
      The model whose weights were written.

    Raises:
      ValueError: as `remove_blocks` and `jmat.studies.prune.merge.fold`.
      OSError: a file cannot be written.
    """
    folder = pathlib.Path(folder)
    check_removable(model.config, removed)
    ordinary = method in ("delete", "merge")
    if ordinary:
        model = remove_blocks(fold(model, maps), removed)
    elif info is None:
        raise ValueError(
            f"the maps of {method} are saved with a note of what they were fitted on: give info."
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", PRUNED, *_MAPS):  # of an earlier model there
        (folder / name).unlink(missing_ok=True)
    if not ordinary and info is not None:
        about = {"method": method, "removed": sorted(removed), "blocks": label(removed)}
        save_atomically(
            folder / PRUNED,
            lambda path: path.write_text(json.dumps(about, indent=1) + "\n", "utf-8"),
        )
        save_maps(
            folder, {map_name("map", stretch): linear for stretch, linear in maps.items()}, info
        )
    if source is not None and source.is_dir():
        for path in (
            path for pattern in _COPIED for path in source.glob(pattern) if path.is_file()
        ):
            shutil.copyfile(path, folder / path.name)
    elif tokenizer is not None:
        tokenizer.save_pretrained(folder)
    save_model(folder, model, dtype=model_dtype(model).name)
    return model


def load_pruned(
    name_or_folder: str | pathlib.Path,
    *,
    dtype: str = "float32",
    revision: str | None = None,
    ignore_config: tuple[str, ...] = (),
) -> tuple[Transformer, Tokenizer | None, dict[str, Site]]:
    """Reads what `save_pruned` wrote, or any model that `jmat.load` reads.

        model, tokenizer, sites = load_pruned("runs/prune-gpt2/model")
        x, acts = jmat.run(model, tokens, sites=sites)

    Returns:
      The model, its tokenizer, and the `sites` with which it is to be run: none for an
      ordinary model.

    Raises:
      FileNotFoundError: no such model; its maps are missing.
      ValueError: as `jmat.load`; maps of another model, or that do not fit
        `pruned.json`.
    """
    folder = find(name_or_folder, revision=revision)
    settings: Keywords = {"dtype": dtype, "revision": revision, "ignore_config": ignore_config}
    model, tokenizer = load(name_or_folder, **settings, ignore_maps=True)
    about = folder / PRUNED
    if not about.is_file():
        return model, tokenizer, {}
    try:
        content = read_json_object(about)
        method, removed = content["method"], [int(block) for block in content["removed"]]
        if method not in ("map", "distil") or removed != sorted(set(content["removed"])):
            raise ValueError(
                "it does not say which blocks its maps replace, and how they were fitted"
            )
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise ValueError(f"{about} is damaged ({error}): prune the model again.") from None
    check_removable(model.config, removed)
    maps, info = read_maps(folder, width=model.config.width)
    # The hash is of the weights as they were saved: in another dtype they have another.
    if info.dtype == dtype and info.model_hash != model_hash(parameters(model)):
        raise ValueError(
            f"the maps in {folder} were fitted on other weights than those beside them: prune "
            "again."
        )
    by_stretch = {stretch: maps.get(map_name("map", stretch)) for stretch in stretches(removed)}
    if None in by_stretch.values() or len(maps) != len(by_stretch):
        raise ValueError(
            f"the maps in {folder} ({', '.join(maps)}) are not those of blocks {label(removed)}."
        )
    return model, tokenizer, stand_ins(model, method, removed, by_stretch)  # type: ignore[arg-type]


def map_name(method: str, stretch: Stretch) -> str:
    """Returns the name of a stretch's map in a file of maps: `mat.{start}.{stop}`,
    `distil.…`, `merge.…`.
    """
    return f"{'mat' if method == 'map' else method}.{stretch[0]}.{stretch[1]}"


def _smaller(config: ModelConfig, kept: list[int]) -> ModelConfig:
    """Returns the config with only the kept blocks, as jmat's fields and as
    config.json's.
    """
    hf = config.to_hf()
    hf[_LAYERS.get(config.family, "num_hidden_layers")] = len(kept)
    for name in ("layer_types", "attention_layers"):
        if hf.get(name) is not None:
            hf[name] = [hf[name][i] for i in kept]
    if config.family == "gpt_neo":
        pattern = hf.get("attention_types", [[["global", "local"], config.layers // 2]])
        kinds = [kind for group, times in pattern for _ in range(times) for kind in group]
        hf["attention_types"] = [[[kinds[i]], 1] for i in kept]
    # from which block on a window slides, where no layer_types say so
    if config.family in ("qwen2", "qwen3"):
        hf["max_window_layers"] = sum(i < hf.get("max_window_layers", 28) for i in kept)
    windows = tuple(config.windows[i] for i in kept) if config.windows else ()
    windows = windows if not windows or min(windows) < config.num_positions else ()
    return dataclasses.replace(config, layers=len(kept), windows=windows, hf=json.dumps(hf))
