"""`jmat.load`: a model and its tokenizer by bundled name, local folder or hub id."""

import difflib
import os
import pathlib

from jmat.checkpoint import load_model
from jmat.checkpoint.hub import snapshot
from jmat.checkpoint.tokenizer import TOKENIZER_FILES, check_tokenizer, load_tokenizer
from jmat.data.encoding import Tokenizer
from jmat.models.family import Transformer
from jmat.runtime.errors import readable_errors, shortened
from jmat.runtime.mesh import local_mesh
from jmat.runtime.names import known_name

_BUNDLED = pathlib.Path(__file__).parents[1] / "bundled"
PRUNED = "pruned.json"  # says which blocks of the model are replaced by the maps beside it
DTYPES = ("float32", "bfloat16", "float16")


@readable_errors()
def load(
    name_or_folder: str | pathlib.Path,
    *,
    dtype: str = "float32",
    revision: str | None = None,
    ignore_config: tuple[str, ...] = (),
    shard_parameters: bool = False,
    ignore_maps: bool = False,
) -> tuple[Transformer, Tokenizer | None]:
    """Loads a model and its tokenizer; the model is placed on the local devices, and
    never copied again.

    Args:
      name_or_folder: a bundled name (`gpt2-docs`, `bert-docs`; `jmat:gpt2-docs` where a
        folder has that name, too), a folder in Hugging Face format, a hub id (`gpt2`),
        or a GGUF file.
      dtype: of parameters and activations: float32, bfloat16 or float16. Norms, softmax
        and logits are float32 always.
      revision: branch, tag or commit of a hub id.
      ignore_config: names of config.json fields that jmat does not know and that do not
        change the numbers.
      ignore_maps: load the whole model of a folder that `prune --save` wrote with maps,
        without these.
      shard_parameters: split every parameter over the local devices as it is read
        (`jmat.runtime.mesh.parameter_sharding`).

    Returns:
      The model, and its tokenizer (None if the folder has none). No code that comes
      with a checkpoint is ever run.

    Raises:
      FileNotFoundError: no such model, here or on the hub.
      ValueError: a checkpoint that jmat does not implement, or that is damaged, all
        problems in one message; a tokenizer that does not load, or that is another
        model's.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> model.config.layers, model.config.width
      (8, 192)
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}.")
    folder = find(name_or_folder, revision=revision)
    if (folder / PRUNED).is_file() and not ignore_maps:
        raise ValueError(
            f"{folder} holds a pruned model: a whole one, and maps that stand in for some of its "
            "blocks. Read it with experiments.tasks or jmat.studies.prune.surgery.load_pruned."
        )
    model = load_model(
        folder,
        dtype=dtype,
        ignore_config=ignore_config,
        mesh=local_mesh(),
        shard_parameters=shard_parameters,
    )
    tokenizer = load_tokenizer(folder)
    check_tokenizer(tokenizer, model.config, str(name_or_folder))
    model.name = str(name_or_folder)
    return model, tokenizer


def bundled() -> list[str]:
    """Returns the names of the models that come with jmat."""
    return sorted(path.parent.name for path in _BUNDLED.glob("*/config.json"))


@readable_errors()
def find(name_or_folder: str | pathlib.Path, *, revision: str | None = None) -> pathlib.Path:
    """Returns the local folder of a model; downloads a hub id (config, weights,
    tokenizer) unless it is cached.

    Raises what `load` does, and ValueError for a revision of what is no hub id.
    """
    name = str(name_or_folder)
    ours = known_name(name_or_folder, bundled(), _holds_model, kind="model")
    try:
        folder = pathlib.Path(name_or_folder).expanduser()
    except RuntimeError:  # no such user, or one without a home
        raise FileNotFoundError(f"there is no folder {name}.") from None
    if revision is not None and (ours or os.path.exists(folder)):
        raise ValueError(
            f"{name} is on this machine, not on the hub: it has no revision {revision!r}."
        )
    if ours:
        return _BUNDLED / ours
    if os.path.islink(folder) and not os.path.exists(folder):
        raise FileNotFoundError(f"{name} is a symbolic link that leads nowhere.")
    # These, unlike their twins of pathlib, take a name that is too long for a file as one that is
    # not there.
    if os.path.isdir(folder):
        return folder
    if os.path.isfile(folder) and folder.suffix != ".gguf":
        raise ValueError(
            f"{name} is a file; expected the folder that holds config.json and the weights."
        )
    if os.path.isfile(folder):
        return folder
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise FileNotFoundError(f"there is no folder {name}.")
    return _download(name, revision)


def _holds_model(folder: pathlib.Path) -> bool:
    """Returns whether a folder, other than a bundled one, holds a model or a part of
    one.
    """
    if not folder.is_dir() or folder.resolve().parent == _BUNDLED.resolve():
        return False
    kinds = ("config.json", "*.gguf", "model*.safetensors", "pytorch_model*.bin", "adapter_*")
    return any(any(folder.glob(kind)) for kind in kinds)


def _download(name: str, revision: str | None) -> pathlib.Path:
    about = ["*.json", *TOKENIZER_FILES]
    safe, pickled = (
        ["model.safetensors", "model-*.safetensors"],
        ["pytorch_model.bin", "pytorch_model-*.bin"],
    )
    at = "" if revision is None else f" at revision {revision!r}"
    near = difflib.get_close_matches(name, bundled(), n=1, cutoff=0.8)
    hint = f" (did you mean {near[0]}?)" if near else ""
    elsewhere = (
        f"no model {shortened(name)}{at}{hint}: not bundled ({', '.join(bundled())}), not a local "
        "folder"
    )

    def fetch(weights: list[str]) -> pathlib.Path:
        return snapshot(elsewhere, name, revision=revision, allow_patterns=[*about, *weights])

    folder = fetch(safe)
    return folder if any(folder.glob("model*.safetensors")) else fetch(pickled)
