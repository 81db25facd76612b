"""Fits every kind of map from every layer to the final one, from one set of statistics."""

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

Streams = Sequence[Float[ndarray, "N D"]]
Maps = dict[tuple[str, int], Map]  # by kind and source layer
Jacobians = Mapping[float, Mapping[int, Jacobian]]  # by the wanted error, then by source layer


@dataclasses.dataclass(frozen=True)
class Fits:
    """Holds fitted maps.

    Attributes:
      maps: by kind and source layer; a pooled kind has one map for all layers.
      n: number of tokens that they were fitted on.
    """

    maps: Maps
    n: int


def fit_zoo(
    model: Transformer,
    statistics: Streams | Moments,
    kinds: Sequence[Kind],
    layers: Sequence[int],
    *,
    weights: str = EQUAL,
    jacobians: Jacobians = MappingProxyType({}),
    future: Float[ndarray, "N D"] | None = None,
    seed: int = 0,
    progress: str | None = None,
) -> Fits:
    """Fits every kind from every layer to the final one.

    Args:
      model: whose head gives the metric of logits, and the loss of kinds that are
        trained.
      statistics: h_0 .. h_L at the same tokens, or the moments of their pairs with h_L.
      kinds: kinds of maps; those in int8 are rounded from the exact ones.
      layers: source layers.
      weights: of the tokens in closed forms (`jmat.maps.weighting`).
      jacobians: of the final layer, for kinds that are derived from them.
      future: sums of h_L over the positions from each token on, for kinds that are
        fitted to them.
      seed: order of the tokens that a kind is trained on.
      progress: what the progress bar says; None shows none.

    Raises:
      ValueError: there are moments alone, and a kind or the weights need activations.
    """
    exact = list(dict.fromkeys(kind.exact for kind in kinds))
    _check_given(exact, jacobians, future)
    closed = [kind for kind in exact if kind.entry.fit is not None]
    own, pool = (
        [kind for kind in closed if kind.entry.is_pooled == one_map] for one_map in (False, True)
    )
    metric = (
        _metric(model, statistics, layers[0])
        if any(kind.entry.needs_head for kind in closed)
        else None
    )

    derived = [kind for kind in exact if kind.entry.derive is not None]

    def work(layer: int) -> tuple[Moments, list[Map]]:
        pair = Regression(layer_moments(model, statistics, layer, weights), metric)
        later = (
            pair
            if future is None
            else Regression(
                layer_moments(model, [*_stored(statistics)[:-1], future], layer, weights)
            )
        )
        maps = [fit_kind(kind, later if kind.entry.sums_future else pair) for kind in own]
        maps += [derive_kind(kind, jacobians[kind.wanted_error][layer], pair) for kind in derived]
        return pair.moments, maps

    fitted: dict[tuple[Kind, int], Map] = {}
    together: list[Moments] = []
    for layer, (moments, maps) in zip(
        layers, track(in_threads(work, layers), progress, total=len(layers)), strict=True
    ):
        fitted |= {
            (kind, layer): stand_in for kind, stand_in in zip([*own, *derived], maps, strict=True)
        }
        together = [pooled([*together, moments])] if pool else [moments]
    pair = Regression(together[0], metric)
    for kind in pool:
        fitted |= dict.fromkeys([(kind, layer) for layer in layers], fit_kind(kind, pair))
    for kind in exact:
        if kind.entry.choose is not None:
            one_map = _chosen(model, statistics, kind, layers, weights)
            fitted |= dict.fromkeys([(kind, layer) for layer in layers], one_map)
        if kind.entry.train is not None:
            bar = None if progress is None else f"train {kind}"
            for layer in track(layers, bar):
                fitted[kind, layer] = train_kind(kind, _lesson(model, statistics, layer, seed))
    return Fits(_named(fitted, kinds, layers), round(float(moments.count[SOURCE])))


