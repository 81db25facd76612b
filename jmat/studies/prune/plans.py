"""From a score to pruned models: which blocks go, and the maps that stand in for them."""

import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from jmat.capture.activations import capture
from jmat.data.examples import Split, mask_positions
from jmat.data.text import whole_sentences
from jmat.maps.least_squares import Solution, lstsq
from jmat.maps.types import Identity, Linear
from jmat.models.config import ModelConfig
from jmat.models.sites import Site, stream_sites
from jmat.studies.prune.heal import LOSSES, distil
from jmat.studies.prune.measure import compare_on_text
from jmat.studies.prune.merge import FEATURES, check_mergeable, features_site, fit_merge
from jmat.studies.prune.scores import SCORES, STREAM_SCORES, in_order, stretch_scores
from jmat.studies.prune.stand_ins import METHODS, Stretch, label, stand_ins, stretches

REFITS = ("original", "sequential")

Log = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class How:
    """The settings of one pruning."""

    method: str = "delete"  # one of METHODS
    score: str = "kl"  # one of SCORES
    rescore: bool = False  # compute the scores anew after each removal, on what is left
    spans: bool = False  # remove the best stretch of k blocks instead of k single blocks
    refit: str = "original"  # maps fitted on the whole model's stream, or one after another on what the others left
    intercept: bool = False
    ridge: float = 0.0
    merge_from: str = "hidden"  # merge: one of FEATURES
    score_sentences: int = 256  # kl: sentences on which it is measured
    distil_steps: int = 300
    learning_rate: float = 3e-3
    kl_weight: float = 0.0
    distil_loss: str = "relative"  # one of LOSSES
    seed: int = 0

    def check(self, config: ModelConfig, remove: int) -> None:
        """Raises ValueError for settings that are unknown or do not go together, or that the model does not allow."""
        named = (
            ("method", self.method, METHODS),
            ("score", self.score, SCORES),
            ("refit", self.refit, REFITS),
            ("merge_from", self.merge_from, FEATURES),
            ("distil_loss", self.distil_loss, LOSSES),
        )
        for name, value, valid in named:
            if value not in valid:
                raise ValueError(f"{name}={value!r} is unknown; choose from {', '.join(valid)}.")
        if self.rescore and self.spans:
            raise ValueError("rescore and spans do not go together: a span is chosen as a whole, not block by block.")
        if config.layers == 1:
            raise ValueError("the model has a single block: there is none to remove.")
        if not 1 <= remove < config.layers:
            raise ValueError(
                f"remove={remove}: expected 1 .. {config.layers - 1}; the model has {config.layers} blocks and keeps "
                f"{'block 0 where it is merged' if self.method == 'merge' else 'at least one'}."
            )
        if not 0 <= self.ridge < np.inf:
            raise ValueError(f"ridge={self.ridge}: expected a number >= 0.")
        if self.method == "merge":
            check_mergeable(config, intercept=self.intercept)


class Teacher(NamedTuple):
    """The whole model, the sentences to fit on, and what it does there: what every pruned model is fitted to."""

    model: Any
    split: Split
    streams: list[Float[ndarray, "N D"]]  # h_0 .. h_L at the split's positions
    mask_token: int | None = None
    tokens_per_batch: int = 4096

    def read(self, keep: tuple[str, ...], sites: Mapping[str, Site], stop: int | None = None) -> list[ndarray]:
        """Sites at the positions when parts of the model are replaced."""
        settings: dict[str, Any] = {"sites": sites, "stop": stop, "tokens_per_batch": self.tokens_per_batch}
        values = capture(self.model, mask_positions(self.split, self.mask_token), keep, **settings)
        return [values[site] for site in keep]


class Pruned(NamedTuple):
    """A pruned model."""

    removed: tuple[int, ...]  # in the order in which they went
    maps: dict[Stretch, Linear]  # what stands in for each stretch; none for `delete`

    def sites(self, model: Any, method: str) -> dict[str, Site]:
        """With which `jmat.run` runs it."""
        return stand_ins(model, method, self.removed, self.maps)


class Scored(NamedTuple):
    """The scores from which a choice was made."""

    after: tuple[int, ...]  # blocks removed before
    scores: dict[Stretch, float]


def teacher(
    model: Any,
    split: Split,
    *,
    mask_token: int | None = None,
    tokens_per_batch: int = 4096,
    progress: str | None = None,
) -> Teacher:
    """Runs the whole model once over the sentences."""
    seen, streams = mask_positions(split, mask_token), stream_sites(model.config.layers)
    acts = capture(model, seen, streams, tokens_per_batch=tokens_per_batch, progress=progress)
    return Teacher(model, split, list(acts.values()), mask_token, tokens_per_batch)


