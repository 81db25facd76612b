"""Holds the settings of the study of pruning, and checks them."""

import dataclasses
import math
from collections.abc import Sequence

from jmat.models.config import ModelConfig
from jmat.runtime.checks import check_choice, check_whole, chosen
from jmat.studies.prune.heal import LOSSES
from jmat.studies.prune.merge import FEATURES, check_mergeable
from jmat.studies.prune.scores import SCORES
from jmat.studies.prune.stand_ins import METHODS
from jmat.studies.settings import Settings

REFITS = ("original", "sequential")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """Holds the settings of the study.

    Attributes:
      method: treatment of removed blocks, `delete`, `map`, `distil` or `merge`, or
        several of them to compare.
      remove: blocks to remove from the most pruned model; smaller numbers are measured,
        too.
      save: write the most pruned model beside the results; takes one method.
      score: orders the blocks, one of `jmat.studies.prune.scores.SCORES`.
      rescore: compute the scores anew after each removal, on what is left.
      spans: remove the best stretch of k neighbouring blocks instead of k single
        blocks.
      refit: `original` fits maps on the whole model's stream, `sequential` one after
        another on what the maps before left.
      ridge: penalty on the maps, on the scale of a sum over examples.
      merge_from: merge: map the FFN's `hidden` activations (F x D), or its `output` (D
        x D).
      score_sentences: score `kl`: sentences on which it is measured.
      distil_steps: distil: steps for each pruned model.
      learning_rate: distil: Adam's, at the start.
      kl_weight: distil: weight of the KL on the predictions.
      distil_loss: distil: squared error of the streams, `relative` to each token's
        stream, or the `plain` mean.
    """

    method: str | Sequence[str] = ("delete", "map")
    remove: int = 1
    save: bool = False
    score: str = "kl"
    rescore: bool = False
    spans: bool = False
    refit: str = "original"
    ridge: float = 0.0
    merge_from: str = "hidden"
    score_sentences: int = 256
    distil_steps: int = 300
    learning_rate: float = 3e-3
    kl_weight: float = 0.0
    distil_loss: str = "relative"

    def __post_init__(self) -> None:
        """Raises ValueError for settings that are not valid, or do not go together."""
        super().__post_init__()
        methods = self.methods
        if self.save and len(methods) > 1:
            raise ValueError(
                f"save={self.save} writes one model: give one method, not {', '.join(methods)}."
            )
        check_choice("score", self.score, SCORES)
        check_choice("refit", self.refit, REFITS)
        check_choice("merge_from", self.merge_from, FEATURES)
        check_choice("distil_loss", self.distil_loss, LOSSES)
        if self.rescore and self.spans:
            raise ValueError(
                "rescore and spans do not go together: a span is chosen as a whole, not block by "
                "block."
            )
        for name in ("remove", "score_sentences", "distil_steps"):
            check_whole(name, getattr(self, name), 1)
        for name in ("ridge", "learning_rate", "kl_weight"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name}={value}: expected a number >= 0.")

    @property
    def methods(self) -> list[str]:
        """Returns the methods, each once. Raises ValueError for an unknown one."""
        return chosen(
            "method", [self.method] if isinstance(self.method, str) else self.method, METHODS
        )

    def check(self, config: ModelConfig) -> None:
        """Raises ValueError for settings that the model does not allow."""
        methods = self.methods
        if config.layers == 1:
            raise ValueError("the model has a single block: there is none to remove.")
        if self.remove >= config.layers:
            kept = "block 0 where it is merged" if "merge" in methods else "at least one"
            raise ValueError(
                f"remove={self.remove}: expected 1 .. {config.layers - 1}; the model has "
                f"{config.layers} blocks and keeps {kept}."
            )
        if "merge" in methods:
            check_mergeable(config, intercept=self.intercept)
