"""Settings of the study of ways to write text."""

import dataclasses
from collections.abc import Sequence

from jmat.decode.draft import MOST_DRAFTED
from jmat.decode.exits import FILLS, Exits
from jmat.decode.fit_exits import checked_exit_kind
from jmat.maps.kinds import AFFINE, parse_kinds
from jmat.maps.types import Identity
from jmat.metrics.confidence import CONFIDENCES, PATIENCE
from jmat.models.cache import check_causal
from jmat.models.config import ModelConfig
from jmat.runtime.checks import (
    check_choice,
    check_number,
    check_several,
    check_whole,
    chosen,
    chosen_layers,
)
from jmat.studies.decoding.methods import EXIT, WAYS
from jmat.studies.kind_settings import KindSettings
from jmat.studies.map_zoo.fits import check_fitted_here

_LENGTHS = (1, 2)  # of drafts, by default


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(KindSettings):
    """Holds the settings of the study.

    Attributes:
      ways: beside plain text: `draft` (an early layer drafts through a map), `carry`
        (through a map that sees the token before, too), `lookup` (drafts are copied from
        the text) and `exit` (tokens leave at an early layer).
      kinds: kinds of maps that draft, and at which tokens leave, such as `affine` or
        `rank:64`.
      layers: from which to draft, and at which to leave, of 1 .. L − 1; none: half and
        three quarters of the blocks, and L − 1.
      draft_tokens: lengths of drafts; none: 1 and 2.
      short_list: so many most frequent words of the text are drafted, which takes so
        much less of the head; 0: all words.
      fills: where keys and values of blocks come from that a token skipped
        (`jmat.Exits`).
      confidence: by which a token leaves.
      thresholds: above which it does; none: 0.5 and 0.9, of patience 2 and 3.
      num_prompts: the number of texts that are written at once.
      prompt_tokens: the length of prompts that are taken from the text.
      new_tokens: the length of each new text, which no stop token ends.
      temperature: 0 takes the most likely tokens; above it, tokens are drawn, and texts
        of a draft differ from plain ones, though not in law.
      turns: how often each way of writing is timed; 0: never, and then two runs give
        the same bytes.
    """

    ways: Sequence[str] = WAYS
    kinds: Sequence[str] = (AFFINE,)
    layers: Sequence[int | str] = ()
    draft_tokens: Sequence[int | str] = ()
    short_list: int = 0
    fills: Sequence[str] = FILLS
    confidence: str = "gap"
    thresholds: Sequence[float | int | str] = ()
    num_prompts: int = 16
    prompt_tokens: int = 8
    new_tokens: int = 64
    temperature: float = 0.0
    turns: int = 3

    def __post_init__(self) -> None:
        """Raises ValueError for a setting that is not valid."""
        super().__post_init__()
        check_fitted_here(parse_kinds(self.kinds), "decoding")
        chosen("ways", self.ways, WAYS)
        for kind in self.kinds if EXIT in self.ways else ():
            checked_exit_kind(kind)
        chosen("fills", self.fills, FILLS)
        check_whole("short_list", self.short_list, 0)
        check_choice("confidence", self.confidence, CONFIDENCES)
        for level in self.levels:  # refuses those that the confidence does not have
            Exits({1: Identity()}, level, confidence=self.confidence)
        check_several("draft_tokens", self.draft_tokens)
        for length in self.draft_lengths:
            check_whole("draft_tokens", length, 1, MOST_DRAFTED)
        check_whole("num_prompts", self.num_prompts, 1)
        check_whole("prompt_tokens", self.prompt_tokens, 1)
        check_whole("new_tokens", self.new_tokens, 2)
        check_number("temperature", self.temperature, 0)
        check_whole("turns", self.turns, 0)

    @property
    def draft_lengths(self) -> list[int | str]:
        """Returns the lengths of drafts, as numbers where they are some."""
        given = [str(length) for length in self.draft_tokens or _LENGTHS]
        return [int(text) if text.isascii() and text.isdecimal() else text for text in given]

    @property
    def levels(self) -> list[float | int]:
        """Returns the thresholds as numbers. Raises ValueError for what is none."""
        check_several("thresholds", self.thresholds)
        counts = self.confidence == PATIENCE
        try:
            given = self.thresholds or ((2, 3) if counts else (0.5, 0.9))
            return [int(level) if counts else float(level) for level in given]
        except ValueError:
            raise ValueError(
                f"thresholds={','.join(map(str, self.thresholds))}: expected numbers, such as "
                "0.5,0.9, or of patience whole ones."
            ) from None

    def check(self, config: ModelConfig) -> None:
        """Raises ValueError for a masked model, and for what this one cannot have: a
        rank above its width, a layer, or so many positions.
        """
        check_causal(config)
        super().check(config)
        self.draft_layers(config)

    def draft_layers(self, config: ModelConfig) -> list[int]:
        """Returns the layers to draft from. Raises ValueError where there is none."""
        L = config.layers
        if L == 1:
            raise ValueError("a model of one block has no other blocks to check its drafts.")
        usual = sorted({max(L // 2, 1), max(3 * L // 4, 1), L - 1})
        layers = chosen_layers(self.layers or usual, L - 1)
        if 0 in layers:
            raise ValueError(f"layers: no block drafts from layer 0; expected 1 to {L - 1}.")
        return layers
