"""Says which studies there are, which of them apply to a model, and with which settings
each is run.
"""

import dataclasses
import importlib.util
from collections.abc import Sequence
from types import ModuleType
from typing import TypeVar

from jmat.data.encoding import Tokenizer
from jmat.models.family import Transformer
from jmat.runtime.checks import chosen
from jmat.studies import early_exit, layer_jump, linearity, peek, probe, prune, r2, submodules
from jmat.studies.fitting import ReadingSettings
from jmat.studies.settings import Settings

# Every study by the name of its script, in the order of the page.
STUDIES: dict[str, ModuleType] = {
    "layer_jump": layer_jump,
    "r2": r2,
    "submodule_ablation": submodules,
    "early_exit": early_exit,
    "linearity": linearity,
    "prune": prune,
    "probe": probe,
    "peek": peek,
}
# The study that reads the most sites comes first: what it reads serves all others.
ORDER = ("submodule_ablation", *(name for name in STUDIES if name != "submodule_ablation"))

# Source layers of submodule_ablation, which runs the blocks behind each of them: the time of all
# layers would grow with their square.
MOST_LAYERS = 10

_NEED_NO_HEAD = ("r2", "linearity")
_NEED_TOKENIZER = ("probe", "peek")
_Kind = TypeVar("_Kind", bound=Settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ReadingSettings):
    """Holds the settings of all studies; each takes those that it has, and else its own
    defaults.

    Attributes:
      studies: names of the studies to run, of `STUDIES`.
      method: treatment of removed blocks, as for `prune`.
      remove: blocks to remove from the most pruned model.
      score: orders the blocks to remove; `linearity` is that of arXiv 2405.12250.
    """

    studies: Sequence[str] = tuple(STUDIES)
    method: str | Sequence[str] = ("delete", "map")
    remove: int = 1
    score: str = "linearity"

    def __post_init__(self) -> None:
        """Raises ValueError for a setting that is not valid in one of the studies."""
        super().__post_init__()
        chosen("studies", self.studies, tuple(STUDIES))
        for module in STUDIES.values():
            self.of(module.Options)

    def of(self, kind: type[_Kind]) -> _Kind:
        """Returns the settings of one study, each by its name."""
        own = {field.name for field in dataclasses.fields(self)}
        return kind(
            **{
                field.name: getattr(self, field.name)
                for field in dataclasses.fields(kind)
                if field.name in own
            }
        )


def ablated_layers(layers: int) -> tuple[int, ...]:
    """Returns the source layers of submodule_ablation: `MOST_LAYERS` of 0 .. L, evenly
    apart; none, for all of them, where there are no more.
    """
    if layers < MOST_LAYERS:
        return ()
    return tuple(round(k * layers / (MOST_LAYERS - 1)) for k in range(MOST_LAYERS))


def reason_against(
    name: str, model: Transformer, tokenizer: Tokenizer | None, options: Options
) -> str | None:
    """Returns why a study is not run on a model; None where it is.

    Raises:
      ValueError: the model does not allow a setting of the study.
    """
    if name not in options.studies:
        return "it was not asked for"
    if model.head is None and name not in _NEED_NO_HEAD:
        return "the model has no language-model head"
    if tokenizer is None and name in _NEED_TOKENIZER:
        return "the model has no tokenizer"
    if name == "probe" and importlib.util.find_spec("sklearn") is None:
        return "it needs scikit-learn: pip install 'jmat[probe]'"
    if name == "prune":
        if model.config.layers == 1:
            return "the model has a single block"
        options.of(prune.Options).check(model.config)
    return None
