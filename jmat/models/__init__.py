"""The architectures, by Hugging Face's `model_type`."""

import pathlib
from collections.abc import Iterable

from flax import nnx

from jmat.models import bert, bloom, distilbert, gpt2, gpt_neo, gpt_neox, llama, opt, roberta
from jmat.models.config import ModelConfig
from jmat.models.config_reader import ConfigReader
from jmat.models.family import Family, Transformer
from jmat.runtime.annotations import Fields, JsonObject
from jmat.runtime.errors import readable_errors, shortened
from jmat.runtime.json_files import read_json_object

FAMILIES: dict[str, Family] = {
    "bert": bert.FAMILY,
    "bloom": bloom.FAMILY,
    "camembert": roberta.FAMILY,
    "distilbert": distilbert.FAMILY,
    "gemma": llama.FAMILY,
    "gpt2": gpt2.FAMILY,
    "gpt_neo": gpt_neo.FAMILY,
    "gpt_neox": gpt_neox.FAMILY,
    "llama": llama.FAMILY,
    "mistral": llama.FAMILY,
    "opt": opt.FAMILY,
    "qwen2": llama.FAMILY,
    "qwen3": llama.FAMILY,
    "roberta": roberta.FAMILY,
    "xlm-roberta": roberta.FAMILY,
}


@readable_errors()
def config_from_hf(
    hf: Fields, ignore: tuple[str, ...] = (), *, foreign: bool = True
) -> ModelConfig:
    """Returns the ModelConfig of a config.json.

    Args:
      hf: the fields.
      ignore: fields to pass over because they do not change the numbers.
      foreign: whether fields that transformers does not know are passed over, too, with
        a line that is logged.

    Raises:
      ValueError: an architecture or a field that is not implemented.
    """
    model_type = hf.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(
            f"model_type={shortened(model_type)} is not implemented; jmat implements "
            f"{', '.join(sorted(FAMILIES))}."
        )
    family = FAMILIES[model_type]
    try:
        return family.config(
            ConfigReader(hf, ignore=ignore, aliases=family.aliases, foreign=foreign)
        )
    except RecursionError:
        raise ValueError(
            f"cannot load this {model_type} config.json: its fields are nested too deeply."
        ) from None


def build(config: ModelConfig, rngs: nnx.Rngs) -> Transformer:
    """Returns a model with random weights."""
    return Transformer(config, FAMILIES[config.family], rngs=rngs)


def read_config(folder: pathlib.Path, ignore: tuple[str, ...] = ()) -> ModelConfig:
    """Returns the ModelConfig of a folder. Raises FileNotFoundError or ValueError
    without a usable config.json.
    """
    return config_from_hf(_fields(folder), ignore)


def fields_among(folder: pathlib.Path, names: Iterable[str]) -> tuple[str, ...]:
    """Returns those of the names that are fields of a folder's config.json; errors as
    for `read_config`.

    A field to ignore must be there; of two models that are compared, perhaps only one
    has it.
    """
    fields = _fields(folder)
    return tuple(name for name in names if name in fields)


def _fields(folder: pathlib.Path) -> JsonObject:
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} holds no config.json; expected a Hugging Face model folder. Where a run of "
            "jmat was killed while it saved the model there, start it again."
        )
    try:
        return read_json_object(path)
    except ValueError as error:
        raise ValueError(f"{path} {error}; download the model again.") from None
