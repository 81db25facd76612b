"""Saves maps for others to use, and loads theirs: `jmat.save_maps`, `jmat.load_maps`
and `jmat.push_maps`.
"""

import os
import pathlib
import tempfile
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jmat.checkpoint import parameters
from jmat.maps.compact import Map, is_quantised
from jmat.maps.files import MapsInfo
from jmat.maps.files import save_maps as write_maps
from jmat.maps.forms import TYPE_NAMES, TYPES, fits, form_of, tensors_of
from jmat.maps.hub import fetch_maps, is_hub_name, upload_folder
from jmat.maps.lens_files import (
    JACOBIAN_LENS,
    TUNED_LENS,
    write_jacobian_lens,
    write_tuned_lens,
)
from jmat.maps.loading import read_any
from jmat.models.family import Transformer, check_model
from jmat.runtime.checks import check_choice, check_flag, check_path, check_whole, whole
from jmat.runtime.digests import model_hash
from jmat.runtime.versions import package_version

JMAT = "jmat"
FORMATS = (JMAT, TUNED_LENS, JACOBIAN_LENS)


class Maps(dict[str, Map]):
    """Holds maps by name, such as `mat.3.8` from layer 3 to layer 8.

    Attributes:
      info: which model and text they come from.
    """

    def __init__(self, maps: Mapping[str, Map], info: MapsInfo):
        super().__init__(maps)
        self.info = info