def prune(
    whole: Teacher,
    how: How,
    remove: int,
    *,
    known: Mapping[Stretch, float] | None = None,
    log: Log | None = None,
) -> Iterator[tuple[Pruned, Scored]]:
    """Pruned models with 1, 2, … `remove` blocks less, and the scores behind each choice.

    Each removes one block more than the one before; with `spans` each is the best stretch of its length.

    Args:
      whole: the model to prune.
      how: the settings.
      remove: blocks to remove from the last of the models.
      known: scores by `how.score` of the whole model's blocks (`block_scores`), where computed before.
      log: called with a sentence before each fit.

    Raises:
      ValueError: as `How.check`; NaN or infinity in what was read.
    """
    L = whole.model.config.layers
    how.check(whole.model.config, remove)
    lowest = 1 if how.method == "merge" else 0  # nothing stands before block 0 that could hold its map
    fitted: dict[Stretch, Linear] = {}
    removed: tuple[int, ...] = ()
    current = Pruned((), {})
    scored = Scored((), {})
    for count in range(1, remove + 1):
        if how.spans:
            candidates = [(i, i + count) for i in range(lowest, L - count + 1)]
            scored = Scored((), score_stretches(whole, how, candidates, Pruned((), {})))
            removed = tuple(range(*in_order(how.score, scored.scores)[0]))
        else:
            candidates = [(i, i + 1) for i in range(lowest, L) if i not in removed]
            if known is not None and not removed:
                scored = Scored((), {block: known[block] for block in candidates})
            elif how.rescore or not scored.scores:
                scored = Scored(removed, score_stretches(whole, how, candidates, current))
            ranked = [start for start, _ in in_order(how.score, scored.scores) if start not in removed]
            removed = (*removed, ranked[0])
        if log is not None:
            log(f"{how.method}, {count} of {remove}: without blocks {label(removed)}")
        current = Pruned(removed, fit_maps(whole, how, removed, fitted, log=log))
        if how.method == "distil":
            current = current._replace(maps=_distilled(whole, how, current.maps, log))
        yield current, scored


def block_scores(whole: Teacher, how: How) -> dict[str, dict[Stretch, float]]:
    """Returns every score of every block that is read from the streams, and `how.score`, before any is removed."""
    blocks = [(i, i + 1) for i in range(whole.model.config.layers)]
    return {
        score: score_stretches(whole, dataclasses.replace(how, score=score), blocks, Pruned((), {}))
        for score in SCORES
        if score in (how.score, *STREAM_SCORES)
    }


def score_stretches(whole: Teacher, how: How, candidates: list[Stretch], current: Pruned) -> dict[Stretch, float]:
    """The score of removing each candidate from the whole model, or from one that is pruned already."""
    L = whole.model.config.layers
    sites = current.sites(whole.model, how.method)
    if how.score != "kl":
        streams = whole.read(stream_sites(L), sites) if sites else whole.streams
        return stretch_scores(how.score, streams, candidates)
    text = whole_sentences(whole.split, whole.mask_token, most=how.score_sentences)
    without = {stretch: _without(sites, stretch) for stretch in candidates}
    sums = compare_on_text(whole.model, text, without, tokens_per_batch=whole.tokens_per_batch)
    kl = {stretch: float(of.kl.sum() / of.predictions.sum()) for stretch, of in sums.items()}
    return {stretch: value if np.isfinite(value) else np.inf for stretch, value in kl.items()}


def _without(sites: Mapping[str, Site], stretch: Stretch) -> dict[str, Any]:
    """One stretch less. What stood in for a part of its blocks goes with them."""
    gone = [f"block.{i}" for i in range(*stretch)]
    outside = {name: site for name, site in sites.items() if ".".join(name.split(".")[:2]) not in gone}
    return outside | {block: Identity() for block in gone}


def fit_maps(
    whole: Teacher,
    how: How,
    removed: Collection[int],
    known: dict[Stretch, Linear] | None = None,
    *,
    log: Log | None = None,
) -> dict[Stretch, Linear]:
    """The least-squares map of every stretch, by `how.refit`; none for `delete`.

    `original`: from the whole model's stream to the whole model's stream. `sequential`: from the stream as the maps
    before left it, again to the whole model's: each map also makes up for what those before got wrong.

    `known` is a store of `original` maps by stretch, which is filled: they do not depend on the other blocks.
    `log` is told of maps that the examples do not determine.
    """
    maps: dict[Stretch, Linear] = {}
    known = {} if known is None or how.refit == "sequential" else known
    for stretch in stretches(removed) if how.method != "delete" else []:
        sites = {}
        if how.refit == "sequential" and maps:
            before = [i for start, stop in maps for i in range(start, stop)]
            sites = stand_ins(whole.model, how.method, before, maps)
        if stretch not in known:
            known[stretch], solution = _fit(whole, how, stretch, sites)
            if log is not None and int(solution.rank) < solution.weights.shape[0]:
                log(f"map of blocks {label(range(*stretch))}: {solution.describe()}")
        maps[stretch] = known[stretch]
    return maps


def _fit(whole: Teacher, how: How, stretch: Stretch, sites: Mapping[str, Site]) -> tuple[Linear, Solution]:
    start, stop = stretch
    streams = stream_sites(whole.model.config.layers)
    target = whole.streams[stop]
    if how.method != "merge":
        source = whole.read((streams[start],), sites, stop=start)[0] if sites else whole.streams[start]
        solution = lstsq(source, target, intercept=how.intercept, ridge=how.ridge)
        return Linear(solution.weights, solution.bias), solution
    read, source = whole.read((features_site(start, how.merge_from), streams[start]), sites, stop=start)
    options: dict[str, Any] = {"features": how.merge_from, "intercept": how.intercept, "ridge": how.ridge}
    return fit_merge(whole.model.blocks[start - 1].ffn, read, target - source, **options)


def _distilled(whole: Teacher, how: How, maps: dict[Stretch, Linear], log: Log | None) -> dict[Stretch, Linear]:
    began = time.perf_counter()

    def progress(step: int, loss: float) -> None:
        left = (time.perf_counter() - began) / step * (how.distil_steps - step) / 60
        if log is not None:
            log(f"distil step {step}/{how.distil_steps}: loss {loss:.5f}, {left:.1f} min left")

    return distil(
        whole.model,
        mask_positions(whole.split, whole.mask_token),
        maps,
        steps=how.distil_steps,
        learning_rate=how.learning_rate,
        kl_weight=how.kl_weight,
        loss=how.distil_loss,
        seed=how.seed,
        log=progress,
    )
