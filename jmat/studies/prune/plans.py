"""From a score to pruned models: which blocks go, and the maps that stand in for them."""

import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from jmat.capture.activations import capture
from jmat.data.examples import Split, mask_positions
from jmat.data.text import whole_sentences
from jmat.maps.least_squares import lstsq
from jmat.maps.solution import Solution
from jmat.maps.types import Identity, Linear
from jmat.models.family import Transformer
from jmat.models.sites import Site, stream_sites
from jmat.runtime.annotations import Keywords
from jmat.studies.prune.heal import distil
from jmat.studies.prune.measure import compare_on_text
from jmat.studies.prune.merge import features_site, fit_merge
from jmat.studies.prune.options import Options
from jmat.studies.prune.scores import SCORES, STREAM_SCORES, in_order, stretch_scores
from jmat.studies.prune.stand_ins import Stretch, label, stand_ins, stretches

Log = Callable[[str], None]


class Teacher(NamedTuple):
    """Holds the whole model, the sentences to fit on, and what it does there: what
    every pruned model is fitted to.
    """

    model: Transformer
    split: Split
    streams: list[Float[ndarray, "N D"]]  # h_0 .. h_L at the split's positions
    mask_token: int | None = None
    tokens_per_batch: int = 4096

    def read(
        self, keep: tuple[str, ...], sites: Mapping[str, Site], stop: int | None = None
    ) -> list[ndarray]:
        """Reads sites at the positions when parts of the model are replaced."""
        settings: Keywords = {
            "sites": sites,
            "stop": stop,
            "tokens_per_batch": self.tokens_per_batch,
        }
        values = capture(self.model, mask_positions(self.split, self.mask_token), keep, **settings)
        return [values[site] for site in keep]


class Pruned(NamedTuple):
    """Holds a pruned model."""

    removed: tuple[int, ...]  # in the order in which they went
    maps: dict[Stretch, Linear]  # what stands in for each stretch; none for `delete`

    def sites(self, model: Transformer, method: str) -> dict[str, Site]:
        """Returns the `sites` with which `jmat.run` runs it."""
        return stand_ins(model, method, self.removed, self.maps)


class Scored(NamedTuple):
    """Holds the scores from which a choice was made."""

    after: tuple[int, ...]  # blocks removed before
    scores: dict[Stretch, float]


def prune(
    whole: Teacher,
    method: str,
    options: Options,
    *,
    known: Mapping[Stretch, float] | None = None,
    log: Log | None = None,
) -> Iterator[tuple[Pruned, Scored]]:
    """Yields pruned models with 1, 2, … `options.remove` blocks less, and the scores
    behind each choice.

    Each removes one block more than the one before; with `spans` each is the best
    stretch of its length.

    Args:
      whole: the model to prune.
      method: treatment of removed blocks, one of `METHODS`.
      options: the settings.
      known: scores by `options.score` of the whole model's blocks (`block_scores`),
        where computed before.
      log: called with a sentence before each fit.

    Raises:
      ValueError: as `Options.check`; NaN or infinity in what was read.
    """
    L = whole.model.config.layers
    options = dataclasses.replace(options, method=method)
    options.check(whole.model.config)
    lowest = 1 if method == "merge" else 0  # nothing stands before block 0 that could hold its map
    fitted: dict[Stretch, Linear] = {}
    removed: tuple[int, ...] = ()
    current = Pruned((), {})
    scored = Scored((), {})
    for count in range(1, options.remove + 1):
        if options.spans:
            candidates = [(i, i + count) for i in range(lowest, L - count + 1)]
            scored = Scored((), score_stretches(whole, method, options, candidates, Pruned((), {})))
            removed = tuple(range(*in_order(options.score, scored.scores)[0]))
        else:
            candidates = [(i, i + 1) for i in range(lowest, L) if i not in removed]
            if known is not None and not removed:
                scored = Scored((), {block: known[block] for block in candidates})
            elif options.rescore or not scored.scores:
                scored = Scored(
                    removed, score_stretches(whole, method, options, candidates, current)
                )
            ranked = [
                start for start, _ in in_order(options.score, scored.scores) if start not in removed
            ]
            removed = (*removed, ranked[0])
        if log is not None:
            log(f"{method}, {count} of {options.remove}: without blocks {label(removed)}")
        current = Pruned(removed, fit_maps(whole, method, options, removed, fitted, log=log))
        if method == "distil":
            current = current._replace(maps=_distilled(whole, options, current.maps, log))
        yield current, scored