def save_maps(
    folder: str | pathlib.Path,
    maps: Mapping[str, Map],
    *,
    model: Transformer | None = None,
    info: MapsInfo | None = None,
    n: int = 0,
    corpus: str = "",
    format: str = JMAT,
) -> None:
    """Writes maps into a folder (`maps.safetensors`, `maps.json`), whole or not at all;
    or as a lens of another library.

    Args:
      folder: is made where it is missing.
      maps: by name: `mat.{i}.{j}` from layer i to layer j, `{part}.{block}` for a
        sub-module.
      model: the model that they were fitted on, whose weights loading compares.
      info: all that the files say of the maps, instead of `model`, `n` and `corpus`.
        A Jacobian lens says only its number of prompts, `info.prompts`.
      n: number of tokens that they were fitted on; 0: not known. Lenses do not say it.
      corpus: name of the text.
      format: `jmat`, which loses nothing; `tuned-lens` (`config.json`, `params.pt`), an
        affine map from every layer to the last; `jacobian-lens` (`lens.pt`), maps to
        the last layer without bias, in float16. The last two need `model`.

    Raises:
      ValueError: neither `model` nor `info` is given; there are no maps, or something
        else; a map that the format cannot hold; for a tuned lens, a folder with a
        `config.json` of something else, of a model say.
      OSError: the files cannot be written.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> import numpy as np
      >>> identity = jmat.Linear(np.eye(192, dtype=np.float32))
      >>> jmat.save_maps("my_maps", {"mat.3.8": identity}, model=model)
    """
    check_path("folder", folder)
    check_choice("format", format, FORMATS)
    if not isinstance(maps, Mapping):
        raise ValueError(f"maps is {type(maps).__name__}; expected a dict from names to maps.")
    if unnamed := [name for name in maps if not isinstance(name, str) or not name.strip()]:
        raise ValueError(f"the name of a map is {unnamed[0]!r}; expected text such as 'mat.3.8'.")
    if wrong := [name for name, stand_in in maps.items() if not isinstance(stand_in, TYPES)]:
        raise ValueError(
            f"map {wrong[0]!r} is of type {type(maps[wrong[0]]).__name__}; expected {TYPE_NAMES}."
        )
    if not maps:
        raise ValueError("there are no maps to save.")
    for name, stand_in in maps.items():
        _check(name, stand_in)
    parts = [part for name, stand_in in maps.items() for part in tensors_of(name, stand_in)]
    if len(set(parts)) < len(parts):
        twice = next(part for part in parts if parts.count(part) > 1)
        raise ValueError(f"two maps have a part {twice!r}: give one of them another name.")
    if info is not None and not isinstance(info, MapsInfo):
        raise ValueError(
            f"info is of type {type(info).__name__}; expected a jmat.maps.files.MapsInfo."
        )
    if model is not None:
        check_model(model)
    elif info is None or format != JMAT:
        raise ValueError("save_maps needs the model that the maps were fitted on: give model=.")
    n = whole("n", n)
    check_whole("n", n, 0)
    folder = pathlib.Path(folder)
    if format != JMAT:
        assert model is not None
        if format == TUNED_LENS:
            write_tuned_lens(folder, maps, model)
        else:
            write_jacobian_lens(folder, maps, model, 0 if info is None else info.prompts)
        return
    if info is None:
        assert model is not None
        dtype = model.embed.tokens.table.dtype.name
        about = {"protocol": "", "seed": 0, "dtype": dtype, "jmat": package_version("jmat")}
        info = MapsInfo(
            model=model.name, model_hash=model_hash(parameters(model)), corpus=corpus, n=n, **about
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_maps(folder, maps, info)


def _check(name: str, stand_in: Map) -> None:
    """Raises ValueError for a map that could not be read back."""
    for leaf in jax.tree.leaves(stand_in, is_leaf=is_quantised):
        if is_quantised(leaf):
            continue
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            got = f"a {type(leaf).__name__}" if dtype is None else f"an array of {dtype}"
            raise ValueError(
                f"map {name!r} holds {got}; expected arrays of floating-point numbers."
            )
        if not np.isfinite(np.asarray(leaf)).all():
            raise ValueError(f"map {name!r} holds NaN or infinity: fit it again.")
    form = form_of(stand_in)
    if not all(np.ndim(value) for value in jax.tree.leaves(stand_in)) or not fits(stand_in, form):
        shapes = ", ".join(
            f"{key} {np.shape(value)}" for key, value in vars(stand_in).items() if value is not None
        )
        raise ValueError(
            f"the parts of map {name!r} do not fit one another: {shapes}, for {form.apply!r}."
        )


def load_maps(
    source: str | pathlib.Path,
    *,
    model: Transformer | None = None,
    revision: str | None = None,
) -> Maps:
    """Reads maps: ours, or lenses and maps of other libraries, from this machine or the
    hub. Nothing in the files is ever executed.

    A file is recognised by what it holds:

    - `maps.safetensors` and `maps.json`, as `save_maps` and the experiments write them;
    - a Jacobian lens (`.pt`), whose maps become `jacobian.{i}.{L}`;
    - a tuned lens (`config.json` and `params.pt`): `tuned.{i}.{L}`;
    - pickles named `{i}_{j}.pickle` of Din et al. 2023: `mat.{i}.{j}`, or
      `affine.{i}.{j}` where they hold a matrix and an intercept;
    - pickles named `xlayer_{i}_weights.pkl` of NBL: `attn.{i}`, and `ln_1.{i}`, the
      identity in place of the norm before it.

    Args:
      source: a folder or a file, or the name of one on the hub, such as `owner/name`,
        `owner/name/folder` or `spaces/owner/name/folder`.
      model: the model to use them with; maps of another model are refused. A Jacobian
        lens needs it, since its file does not say how deep the model is.
      revision: branch, tag or commit on the hub.

    Raises:
      FileNotFoundError: there are no such maps, here or on the hub.
      ValueError: a damaged file, maps of another model, two files of one map, or a
        pickle with anything but maps in it.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> import numpy as np
      >>> identity = jmat.Linear(np.eye(192, dtype=np.float32))
      >>> jmat.save_maps("my_maps", {"mat.3.8": identity}, model=model)
      >>> maps = jmat.load_maps("my_maps", model=model)
      >>> maps["mat.3.8"].W.shape, maps.info.model
      ((192, 192), 'gpt2-docs')
    """
    check_path("source", source)
    if model is not None:
        check_model(model)
    path = pathlib.Path(source)
    if isinstance(source, str) and is_hub_name(source) and not os.path.exists(path):
        path = fetch_maps(source, revision)
    elif revision is not None:
        raise ValueError(
            f"{source} is on this machine, not on the hub: it has no revision {revision!r}."
        )
    return Maps(*read_any(path, model))


def push_maps(
    repo: str,
    maps: Mapping[str, Map],
    *,
    model: Transformer | None = None,
    info: MapsInfo | None = None,
    n: int = 0,
    corpus: str = "",
    format: str = JMAT,
    private: bool = False,
    revision: str | None = None,
) -> str:
    """Uploads maps to the Hugging Face hub, from where `load_maps(repo)` reads them;
    returns the address of the commit.

    Args:
      repo: `owner/name` of the repository, which is made where there is none.
      maps: as for `save_maps`.
      model: likewise.
      info: likewise.
      n: likewise.
      corpus: likewise.
      format: likewise.
      private: make a new repository that only its owner sees.
      revision: branch that gets the commit; by default the main one.

    Raises:
      ValueError: as `save_maps`, before anything is sent. For a tuned lens, the
        repository's `config.json` must not be of something else.
      ConnectionError: the hub cannot be reached, or refuses.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> import numpy as np
      >>> identity = jmat.Linear(np.eye(192, dtype=np.float32))
      >>> maps = {"mat.3.8": identity}
      >>> jmat.push_maps("owner/name", maps, model=model)  # doctest: +SKIP
    """
    if not isinstance(repo, str) or repo.count("/") != 1 or not is_hub_name(repo):
        raise ValueError(f"repo={repo!r}: expected the name of a repository, owner/name.")
    check_flag("private", private)
    with tempfile.TemporaryDirectory() as folder:
        save_maps(folder, maps, model=model, info=info, n=n, corpus=corpus, format=format)
        return upload_folder(pathlib.Path(folder), repo, private=private, revision=revision)
