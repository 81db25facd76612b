"""`jmat.load`: a model and its tokenizer by bundled name, local folder or hub id."""

import pathlib
from typing import Any

import huggingface_hub
import huggingface_hub.errors
import jax

from jmat.checkpoint import load_model
from jmat.checkpoint.gguf_files import find_gguf, holds_tokenizer
from jmat.errors import first_line, in_one_line
from jmat.mesh import data_mesh

_BUNDLED = pathlib.Path(__file__).parents[1] / "bundled"
DTYPES = ("float32", "bfloat16", "float16")


def load(
    name_or_folder: str | pathlib.Path,
    *,
    dtype: str = "float32",
    revision: str | None = None,
    ignore_config: tuple[str, ...] = (),
    shard_parameters: bool = False,
) -> tuple[Any, Any]:
    """Loads a model and its tokenizer.

    Args:
      name_or_folder: a bundled name (`gpt2-docs`, `bert-docs`), a folder in Hugging Face format, a hub id (`gpt2`), or
        a GGUF file.
      dtype: of parameters and activations: float32, bfloat16 or float16. Norms, softmax and logits are float32 always.
      revision: branch, tag or commit of a hub id.
      ignore_config: names of config.json fields that jmat does not know and that do not change the numbers.
      shard_parameters: split every parameter over the local devices (`jmat.mesh.parameter_sharding`) as it is read.

    Returns:
      The model, and its tokenizer (None if the folder has none). No code that comes with a checkpoint is ever run.

    Raises:
      FileNotFoundError: no such model, here or on the hub.
      ValueError: a checkpoint that jmat does not implement, or that is damaged; all problems in one message.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}.")
    folder = find(name_or_folder, revision=revision)
    mesh = data_mesh(jax.local_devices()) if shard_parameters else None
    return load_model(folder, dtype=dtype, ignore_config=ignore_config, mesh=mesh), load_tokenizer(folder)


def bundled() -> list[str]:
    """Names of the models that come with jmat."""
    return sorted(path.parent.name for path in _BUNDLED.glob("*/config.json"))


def find(name_or_folder: str | pathlib.Path, *, revision: str | None = None) -> pathlib.Path:
    """The local folder of a model; downloads a hub id (config, weights, tokenizer) unless it is cached.

    Raises what `load` does, and ValueError for a revision of what is no hub id.
    """
    name = str(name_or_folder)
    is_bundled = (_BUNDLED / name).is_dir() and name in bundled()
    folder = pathlib.Path(name_or_folder).expanduser()
    if revision is not None and (is_bundled or folder.exists()):
        raise ValueError(f"{name} is on this machine, not on the hub: it has no revision {revision!r}.")
    if is_bundled:
        return _BUNDLED / name
    if folder.is_dir():
        return folder
    if folder.is_file() and folder.suffix != ".gguf":
        raise ValueError(f"{name} is a file; expected the folder that holds config.json and the weights.")
    if folder.is_file():
        return folder
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise FileNotFoundError(f"there is no folder {name}.")
    return _download(name, revision)


def load_tokenizer(folder: pathlib.Path) -> Any:
    """The folder's tokenizer, or None if it has no tokenizer files. That of a GGUF file lies beside it, or in it."""
    gguf = find_gguf(folder)
    folder = folder if gguf is None else gguf.parent
    inside = {}
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model")):
        if gguf is None or not holds_tokenizer(gguf):
            return None
        inside = {"gguf_file": gguf.name}
    import transformers  # here, because it takes seconds to import

    try:
        return transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **inside
        )
    except Exception as error:
        raise ValueError(f"the tokenizer in {folder} does not load: {in_one_line(error)}") from None


def _download(name: str, revision: str | None) -> pathlib.Path:
    errors = huggingface_hub.errors
    about = ["*.json", "vocab.txt", "merges.txt", "tokenizer.model"]
    safe, pickled = (["model.safetensors", "model-*.safetensors"], ["pytorch_model.bin", "pytorch_model-*.bin"])

    def fetch(weights: list[str]) -> pathlib.Path:
        return pathlib.Path(
            huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=[*about, *weights])
        )

    at = "" if revision is None else f" at revision {revision!r}"
    elsewhere = f"no model {name!r}{at}: not bundled ({', '.join(bundled())}), not a local folder"
    try:
        folder = fetch(safe)
        return folder if any(folder.glob("model*.safetensors")) else fetch(pickled)
    except errors.LocalEntryNotFoundError:
        raise FileNotFoundError(
            f"{elsewhere}, not in the hub's cache, and the hub cannot be reached (offline mode, or no network)."
        ) from None
    except (errors.HfHubHTTPError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        raise FileNotFoundError(f"{elsewhere}, and the hub says: {first_line(error)}") from None