def block_scores(whole: Teacher, options: Options) -> dict[str, dict[Stretch, float]]:
    """Returns every score of every block that is read from the streams, and
    `options.score`, before any is removed.
    """
    blocks = [(i, i + 1) for i in range(whole.model.config.layers)]
    return {
        score: score_stretches(
            whole, "delete", dataclasses.replace(options, score=score), blocks, Pruned((), {})
        )
        for score in SCORES
        if score in (options.score, *STREAM_SCORES)
    }


def score_stretches(
    whole: Teacher, method: str, options: Options, candidates: list[Stretch], current: Pruned
) -> dict[Stretch, float]:
    """Returns the score of removing each candidate from the whole model, or from one
    that is pruned already.
    """
    L = whole.model.config.layers
    sites = current.sites(whole.model, method)
    if options.score != "kl":
        streams = whole.read(stream_sites(L), sites) if sites else whole.streams
        return stretch_scores(options.score, streams, candidates)
    text = whole_sentences(whole.split, whole.mask_token, most=options.score_sentences)
    without = {stretch: _without(sites, stretch) for stretch in candidates}
    sums = compare_on_text(whole.model, text, without, tokens_per_batch=whole.tokens_per_batch)
    kl = {stretch: float(of.kl.sum() / of.predictions.sum()) for stretch, of in sums.items()}
    return {stretch: value if np.isfinite(value) else np.inf for stretch, value in kl.items()}


def _without(sites: Mapping[str, Site], stretch: Stretch) -> dict[str, Site]:
    """Returns the sites with one stretch less. The stand-ins for parts of its blocks go
    with them.
    """
    gone = [f"block.{i}" for i in range(*stretch)]
    outside = {
        name: site for name, site in sites.items() if ".".join(name.split(".")[:2]) not in gone
    }
    return outside | {block: Identity() for block in gone}


def fit_maps(
    whole: Teacher,
    method: str,
    options: Options,
    removed: Collection[int],
    known: dict[Stretch, Linear] | None = None,
    *,
    log: Log | None = None,
) -> dict[Stretch, Linear]:
    """Returns the least-squares map of every stretch, by `options.refit`; none for
    `delete`.

    `original`: from the whole model's stream to the whole model's stream. `sequential`:
    from the stream as the maps before left it, again to the whole model's: each map
    also makes up for what those before got wrong.

    `known` is a store of `original` maps by stretch, which is filled: they do not
    depend on the other blocks. `log` is told of maps that the examples do not
    determine.
    """
    maps: dict[Stretch, Linear] = {}
    known = {} if known is None or options.refit == "sequential" else known
    for stretch in stretches(removed) if method != "delete" else []:
        sites = {}
        if options.refit == "sequential" and maps:
            before = [i for start, stop in maps for i in range(start, stop)]
            sites = stand_ins(whole.model, method, before, maps)
        if stretch not in known:
            known[stretch], solution = _fit(whole, method, options, stretch, sites)
            if log is not None and int(solution.rank) < solution.weights.shape[0]:
                log(f"map of blocks {label(range(*stretch))}: {solution.describe()}")
        maps[stretch] = known[stretch]
    return maps


def _fit(
    whole: Teacher, method: str, options: Options, stretch: Stretch, sites: Mapping[str, Site]
) -> tuple[Linear, Solution]:
    start, stop = stretch
    streams = stream_sites(whole.model.config.layers)
    target = whole.streams[stop]
    if method != "merge":
        source = (
            whole.read((streams[start],), sites, stop=start)[0] if sites else whole.streams[start]
        )
        solution = lstsq(source, target, intercept=options.intercept, ridge=options.ridge)
        return Linear(solution.weights, solution.bias), solution
    read, source = whole.read(
        (features_site(start, options.merge_from), streams[start]), sites, stop=start
    )
    settings: Keywords = {
        "features": options.merge_from,
        "intercept": options.intercept,
        "ridge": options.ridge,
    }
    return fit_merge(whole.model.blocks[start - 1].ffn, read, target - source, **settings)


def _distilled(
    whole: Teacher, options: Options, maps: dict[Stretch, Linear], log: Log | None
) -> dict[Stretch, Linear]:
    began = time.perf_counter()

    def progress(step: int, loss: float) -> None:
        left = (time.perf_counter() - began) / step * (options.distil_steps - step) / 60
        if log is not None:
            log(f"distil step {step}/{options.distil_steps}: loss {loss:.5f}, {left:.1f} min left")

    return distil(
        whole.model,
        mask_positions(whole.split, whole.mask_token),
        maps,
        steps=options.distil_steps,
        learning_rate=options.learning_rate,
        kl_weight=options.kl_weight,
        loss=options.distil_loss,
        seed=options.seed,
        log=progress,
    )
