"""Fits every kind of map from every layer to the final one, from one set of statistics."""

import dataclasses
import time
from collections.abc import Mapping, Sequence

import jax
from jaxtyping import Float
from numpy import ndarray

from jmat.capture.moments import Moments
from jmat.maps.compact import Map, quantised
from jmat.maps.kinds import Kind, fit_kind
from jmat.maps.metric import Metric, head_metric
from jmat.maps.regression import Regression, one_pair, pair_moments, pooled
from jmat.models.family import Transformer
from jmat.models.sites import stream_sites
from jmat.runtime.progress import track
from jmat.runtime.threads import in_threads

Streams = Sequence[Float[ndarray, "N D"]]
Maps = dict[tuple[str, int], Map]  # by kind and source layer


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
    progress: str | None = None,
) -> Fits:
    """Fits every kind from every layer to the final one.

    Args:
      model: whose head gives the metric of logits.
      statistics: h_0 .. h_L at the same tokens, or the moments of their pairs with h_L.
      kinds: kinds of maps; those in int8 are rounded from the exact ones.
      layers: source layers.
      progress: what the progress bar says; None shows none.
    """
    exact = list(dict.fromkeys(kind.exact for kind in kinds))
    own = [kind for kind in exact if not kind.entry.is_pooled]
    metric = _metric(model, statistics, layers[0]) if any(kind.entry.needs_head for kind in exact) else None

    def work(layer: int) -> tuple[Moments, list[Map]]:
        moments = layer_moments(model, statistics, layer)
        pair = Regression(moments, metric)
        return moments, [fit_kind(kind, pair) for kind in own]

    found: dict[tuple[Kind, int], Map] = {}
    together: Moments | None = None
    for layer, (moments, maps) in zip(
        layers, track(in_threads(work, layers), progress, total=len(layers)), strict=True
    ):
        found |= {(kind, layer): stand_in for kind, stand_in in zip(own, maps, strict=True)}
        if len(own) < len(exact):
            together = moments if together is None else pooled([together, moments])
    if together is not None:
        pair = Regression(together, metric)
        for kind in exact:
            if kind.entry.is_pooled:
                found |= dict.fromkeys([(kind, layer) for layer in layers], fit_kind(kind, pair))
    n = Regression(moments).n
    small: dict[int, Map] = {}  # a pooled map is rounded once
    maps_by_name: Maps = {}
    for kind in kinds:
        for layer in layers:
            stand_in = found[kind.exact, layer]
            if kind.int8:
                stand_in = small.setdefault(id(stand_in), quantised(stand_in))
            maps_by_name[str(kind), layer] = stand_in
    return Fits(maps_by_name, n)


def fit_seconds(
    model: Transformer, statistics: Streams | Moments, kinds: Sequence[Kind], layers: Sequence[int]
) -> Mapping[str, float]:
    """Returns the seconds that each kind takes for one layer, alone, from its moments.

    The layer is the middle one. The first fit, which compiles, is not timed. A pooled
    kind is timed on the moments of one layer, too.
    """
    layer = layers[len(layers) // 2]
    metric = _metric(model, statistics, layer) if any(kind.entry.needs_head for kind in kinds) else None
    moments = layer_moments(model, statistics, layer)

    def timed(kind: Kind) -> float:
        began = time.perf_counter()
        jax.block_until_ready(fit_kind(kind, Regression(moments, metric)))
        return time.perf_counter() - began

    return {str(kind): min(timed(kind) for _ in range(3)) for kind in kinds}


def layer_moments(model: Transformer, statistics: Streams | Moments, layer: int) -> Moments:
    """Returns the moments of a layer with the final one."""
    if isinstance(statistics, Moments):
        sites = stream_sites(model.config.layers)
        return one_pair(statistics, sites[layer], sites[-1])
    return pair_moments(statistics[layer], statistics[-1])


def _metric(model: Transformer, statistics: Streams | Moments, layer: int) -> Metric:
    return head_metric(model, Regression(layer_moments(model, statistics, layer)).y_mean)
