"""Maps that stand in for a part of a model, or for many blocks: callable pytrees, and
the files people share them in.

Every map takes `x [..., D]` with any leading axes. A map is a registered dataclass, so
new values of the same shape reach a jitted function as arguments: they do not retrace
it.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from numpy import ndarray

from jmat.maps.compact import Map
from jmat.maps.forms import Form, build, described, fits, form_of, read_form, tensors_of
from jmat.runtime.annotations import Fields, JsonObject
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
      model_hash: fingerprint of its weights (`model_hash`); empty where another library
        wrote the file.
      protocol: how positions were sampled.
      corpus: name or file of the text.
      n: examples that the maps were fitted on.
      seed: seed of the draw.
      dtype: dtype of the model's parameters and activations.
      convention: how a map is applied.
      fit_text, eval_text: fingerprints of the examples fitted and evaluated on
        (`jmat.data.examples.fingerprint`); empty in files of version 0.1.
      jmat: version of jmat; empty in files of version 0.1.
      prompts: prompts that a lens of gradients was fitted on; 0: not known. maps.json
        has it only where it is known.
    """

    model: str
    model_hash: str = ""
    protocol: str = ""
    corpus: str = ""
    n: int = 0
    seed: int = 0
    dtype: str = "float32"
    convention: str = CONVENTION
    fit_text: str = ""
    eval_text: str = ""
    jmat: str = ""
    prompts: int = 0

    def fields(self) -> JsonObject:
        """Returns what maps.json says of all maps together. Earlier versions do not know
        `prompts`, which is left out where it is not known.
        """
        about = dataclasses.asdict(self)
        if not self.prompts:
            del about["prompts"]
        return about


def save_maps(
    folder: str | pathlib.Path,
    maps: Mapping[str, Map],
    info: MapsInfo,
    statistics: Mapping[str, Fields] | None = None,
) -> None:
    """Writes `maps.safetensors` and `maps.json` into an existing folder, whole or not
    at all.

    The JSON holds a checksum of the tensors, `model_hash` of them, so that loading
    notices damage.

    Args:
      folder: where to.
      maps: by name: `mat.{i}.{j}` from layer i to layer j, `{part}.{block}` for a
        sub-module.
      info: goes into both files, so that loading notices where they do not belong
        together.
      statistics: of the fits, by name
        (`{"mat.0.12": {"rank": 768, "condition": 1.2e4}}`), for the JSON.

    Raises:
      ValueError: a map of a type that has no form in maps.json (`jmat.maps.forms`).
      OSError: the files cannot be written; what was there before is untouched.
    """
    tensors = {
        at: part
        for name, stand_in in maps.items()
        for at, part in tensors_of(name, stand_in).items()
    }
    about_maps = {
        name: {**described(name, each), **(statistics or {}).get(name, {})}
        for name, each in maps.items()
    }
    about = info.fields()
    content = {**about, "checksum": model_hash(tensors), "maps": about_maps}
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    folder = pathlib.Path(folder)
    save_together(
        {
            folder / "maps.safetensors": lambda path: write_tensors(
                path, tensors, {"info": json.dumps(about)}
            ),
            folder / "maps.json": lambda path: path.write_text(text, "utf-8"),
        }
    )