def _stored(statistics: Streams | Moments) -> Streams:
    """Returns the streams. Raises ValueError where there are moments alone."""
    if isinstance(statistics, Moments):
        raise ValueError("there are moments alone, and a kind needs stored activations.")
    return statistics


def _lesson(model: Transformer, statistics: Streams | Moments, layer: int, seed: int) -> Lesson:
    streams = _stored(statistics)
    return Lesson(model, streams[layer], streams[-1], seed=seed)


def _chosen(
    model: Transformer,
    statistics: Streams | Moments,
    kind: Kind,
    layers: Sequence[int],
    weights: str,
) -> Map:
    streams = _stored(statistics)
    return choose_kind(kind, model, [streams[layer] for layer in layers], streams[-1], weights)


def _check_given(kinds: Sequence[Kind], jacobians: Jacobians, future: object) -> None:
    """Raises ValueError for kinds that need more than streams or their moments."""
    for kind in kinds:
        if kind.entry.sums_future and future is None:
            raise ValueError(f"kind {str(kind)!r} needs the sums of later tokens: give future=.")
        if kind.entry.derive is not None and kind.wanted_error not in jacobians:
            raise ValueError(f"kind {str(kind)!r} needs mean Jacobians: give jacobians=.")


def _named(
    fitted: Mapping[tuple[Kind, int], Map], kinds: Sequence[Kind], layers: Sequence[int]
) -> Maps:
    """Returns the maps by the names of their kinds, those in int8 too; a pooled map is
    rounded once.
    """
    small: dict[int, Map] = {}
    named: Maps = {}
    for kind in kinds:
        for layer in layers:
            stand_in = fitted[kind.exact, layer]
            if kind.int8 and id(stand_in) not in small:
                small[id(stand_in)] = quantised(stand_in)
            named[str(kind), layer] = small[id(stand_in)] if kind.int8 else stand_in
    return named


def fit_seconds(
    model: Transformer,
    statistics: Streams | Moments,
    kinds: Sequence[Kind],
    layers: Sequence[int],
    *,
    weights: str = EQUAL,
    seed: int = 0,
) -> dict[str, float]:
    """Returns the seconds that each kind takes for one layer alone, from its moments,
    or in training; none of those that are derived from gradients.

    The layer is the middle one. The first fit, which compiles, is not timed. A pooled
    kind is timed on the moments of one layer, too.
    """
    layer = layers[len(layers) // 2]
    metric = (
        _metric(model, statistics, layer) if any(kind.entry.needs_head for kind in kinds) else None
    )
    moments = layer_moments(model, statistics, layer, weights)

    def timed(kind: Kind) -> float:
        began = time.perf_counter()
        if kind.entry.choose is not None:
            jax.block_until_ready(_chosen(model, statistics, kind, [layer], weights))
        elif kind.entry.train is None:
            jax.block_until_ready(fit_kind(kind, Regression(moments, metric)))
        else:
            jax.block_until_ready(train_kind(kind, _lesson(model, statistics, layer, seed)))
        return time.perf_counter() - began

    return {
        str(kind): min(timed(kind) for _ in range(1 if kind.needs_activations else 3))
        for kind in kinds
        if kind.entry.derive is None
    }


def layer_moments(
    model: Transformer, statistics: Streams | Moments, layer: int, weights: str = EQUAL
) -> Moments:
    """Returns the moments of a layer with the final one."""
    if isinstance(statistics, Moments):
        if weights != EQUAL:
            raise ValueError(f"weights={weights!r} needs stored activations; there are moments.")
        sites = stream_sites(model.config.layers)
        return one_pair(statistics, sites[layer], sites[-1])
    source = statistics[layer]
    return weighed_moments(source, weigh(weights, source, statistics[-1]))


def _metric(model: Transformer, statistics: Streams | Moments, layer: int) -> Metric:
    return head_metric(model, Regression(layer_moments(model, statistics, layer)).y_mean)


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
