"""Lenses as other libraries keep them: the Jacobian lens (`.pt`) and the tuned lens (a
folder).

A Jacobian lens reads the output of block l, which is our stream l + 1, as `h @ J.T`. A
tuned lens reads the input of block l, our stream l, as `h + h @ weight.T + bias`.
"""

import hashlib
import json
import os
import pathlib
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from numpy import ndarray

from jmat.checkpoint.pickles import Value
from jmat.checkpoint.stored_tensors import is_size
from jmat.checkpoint.torch_files import read_torch, tensor_values
from jmat.checkpoint.torch_writing import Plain, write_torch
from jmat.maps.compact import Map
from jmat.maps.files import MapsInfo
from jmat.maps.maps_to_last import maps_to_last
from jmat.maps.types import Linear
from jmat.models.family import Transformer
from jmat.models.layers import word_kernel
from jmat.runtime.files import save_atomically, save_together
from jmat.runtime.json_files import read_json_object

JACOBIAN_LENS, TUNED_LENS = "jacobian-lens", "tuned-lens"
LENS_FILE = "lens.pt"  # of a folder with a Jacobian lens
CONFIG, PARAMS = "config.json", "params.pt"  # of a folder with a tuned lens
_LARGEST = float(np.finfo(np.float16).max)


def square(value: Value, path: pathlib.Path, what: str, width: int | None) -> Float[ndarray, "D D"]:
    """Returns a matrix of a file, float32. Raises ValueError unless it is square,
    finite, and as wide as the model.
    """
    matrix = tensor_values(value, path)
    if matrix is None or matrix.ndim != 2 or len(matrix) != matrix.shape[1] or not matrix.size:
        got = type(value).__name__ if matrix is None else f"a tensor {list(matrix.shape)}"
        raise ValueError(f"{what} in {path} is {got}; expected a square matrix.")
    _check_finite(matrix, path, what)
    if width is not None and len(matrix) != width:
        raise ValueError(
            f"{what} in {path} is {len(matrix)} wide; this model needs {width}: the maps belong to "
            "a model of another width."
        )
    return matrix


def vector(value: Value, path: pathlib.Path, what: str, width: int) -> Float[ndarray, " D"]:
    """Returns a bias of a file, float32, [D] or [D, 1] there. Raises ValueError unless
    it is finite and as long as its matrix is wide.
    """
    bias = tensor_values(value, path)
    if bias is None or bias.shape not in ((width,), (width, 1)):
        got = type(value).__name__ if bias is None else f"a tensor {list(bias.shape)}"
        raise ValueError(f"{what} in {path} is {got}; expected {width} numbers.")
    _check_finite(bias, path, what)
    return bias.reshape(-1)


def _check_finite(values: ndarray, path: pathlib.Path, what: str) -> None:
    if not np.isfinite(values).all():
        raise ValueError(f"{what} in {path} holds NaN or infinity: fit it again.")


# --- the Jacobian lens ----------------------------------------------------------------------------


def read_jacobian_lens(
    path: pathlib.Path, content: Mapping[Value, Value], model: Transformer | None
) -> tuple[dict[str, Map], MapsInfo]:
    """Returns the maps `jacobian.{i}.{j}` of a Jacobian lens.

    Args:
      path: of the file, for errors.
      content: of the file.
      model: what the lens belongs to. The file does not say how deep its model is.

    Raises:
      ValueError: no model is given; the lens has another width, or layers that the
        model does not have; a damaged file.
    """
    if model is None:
        raise ValueError(
            f"{path} is a Jacobian lens, and does not say how many blocks its model has: give the "
            "model to load_maps, model=."
        )
    L, matrices = model.config.layers, content["J"]
    if not isinstance(matrices, dict) or not matrices:
        raise ValueError(f"{path} has no table of layers under 'J', as a Jacobian lens has.")
    target = _target(path, content, L)
    maps: dict[int, Map] = {}
    for layer in sorted(matrices, key=str):
        if not str(layer).isdecimal() or len(str(layer)) > 6 or not int(layer) + 1 < target:
            raise ValueError(
                f"{path} has a map from the output of block {str(layer)[:40]!r} to that of block "
                f"{target - 1}; this model has the blocks 0 .. {L - 1}: the lens is another "
                "model's."
            )
        what, source = f"J[{layer}]", int(layer) + 1
        if source in maps:
            raise ValueError(f"{path} has two maps from the output of block {int(layer)}.")
        maps[source] = Linear(
            jnp.asarray(square(matrices[layer], path, what, model.config.width).T)
        )
    prompts = content.get("n_prompts", 0)
    ordered = {f"jacobian.{source}.{target}": maps[source] for source in sorted(maps)}
    return ordered, MapsInfo(model.name, prompts=prompts if is_size(prompts) else 0)


