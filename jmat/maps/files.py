"""Maps that stand in for a part of a model, or for many blocks: callable pytrees, and the files people share them in.

Every map takes `x [..., D]` with any leading axes. A map is a registered dataclass, so new values of the same shape
reach a jitted function as arguments: they do not retrace it.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import safetensors

from jmat.maps.types import Linear
from jmat.runtime.annotations import Fields
from jmat.runtime.digests import model_hash
from jmat.runtime.errors import in_one_line, readable_errors
from jmat.runtime.files import save_together, write_tensors
from jmat.runtime.json_files import read_json_object

CONVENTION = "y = x @ W (+ b)"
MAPS_FILES = ("maps.safetensors", "maps.json")
_PICKLES = (".pickle", ".pkl", ".pt", ".pth", ".bin")


@dataclasses.dataclass(frozen=True)
class MapsInfo:
    """Says which model and text a folder of maps comes from.

    Attributes:
        model: the model's name or folder.
        model_hash: fingerprint of its weights (`model_hash`).
        protocol: how positions were sampled.
        corpus: name or file of the text.
        n: examples that the maps were fitted on.
        seed: seed of the draw.
        dtype: dtype of the model's parameters and activations.
        convention: how a map is applied.
        fit_text, eval_text: fingerprints of the examples fitted and evaluated on
            (`jmat.data.examples.fingerprint`); empty in files of version 0.1.
        jmat: version of jmat; empty in files of version 0.1.
    """

    model: str
    model_hash: str
    protocol: str
    corpus: str
    n: int
    seed: int
    dtype: str
    convention: str = CONVENTION
    fit_text: str = ""
    eval_text: str = ""
    jmat: str = ""


def save_maps(
    folder: str | pathlib.Path,
    maps: Mapping[str, Linear],
    info: MapsInfo,
    statistics: Mapping[str, Fields] | None = None,
) -> None:
    """Writes `maps.safetensors` and `maps.json` into an existing folder, whole or not at all.

    The JSON holds a checksum of the tensors, `model_hash` of them, so that loading notices damage.

    Args:
        folder: where to.
        maps: by name: `mat.{i}.{j}` from layer i to layer j, `{part}.{block}` for a sub-module. A bias is stored as
            `NAME.bias`.
        info: goes into both files, so that loading notices where they do not belong together.
        statistics: of the fits, by name (`{"mat.0.12": {"rank": 768, "condition": 1.2e4}}`), for the JSON.

    Raises:
        OSError: the files cannot be written; what was there before is untouched.
    """
    tensors = {}
    for name, linear in maps.items():
        tensors[name] = np.ascontiguousarray(linear.W)
        if linear.bias is not None:
            tensors[f"{name}.bias"] = np.ascontiguousarray(linear.bias)
    described = {
        name: {"shape": list(linear.W.shape), "bias": linear.bias is not None, **(statistics or {}).get(name, {})}
        for name, linear in maps.items()
    }
    about = dataclasses.asdict(info)
    content = {**about, "checksum": model_hash(tensors), "maps": described}
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    folder = pathlib.Path(folder)
    save_together(
        {
            folder / "maps.safetensors": lambda path: write_tensors(path, tensors, {"info": json.dumps(about)}),
            folder / "maps.json": lambda path: path.write_text(text, "utf-8"),
        }
    )


@readable_errors()
def read_maps(
    folder: str | pathlib.Path, *, model_hash: str | None = None, width: int | None = None
) -> tuple[dict[str, Linear], MapsInfo]:
    """Reads what `save_maps` wrote. Nothing in the files is ever executed.

    Args:
        folder: holds `maps.safetensors` and `maps.json`.
        model_hash: fingerprint of the model they are meant for.
        width: that model's D: the width of every map's input and output.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a pickle, a damaged file, maps of another model, or a shape that does not fit.
    """
    folder = pathlib.Path(folder)
    _refuse_pickles(folder)
    info, checksum, described = _read_json(folder / "maps.json")
    maps = _read_tensors(folder / "maps.safetensors", info, checksum, described)
    if info.convention != CONVENTION:
        raise ValueError(f"the maps in {folder} are for {info.convention!r}; expected {CONVENTION!r}: transpose them.")
    if model_hash is not None and info.model_hash != model_hash:
        raise ValueError(
            f"the maps in {folder} were fitted on {info.model} with weights {info.model_hash}; this model's weights "
            f"are {model_hash}. Fit maps for it, or load the model they belong to."
        )
    for name, linear in maps.items():
        if not all(np.isfinite(values).all() for values in jax.tree.leaves(linear)):
            raise ValueError(f"map {name!r} in {folder} holds NaN or infinity: fit the maps again.")
        if linear.W.ndim != 2 or (linear.bias is not None and linear.bias.shape != linear.W.shape[1:]):
            bias = None if linear.bias is None else linear.bias.shape
            raise ValueError(
                f"map {name!r} in {folder} has W {linear.W.shape} and bias {bias}; expected [D, E] and [E]."
            )
        if width is not None and linear.W.shape != (width, width):
            raise ValueError(
                f"map {name!r} in {folder} is {linear.W.shape}; this model needs {(width, width)}: these maps belong "
                "to a model of another width."
            )
    return maps, info


def _refuse_pickles(folder: pathlib.Path) -> None:
    pickles = [folder] if folder.suffix in _PICKLES else []
    if not pickles and folder.is_dir() and not (folder / "maps.safetensors").exists():
        pickles = sorted(path for path in folder.iterdir() if path.suffix in _PICKLES)
    if pickles:
        raise ValueError(
            f"{pickles[0]} is a pickle, and loading one can run any code it holds: convert it to safetensors where you "
            "trust it, or fit the maps again."
        )


def _read_json(path: pathlib.Path) -> tuple[MapsInfo, str | None, dict[str, tuple[tuple[int, ...], bool]]]:
    """Returns where maps come from, the checksum of their tensors, and of each its shape and whether it has a bias.

    Files written before there were checksums have none.
    """
    try:
        content = read_json_object(path)
        checksum = content.pop("checksum", None)
        described = {name: (tuple(about["shape"]), bool(about["bias"])) for name, about in content.pop("maps").items()}
        return MapsInfo(**content), checksum, described
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{path} not found: expected a folder in which maps were saved.") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is damaged or does not describe maps ({error}): fit the maps again.") from None


def _written_with(text: str) -> MapsInfo | None:
    """Reads the copy of the info that stands in the tensors' file; None if it is none."""
    try:
        return MapsInfo(**json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return None


def _read_tensors(
    path: pathlib.Path, info: MapsInfo, checksum: str | None, described: Mapping[str, tuple[tuple[int, ...], bool]]
) -> dict[str, Linear]:
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            written = (file.metadata() or {}).get("info")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} not found: expected it beside maps.json.") from None
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is truncated or damaged ({in_one_line(error)}): fit the maps again, or copy it anew."
        ) from None
    expected = described.keys() | {f"{name}.bias" for name, (_, bias) in described.items() if bias}
    if (
        tensors.keys() != expected
        or (written is not None and _written_with(written) != info)
        or any(tensors[name].shape != shape for name, (shape, _) in described.items())
    ):
        raise ValueError(f"{path} and the maps.json beside it were not written together: fit the maps again.")
    if checksum is not None and model_hash(tensors) != checksum:
        raise ValueError(f"{path} is damaged (its checksum is not the one in maps.json): copy it anew, or fit again.")
    if wrong := [name for name, values in tensors.items() if not jnp.issubdtype(values.dtype, jnp.floating)]:
        raise ValueError(f"{wrong[0]!r} in {path} is {tensors[wrong[0]].dtype}; expected floating-point numbers.")
    arrays = {name: jnp.asarray(values) for name, values in tensors.items()}
    return {name: Linear(arrays[name], arrays.get(f"{name}.bias")) for name in described}