@readable_errors()
def read_maps(
    folder: str | pathlib.Path, *, model_hash: str | None = None, width: int | None = None
) -> tuple[dict[str, Map], MapsInfo]:
    """Reads what `save_maps` wrote. Nothing in the files is ever executed.

    Args:
      folder: holds `maps.safetensors` and `maps.json`.
      model_hash: fingerprint of the model they are meant for; not compared where the
        file has none.
      width: that model's D: the width of every map's input and output.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a pickle, a damaged file, maps of another model, or a shape that does
        not fit.
    """
    folder = pathlib.Path(folder)
    _refuse_pickles(folder)
    info, checksum, forms = _read_json(folder / "maps.json")
    maps = _read_tensors(folder / "maps.safetensors", info, checksum, forms)
    if info.convention != CONVENTION:
        raise ValueError(
            f"the maps in {folder} are for {info.convention!r}; expected {CONVENTION!r}: transpose "
            "them."
        )
    if model_hash is not None and info.model_hash not in ("", model_hash):
        raise ValueError(
            f"the maps in {folder} were fitted on {info.model} with weights {info.model_hash}; "
            f"this model's weights are {model_hash}. Fit maps for it, or load the model they "
            "belong to."
        )
    for name, stand_in in maps.items():
        shape = forms[name].shape
        if not all(np.isfinite(values).all() for values in jax.tree.leaves(stand_in)):
            raise ValueError(f"map {name!r} in {folder} holds NaN or infinity: fit the maps again.")
        if not fits(stand_in, forms[name]):
            parts = ", ".join(
                f"{field} {value.shape}"
                for field, value in vars(stand_in).items()
                if value is not None
            )
            raise ValueError(
                f"map {name!r} in {folder} has {parts}; expected what makes {forms[name].apply!r} "
                f"a map {list(shape)}."
            )
    if width is not None:
        check_width(maps, folder, width)
    return maps, info


def check_width(maps: Mapping[str, Map], folder: pathlib.Path, width: int) -> None:
    """Raises ValueError for maps that do not lead from a stream of a width to one."""
    for name, stand_in in maps.items():
        shape = form_of(stand_in).shape
        if shape != (width,) * len(shape):
            raise ValueError(
                f"map {name!r} in {folder} is {shape}; this model needs {(width, width)}: these "
                "maps belong to a model of another width."
            )


def _refuse_pickles(folder: pathlib.Path) -> None:
    pickles = [folder] if folder.suffix in _PICKLES else []
    if not pickles and folder.is_dir() and not (folder / "maps.safetensors").exists():
        pickles = sorted(path for path in folder.iterdir() if path.suffix in _PICKLES)
    if pickles:
        raise ValueError(
            f"{pickles[0]} is a pickle, and loading one can run any code it holds: convert it to "
            "safetensors where you trust it, or fit the maps again."
        )


def _read_json(path: pathlib.Path) -> tuple[MapsInfo, str | None, dict[str, Form]]:
    """Returns where maps come from, the checksum of their tensors, and the form of
    each.

    Files written before there were checksums have none.
    """
    try:
        content = read_json_object(path)
        checksum = content.pop("checksum", None)
        forms = {name: read_form(about) for name, about in content.pop("maps").items()}
        return MapsInfo(**content), checksum, forms
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"{path} not found: expected a folder in which maps were saved."
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path} is damaged or does not describe maps ({error}): fit the maps again."
        ) from None


def _written_with(text: str) -> MapsInfo | None:
    """Reads the copy of the info that stands in the tensors' file; None if it is none."""
    try:
        return MapsInfo(**json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return None


def _read_tensors(
    path: pathlib.Path, info: MapsInfo, checksum: str | None, forms: Mapping[str, Form]
) -> dict[str, Map]:
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            written = (file.metadata() or {}).get("info")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} not found: expected it beside maps.json.") from None
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is truncated or damaged ({in_one_line(error)}): fit the maps again, or copy "
            "it anew."
        ) from None
    expected = {
        at for name, form in forms.items() for names in form.names(name).values() for at in names
    }
    if (
        tensors.keys() != expected
        or (written is not None and _written_with(written) != info)
        or any(
            name in tensors and tensors[name].shape != form.shape for name, form in forms.items()
        )
    ):
        raise ValueError(
            f"{path} and the maps.json beside it were not written together: fit the maps again."
        )
    if checksum is not None and model_hash(tensors) != checksum:
        raise ValueError(
            f"{path} is damaged (its checksum is not the one in maps.json): copy it anew, or fit "
            "again."
        )
    for name, values in tensors.items():
        if name.endswith(".int8") != (values.dtype == np.int8) or (
            values.dtype != np.int8 and not _is_float(values)
        ):
            raise ValueError(
                f"{name!r} in {path} is {values.dtype}; expected floating-point numbers."
            )
    arrays = {name: jnp.asarray(values) for name, values in tensors.items()}
    return {name: build(name, form, arrays) for name, form in forms.items()}


def _is_float(values: ndarray) -> bool:
    return jnp.issubdtype(values.dtype, jnp.floating)