def _target(path: pathlib.Path, content: Mapping[Value, Value], L: int) -> int:
    """Returns the stream that a lens leads to: the last, unless the file names the
    output of another block.
    """
    about = content.get("metadata")
    block = content.get(
        "target_layer", about.get("target_layer") if isinstance(about, dict) else None
    )
    if block is None:
        return L
    if not isinstance(block, int) or not 0 < block < L:
        raise ValueError(
            f"{path} leads to a layer that this model of {L} blocks does not have: the lens is "
            "another model's."
        )
    return block + 1


def write_jacobian_lens(
    folder: pathlib.Path, maps: Mapping[str, Map], model: Transformer, prompts: int
) -> None:
    """Writes `lens.pt`, with matrices in float16, whole or not at all.

    Args:
      folder: is made where it is missing.
      maps: by name, `KIND.i.L`.
      model: the model that they belong to.
      prompts: number of prompts that they were fitted on; 0: not known.

    Raises:
      ValueError: a map that the file has no place for: from the embedding, to another
        layer than the last, with a bias, not affine.
      OSError: the file cannot be written.
    """
    matrices: dict[str | int, Plain] = {}
    for layer, (name, W, bias) in sorted(maps_to_last(maps, model, JACOBIAN_LENS).items()):
        if layer == 0:
            raise ValueError(
                f"map {name!r} leads from the embedding, and a Jacobian lens reads outputs of "
                "blocks only: leave it out."
            )
        if bias is not None and np.any(bias):
            raise ValueError(
                f"map {name!r} has a bias, and a Jacobian lens has none: fit it without one, or "
                f"write format={TUNED_LENS!r}."
            )
        if np.abs(W).max() > _LARGEST:
            raise ValueError(
                f"map {name!r} has weights above {_LARGEST:g}, and a Jacobian lens is float16."
            )
        matrices[layer - 1] = W.T.astype(np.float16)
    layers: list[Plain] = [*matrices]
    content: Plain = {
        "J": matrices,
        "n_prompts": prompts,
        "source_layers": layers,
        "d_model": model.config.width,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_atomically(folder / LENS_FILE, lambda path: write_torch(path, content))


# --- the tuned lens -------------------------------------------------------------------------------


def unembedding_hash(model: Transformer) -> str | None:
    """Returns the hash by which a tuned lens recognises its model: SHA-256 of the
    unembedding [V, D] as NumPy prints it with one digit. None for a model without head.
    """
    if model.head is None:
        return None
    kernel = word_kernel(model.embed.tokens.table[...], model.head.out, None)
    weights = np.asarray(kernel.T.astype(jnp.float32))
    # The text must not depend on how a user prints arrays.
    with np.printoptions(
        threshold=1000,
        edgeitems=3,
        linewidth=75,
        suppress=False,
        sign="-",
        floatmode="maxprec",
        formatter=None,
        legacy=False,
    ):
        text = np.array_str(weights, precision=1)
    return hashlib.sha256(text.encode()).hexdigest()


def read_tuned_lens(
    folder: pathlib.Path, model: Transformer | None
) -> tuple[dict[str, Map], MapsInfo]:
    """Returns the maps `tuned.{l}.{L}` of a tuned lens, `W = I + weight.T`.

    Raises:
      FileNotFoundError: there is no config.json.
      ValueError: a damaged file, or the lens of another model: its width, its depth or
        the hash of its unembedding is another.
    """
    path = folder / PARAMS
    D, L, has_bias, name, stored_hash = _config(folder / CONFIG)
    if model is not None:
        config = model.config
        if (config.width, config.layers) != (D, L):
            raise ValueError(
                f"the tuned lens in {folder} is for {name}, of {L} blocks and width {D}; this "
                f"model has {config.layers} and {config.width}."
            )
        ours = unembedding_hash(model)
        if stored_hash is not None and ours is not None and stored_hash != ours:
            raise ValueError(
                f"the tuned lens in {folder} is for {name}, with another unembedding than this "
                "model's: load the model that it belongs to, or leave out model= to read it "
                "unchecked."
            )
    content = read_torch(path)
    fields = ("weight", "bias") if has_bias else ("weight",)
    expected = {f"{layer}.{field}" for layer in range(L) for field in fields}
    if not isinstance(content, dict) or content.keys() != expected:
        raise ValueError(f"{path} does not hold the {' and '.join(fields)} of {L} layers.")
    maps: dict[str, Map] = {}
    for l in range(L):
        weight = square(content[f"{l}.weight"], path, f"{l}.weight", D)
        bias = vector(content[f"{l}.bias"], path, f"{l}.bias", D) if has_bias else None
        W = np.eye(D, dtype=np.float32) + weight.T
        maps[f"tuned.{l}.{L}"] = Linear(jnp.asarray(W), None if bias is None else jnp.asarray(bias))
    return maps, MapsInfo(name)


def _config(path: pathlib.Path) -> tuple[int, int, bool, str, str | None]:
    """Returns width, depth, whether there is a bias, the model's name and the hash of
    its unembedding.
    """
    try:
        about = read_json_object(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} not found: expected it beside {PARAMS}.") from None
    except ValueError as error:
        raise ValueError(f"{path} {error}.") from None
    D, L = (about.get(name, 0) for name in ("d_model", "num_hidden_layers"))
    sizes_fit = all(is_size(n) and 0 < n < 10**6 for n in (D, L))
    has_bias, stored_hash = about.get("bias", True), about.get("unembed_hash")
    if (
        not sizes_fit
        or not isinstance(has_bias, bool)
        or not isinstance(stored_hash, str | None)
        or about.get("lens_type", "linear_tuned_lens") != "linear_tuned_lens"
    ):
        raise ValueError(f"{path} is not the config of a linear tuned lens.")
    return D, L, has_bias, str(about.get("base_model_name_or_path", ""))[:200], stored_hash


def check_replaceable(path: pathlib.Path, name: str, place: str) -> None:
    """Raises ValueError for a file that is not the config of a lens, a model's say,
    which a lens must not replace.

    Args:
      path: of the file.
      name: of the file, for the error.
      place: that a lens should have of its own, for the error: `folder`, say.
    """
    try:
        _config(path)
        # Some configs of models have a width and depth by the same names, but no base model.
        is_lens = "base_model_name_or_path" in read_json_object(path)
    except (ValueError, OSError):
        is_lens = False
    if not is_lens:
        raise ValueError(
            f"{name} is not the config of a tuned lens, and writing one would replace it: give "
            f"the lens a {place} of its own."
        )


def write_tuned_lens(folder: pathlib.Path, maps: Mapping[str, Map], model: Transformer) -> None:
    """Writes `params.pt` and `config.json`, whole or not at all.

    Raises:
      ValueError: a layer below the last has no map; a map leads to another layer than
        the last, or is not affine; the folder has a config.json of something else.
      OSError: the files cannot be written.
    """
    if os.path.lexists(folder / CONFIG):
        check_replaceable(folder / CONFIG, str(folder / CONFIG), "folder")
    D, L = model.config.width, model.config.layers
    by_layer = maps_to_last(maps, model, TUNED_LENS)
    if missing := [str(l) for l in range(L) if l not in by_layer]:
        raise ValueError(
            f"a tuned lens has a map from every layer below the last; there is none from layer "
            f"{', '.join(missing[:10])}."
        )
    params: dict[str | int, Plain] = {}
    for l, (_, W, bias) in sorted(by_layer.items()):
        params[f"{l}.weight"] = (W - np.eye(D, dtype=np.float32)).T
        params[f"{l}.bias"] = np.zeros(D, np.float32) if bias is None else bias
    about = {
        "base_model_name_or_path": model.name,
        "d_model": D,
        "num_hidden_layers": L,
        "bias": True,
        "base_model_revision": None,
        "unembed_hash": unembedding_hash(model),
        "lens_type": "linear_tuned_lens",
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_together(
        {
            folder / PARAMS: lambda path: write_torch(path, params),
            folder / CONFIG: lambda path: path.write_text(json.dumps(about), "utf-8"),
        }
    )
