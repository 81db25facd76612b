"""Fits every kind of map for every jump, from one set of statistics."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import jax
from jaxtyping import Float
from numpy import ndarray

from jmat.capture.moments import Moments
from jmat.maps.compact import Map, quantised
from jmat.maps.jacobian import Jacobian
from jmat.maps.kinds import Kind, choose_kind, derive_kind, fit_kind, train_kind
from jmat.maps.lens import Lesson
from jmat.maps.metric import Metric, head_metric
from jmat.maps.regression import SOURCE, Regression, one_pair, pooled
from jmat.maps.weighting import EQUAL, weigh, weighed_moments
from jmat.models.family import Transformer
from jmat.models.sites import stream_sites
from jmat.runtime.progress import track
from jmat.runtime.threads import in_threads
from jmat.studies.map_zoo.jumps import Jump, grouped

Activations = Mapping[str, Float[ndarray, "N _"]]  # by site, at the same tokens
Maps = dict[tuple[str, Jump], Map]  # by kind and jump
Jacobians = Mapping[float, Mapping[Jump, Jacobian]]  # by the wanted error, then by jump


@dataclasses.dataclass(frozen=True)
class Fits:
    """Holds fitted maps.

    Attributes:
      maps: by kind and jump; a pooled kind has one map for all jumps to one layer, or
        for all blocks.
      n: number of tokens that they were fitted on.
    """

    maps: Maps
    n: int


def fit_zoo(
    model: Transformer,
    statistics: Activations | Moments,
    kinds: Sequence[Kind],
    jumps: Sequence[Jump],
    *,
    weights: str = EQUAL,
    jacobians: Jacobians = MappingProxyType({}),
    future: Activations = MappingProxyType({}),
    seed: int = 0,
    progress: str | None = None,
) -> Fits:
    """Fits every kind for every jump that it can take.

    Args:
      model: whose head gives the metric of logits, and the loss of kinds that are
        trained.
      statistics: activations of all sites of the jumps at the same tokens, or the
        moments of the pairs.
      kinds: kinds of maps; those in int8 are rounded from the exact ones.
      jumps: those of one group (`Jump.group`) behind one another.
      weights: of the tokens in closed forms (`jmat.maps.weighting`).
      jacobians: for kinds that are derived from them.
      future: sums of each target over the positions from each token on, for kinds that
        are fitted to them.
      seed: order of the tokens that a kind is trained on.
      progress: what the progress bar says; None shows none.

    Raises:
      ValueError: there are moments alone, and a kind or the weights need activations.
    """
    exact, L = list(dict.fromkeys(kind.exact for kind in kinds)), model.config.layers
    _check_given(exact, jacobians, future)
    closed = [kind for kind in exact if kind.entry.fit is not None]
    pool = [kind for kind in closed if kind.entry.is_pooled]
    metric = _metric(model, statistics, closed, jumps)

    def single(jump: Jump) -> list[Kind]:
        """Returns the kinds that have one map for this jump alone, without training."""
        fitted = [kind for kind in exact if kind.entry.fit or kind.entry.derive]
        return [kind for kind in fitted if kind not in pool and jump.takes(kind, L)]

    def work(jump: Jump) -> tuple[Moments, list[Map]]:
        pair, maps = Regression(pair_of(statistics, jump, weights), metric), []
        for kind in single(jump):
            if kind.entry.derive is not None:
                maps.append(derive_kind(kind, jacobians[kind.wanted_error][jump], pair))
            elif kind.entry.sums_future:
                later = Regression(pair_of(statistics, jump, weights, future[jump.target]))
                maps.append(fit_kind(kind, later))
            else:
                maps.append(fit_kind(kind, pair))
        return pair.moments, maps

    fitted: dict[tuple[Kind, Jump], Map] = {}
    together: list[Moments] = []
    groups = grouped(jumps)
    last = {group[-1]: group for group in groups}
    for jump, (moments, maps) in zip(
        jumps, track(in_threads(work, jumps), progress, total=len(jumps)), strict=True
    ):
        fitted |= {(kind, jump): each for kind, each in zip(single(jump), maps, strict=True)}
        together = [pooled([*together, moments])] if pool else []
        if jump in last:
            for kind in pool:
                one_map = fit_kind(kind, Regression(together[0], metric))
                fitted |= dict.fromkeys([(kind, each) for each in last[jump]], one_map)
            together = []
    for kind in exact:
        if kind.entry.choose is not None:
            for group in groups:
                if group[0].takes(kind, L):
                    one_map = _chosen(model, statistics, kind, group, weights)
                    fitted |= dict.fromkeys([(kind, jump) for jump in group], one_map)
        if kind.entry.train is not None:
            bar = None if progress is None else f"train {kind}"
            for jump in track([jump for jump in jumps if jump.takes(kind, L)], bar):
                fitted[kind, jump] = train_kind(kind, _lesson(model, statistics, jump, kind, seed))
    return Fits(_named(fitted, kinds, jumps), round(float(moments.count[SOURCE])))


def _stored(statistics: Activations | Moments, reader: str) -> Activations:
    """Returns the activations. Raises ValueError where there are moments alone.

    `reader`: what needs them, as in "kind 'tuned'".
    """
    if isinstance(statistics, Moments):
        raise ValueError(f"{reader} needs stored activations, and there are moments alone.")
    return statistics


def _lesson(
    model: Transformer, statistics: Activations | Moments, jump: Jump, kind: Kind, seed: int
) -> Lesson:
    stored = _stored(statistics, f"kind {str(kind)!r}")
    return Lesson(model, stored[jump.source], stored[jump.target], seed=seed)


def _chosen(
    model: Transformer,
    statistics: Activations | Moments,
    kind: Kind,
    group: Sequence[Jump],
    weights: str,
) -> Map:
    stored = _stored(statistics, f"kind {str(kind)!r}")
    sources = [stored[jump.source] for jump in group]
    return choose_kind(kind, model, sources, stored[group[0].target], weights)


def _check_given(kinds: Sequence[Kind], jacobians: Jacobians, future: Activations) -> None:
    """Raises ValueError for kinds that need more than activations or their moments."""
    for kind in kinds:
        if kind.entry.sums_future and not future:
            raise ValueError(f"kind {str(kind)!r} needs the sums of later tokens: give future=.")
        if kind.entry.derive is not None and kind.wanted_error not in jacobians:
            raise ValueError(f"kind {str(kind)!r} needs mean Jacobians: give jacobians=.")


def _named(
    fitted: Mapping[tuple[Kind, Jump], Map], kinds: Sequence[Kind], jumps: Sequence[Jump]
) -> Maps:
    """Returns the maps by the names of their kinds, those in int8 too; a pooled map is
    rounded once.
    """
    small: dict[int, Map] = {}
    named: Maps = {}
    for kind in kinds:
        for jump in jumps:
            stand_in = fitted.get((kind.exact, jump))
            if stand_in is None:
                continue
            if kind.int8 and id(stand_in) not in small:
                small[id(stand_in)] = quantised(stand_in)
            named[str(kind), jump] = small[id(stand_in)] if kind.int8 else stand_in
    return named


def fit_seconds(
    model: Transformer,
    statistics: Activations | Moments,
    kinds: Sequence[Kind],
    jumps: Sequence[Jump],
    *,
    weights: str = EQUAL,
    seed: int = 0,
) -> dict[str, float]:
    """Returns the seconds that each kind takes for one jump alone, from its moments, or
    in training; none of those that are derived from gradients.

    The jump is the middle one that the kind can take. The first fit, which compiles, is
    not timed. A pooled kind is timed on the moments of one jump, too.
    """
    metric = _metric(model, statistics, kinds, jumps)
    layers = model.config.layers

    def timed(kind: Kind, jump: Jump, moments: Moments) -> float:
        began = time.perf_counter()
        if kind.entry.choose is not None:
            jax.block_until_ready(_chosen(model, statistics, kind, [jump], weights))
        elif kind.entry.train is None:
            jax.block_until_ready(fit_kind(kind, Regression(moments, metric)))
        else:
            jax.block_until_ready(train_kind(kind, _lesson(model, statistics, jump, kind, seed)))
        return time.perf_counter() - began

    seconds: dict[str, float] = {}
    for kind in kinds:
        if kind.entry.derive is None:
            taken = [jump for jump in jumps if jump.takes(kind, layers)]
            jump = taken[len(taken) // 2]
            moments = pair_of(statistics, jump, weights)
            runs = range(1 if kind.needs_activations else 3)
            seconds[str(kind)] = min(timed(kind, jump, moments) for _ in runs)
    return seconds


def pair_of(
    statistics: Activations | Moments,
    jump: Jump,
    weights: str = EQUAL,
    target: Float[ndarray, "N E"] | None = None,
) -> Moments:
    """Returns the moments of a jump's source with its target, or with another one at
    the same tokens.
    """
    if isinstance(statistics, Moments) and weights == EQUAL and target is None:
        return one_pair(statistics, jump.source, jump.target)
    reader = f"weights={weights!r}" if target is None else "a sum over later tokens"
    stored = _stored(statistics, reader)
    source = stored[jump.source]
    wanted = stored[jump.target] if target is None else target
    return weighed_moments(source, weigh(weights, source, wanted))


def check_fitted_here(kinds: Sequence[Kind], study: str, then: str = "") -> None:
    """Raises ValueError for a kind that is fitted to more than the streams of layers,
    which `study` does not read; `then` says how it is used there all the same.
    """
    for kind in kinds:
        if kind.entry.derive is not None or kind.entry.sums_future:
            source = "sums of future streams" if kind.entry.sums_future else "gradients"
            raise ValueError(
                f"kind {str(kind)!r} is derived from {source}, and {study} does not read them: "
                f"fit it with experiments.map_zoo{', ' * bool(then)}{then}."
            )


def _metric(
    model: Transformer,
    statistics: Activations | Moments,
    kinds: Sequence[Kind],
    jumps: Sequence[Jump],
) -> Metric | None:
    """Returns the metric of logits about the mean of the final stream, where a closed
    form reads it and a jump ends there.
    """
    final = stream_sites(model.config.layers)[-1]
    ending = [jump for jump in jumps if jump.target == final]
    if not (ending and any(kind.entry.needs_head and kind.entry.fit for kind in kinds)):
        return None
    return head_metric(model, Regression(pair_of(statistics, ending[0])).y_mean)
