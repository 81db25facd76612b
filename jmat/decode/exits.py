"""Early exits: at which layer a token leaves, and what the layers that it skipped keep."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from jmat.decode.draft import checked_words
from jmat.maps.carry import Carry
from jmat.metrics.confidence import CONFIDENCES, PATIENCE
from jmat.models.config import ModelConfig
from jmat.models.edits import is_edit
from jmat.models.site_checks import check_site
from jmat.models.sites import Site
from jmat.runtime.checks import check_choice, check_share, check_whole, whole

FIXED = "fixed"  # a token leaves at the first layer that is looked at
RECOMPUTE, COPY, MAP, DIRECT = FILLS = ("recompute", "copy", "map", "direct")
_LARGEST_LAMBDA = 1.112  # with which no token leaves, and with its opposite each does


@dataclasses.dataclass(frozen=True, eq=False)
class Exits:
    """Lets each token leave the model at the first layer whose map is sure enough.

    The prompt is read by all blocks, and so the first new token is the whole model's.
    Each later token is read by blocks up to a layer at which the map's prediction is
    sure enough. That prediction is the law of the next token. Later tokens look at the
    keys and values of this one in all blocks, also in those that it skipped; `fill` says
    where these come from.

    Attributes:
      maps: layer l → the map from h_l to h_L, such as `jmat.fit_map(model, texts, l,
        L).map`.
      threshold: a token leaves where the confidence is above it: a share from 0 to 1;
        for "patience", how many layers in a row must agree; none for "fixed".
      confidence: "gap" between the two largest probabilities, "max_probability",
        "entropy" (1 − entropy / ln V), "patience" (how many of the layers that are
        looked at agree in a row with the one before on the most likely token), or
        "fixed": each token leaves at the first layer that is looked at.
      fill: keys and values of skipped blocks. "recompute": these blocks run over the
        token when the next token needs them, which is exact; "copy": blocks compute
        them from the stream with which the token left (CALM, Schuster et al. 2022,
        arXiv 2207.07061); "map": from what a map makes of that stream, in place of the
        block's input; "direct": a map gives them themselves.
      fills: for "map" and "direct", the map of each layer l that is looked at and each
        later block k, by (l, k): from h_l to h_k, or to block k's keys, before rotary
        positions, with its values behind them (`jmat.fit_exits`). Block l itself reads
        h_l, and needs none.
      check_every: look only at layers that are multiples of this.
      words: ids of a short list that confidence is read over, at less cost than the
        vocabulary's; the token is drawn from the whole vocabulary.
      length: mean length N of a text, in tokens; the threshold then falls along the
        text: 0.9 λ + 0.1 exp(−4 t / N) for the token at position t, where λ is
        `threshold` (Din et al. 2023). None: it stays the same.

    Raises:
      ValueError: numbers out of range, or a map that is no callable pytree.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> texts = [f"Entry {i} holds a list of {i % 7} values." for i in range(40)]
      >>> fit = jmat.fit_map(model, texts, source=6, target=8, tokenizer=tokenizer)
      >>> exits = jmat.Exits({6: fit.map}, threshold=0.5)
      >>> written = jmat.generate(
      ...     model, "Return a new", tokenizer=tokenizer, max_new_tokens=8, exits=exits
      ... )
      >>> written.exits.looked_at, len(written.exits.layers[0])
      ((6,), 8)
    """

    maps: Mapping[int, Site]
    threshold: float | int | None = None
    confidence: str = "gap"
    fill: str = RECOMPUTE
    fills: Mapping[tuple[int, int], Site] = dataclasses.field(default_factory=dict)
    check_every: int = 1
    words: Sequence[int] | Int[ndarray, " W"] | None = None
    length: float | int | None = None

    def __post_init__(self) -> None:
        check_choice("confidence", self.confidence, (*CONFIDENCES, FIXED))
        check_choice("fill", self.fill, FILLS)
        object.__setattr__(self, "check_every", whole("check_every", self.check_every))
        check_whole("check_every", self.check_every, 1)
        if not isinstance(self.maps, Mapping) or not self.maps:
            raise ValueError(
                f"maps={self.maps!r}: expected a map to the last layer for each layer that is "
                "looked at, such as {6: fit.map}."
            )
        maps = {whole("a layer of maps", layer): site for layer, site in self.maps.items()}
        object.__setattr__(self, "maps", maps)
        for layer, site in maps.items():
            _check_map(f"maps[{layer}]", site)
        if not isinstance(self.fills, Mapping):
            raise ValueError(f"fills={self.fills!r}: expected maps by (layer, block).")
        if self.fills and self.fill not in (MAP, DIRECT):
            raise ValueError(f"fill={self.fill!r} uses no maps: leave out fills.")
        for pair, site in self.fills.items():
            _check_map(f"fills[{pair!r}]", site)
        self._check_threshold()
        if self.words is not None:
            words = checked_words(self.words)
            if len(words) < 2:
                raise ValueError(f"words={words.tolist()}: expected two token ids at least.")
            object.__setattr__(self, "words", words)

    def __repr__(self) -> str:
        layers = ", ".join(map(str, sorted(self.maps)))
        above = "" if self.threshold is None else f" above {self.threshold:g}"
        return f"Exits from layers {layers}: {self.confidence}{above}, fill={self.fill!r}"

    def _check_threshold(self) -> None:
        threshold, falls = self.threshold, self.length is not None
        if falls and (self.confidence in (PATIENCE, FIXED) or not _is_between(self.length, 1e-6)):
            raise ValueError(
                f"length={self.length!r}: expected a number of tokens above 0, for a confidence "
                f"that is a share; confidence={self.confidence!r}."
            )
        if self.confidence == FIXED:
            if threshold is not None:
                raise ValueError(
                    f"threshold={threshold!r}: with confidence='fixed' each token leaves at the "
                    "first layer that is looked at: leave it out."
                )
        elif self.confidence == PATIENCE:
            check_whole("threshold", threshold, 1)
        elif falls:
            if not _is_between(threshold, -_LARGEST_LAMBDA, _LARGEST_LAMBDA):
                raise ValueError(
                    f"threshold={threshold!r}: expected a number from {-_LARGEST_LAMBDA} to "
                    f"{_LARGEST_LAMBDA}."
                )
        else:
            check_share("threshold", threshold)

    def looked_at(self, config: ModelConfig) -> tuple[int, ...]:
        """Returns the layers that are looked at, rising: those with a map, or the
        multiples of `check_every`, which all need one.
        """
        if self.check_every == 1:
            return tuple(sorted(self.maps))
        return tuple(range(self.check_every, config.layers, self.check_every))

    def skipped(self, config: ModelConfig) -> tuple[tuple[int, int], ...]:
        """Returns the pairs (l, k) of `fills` that are needed."""
        if self.fill not in (MAP, DIRECT):
            return ()
        looked_at = self.looked_at(config)
        return tuple((l, k) for l in looked_at for k in range(l + 1, config.layers))


def _check_map(name: str, site: object) -> None:
    """Raises ValueError for what is no map of one stream."""
    if isinstance(site, Carry):
        raise ValueError(
            f"{name} is a carry, which reads h_L of the token before: a token that left has none."
        )
    if is_edit(site):
        raise ValueError(f"{name} is to be a map of a stream; got the edit {type(site).__name__}.")
    check_site(name, site)


def _is_between(value: object, low: float, high: float = 1e9) -> bool:
    """Returns whether a value is a number from `low` to `high`."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return low <= value <= high


class TokenExits(NamedTuple):
    """Holds at which layer each token left the model.

    Attributes:
      layers: of each text, for each new token: the layer whose prediction it is. L is
        the whole model.
      confidences: of each text, [tokens, layers looked at]; NaN where the token had
        left, and for the first token, which comes with the prompt.
      looked_at: the layers.
      blocks: L, of the whole model.
      programs: how many blocks were run behind the prompts: each run serves the tokens
        of all texts that are there, and up to 8 of a text where blocks that were
        skipped are made good.
      pieces: of each text, what each token adds to it; None without a tokenizer.
    """

    layers: tuple[Int[ndarray, " n"], ...]
    confidences: tuple[Float[ndarray, "n m"], ...]
    looked_at: tuple[int, ...]
    blocks: int
    programs: int
    pieces: tuple[tuple[str, ...], ...] | None = None

    @property
    def mean_layer(self) -> float:
        """Returns the mean layer at which tokens left, the first one of each text
        included.
        """
        return float(np.concatenate(self.layers).mean())
