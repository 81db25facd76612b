"""`jmat.fit_exits`: all maps that early exits need, from one pass over texts."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from jmat.capture.activations import capture
from jmat.data.batches import Batch
from jmat.data.encoding import Tokenizer
from jmat.data.examples import Split
from jmat.decode.exits import DIRECT, FILLS, MAP, RECOMPUTE, Exits
from jmat.maps.compact import Map
from jmat.maps.kinds import AFFINE, MAT, Kind, fit_kind, parse_kind
from jmat.maps.least_squares import factorise
from jmat.maps.regression import Regression, pair_moments
from jmat.maps.types import Linear
from jmat.models.cache import check_causal
from jmat.models.config import ModelConfig
from jmat.models.family import Transformer, check_model
from jmat.models.sites import Site, stream_sites
from jmat.runtime.annotations import Keywords
from jmat.runtime.checks import check_choice, check_several, whole
from jmat.runtime.progress import track


def fit_exits(
    model: Transformer,
    inputs: Sequence[str] | Split | Batch,
    layers: Sequence[int],
    threshold: float | int | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    confidence: str = "gap",
    fill: str = RECOMPUTE,
    kind: str = AFFINE,
    words: Sequence[int] | Int[ndarray, " W"] | None = None,
    length: float | int | None = None,
    progress: str | None = None,
) -> Exits:
    """Fits exits from several layers: their maps to the last layer and, where keys and
    values of skipped blocks come from maps, these too.

    Args:
      model: a causal one, as `jmat.load` returns it.
      inputs: texts, a batch, or a `Split` with the positions to fit on.
      layers: at which tokens can leave, from 1 to L − 1.
      threshold: as in `jmat.Exits`, like the next ones.
      tokenizer: reads texts.
      confidence: that decides whether a token leaves.
      fill: where keys and values of skipped blocks come from.
      kind: of all maps: one with a closed form, such as `mat`, `affine` or `ridge:1e-2`.
      words: that confidence is read over.
      length: mean length of a text, along which the threshold falls.
      progress: label of the progress bar; by default none is shown.

    Raises:
      ValueError: a masked model; layers out of range; a kind without a closed form; as
        `jmat.Exits` and `jmat.capture`.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> texts = [f"Entry {i} holds a list of {i % 7} values." for i in range(40)]
      >>> exits = jmat.fit_exits(model, texts, [4, 6], 0.5, tokenizer=tokenizer, fill="map")
      >>> sorted(exits.maps), len(exits.fills)
      ([4, 6], 4)
    """
    check_model(model)
    config = model.config
    check_causal(config)
    check_choice("fill", fill, FILLS)
    wanted = checked_exit_kind(kind)
    sources = _checked_layers(layers, config)
    wide = 2 * (config.kv_heads or config.heads) * config.head_width
    wanted.check_width(config.width, wide if fill == DIRECT else config.width)
    options: Keywords = {"confidence": confidence, "fill": fill, "words": words, "length": length}
    # what is wrong with the options is said before texts are read
    Exits(dict.fromkeys(sources, Linear(np.eye(1, dtype=np.float32))), threshold, **options)
    streams, L = stream_sites(config.layers), config.layers
    targets: dict[tuple[int, int], tuple[str, ...]] = {(l, L): (streams[L],) for l in sources}
    for l in sources if fill in (MAP, DIRECT) else ():
        for k in range(l + 1, L):
            own = (f"block.{k}.attn.k", f"block.{k}.attn.v")
            targets[l, k] = own if fill == DIRECT else (streams[k],)
    sites = dict.fromkeys(
        [*(streams[l] for l in sources), *(name for names in targets.values() for name in names)]
    )
    acts = capture(model, inputs, sites, tokenizer=tokenizer, progress=progress)
    fits: dict[tuple[int, int], Site] = {}
    for l in track(sources, progress, total=len(sources)):
        values = {
            pair: np.concatenate([acts[name].reshape(len(acts[name]), -1) for name in names], 1)
            for pair, names in targets.items()
            if pair[0] == l
        }
        fits |= _fitted(acts[streams[l]], values, wanted)
    maps = {l: fits.pop((l, L)) for l in sources}
    return Exits(maps, threshold, fills=fits, **options)


def _fitted(
    source: Float[ndarray, "N D"],
    targets: Mapping[tuple[int, int], Float[ndarray, "N _"]],
    kind: Kind,
) -> dict[tuple[int, int], Map]:
    """Returns the map of each target from one source, which is factorised once."""
    if kind.name in (MAT, AFFINE) and not kind.int8:
        factors = factorise(source, intercept=kind.name == AFFINE, condition=False)
        solved = {pair: factors.solve(target, residual=False) for pair, target in targets.items()}
        return {pair: Linear(each.weights, each.bias) for pair, each in solved.items()}
    return {
        pair: fit_kind(kind, Regression(pair_moments(source, target)))
        for pair, target in targets.items()
    }


def checked_exit_kind(text: str) -> Kind:
    """Returns the kind of a name. Raises ValueError for one that is not fitted to one pair
    of sites in closed form.
    """
    kind = parse_kind(text)
    if not kind.fits_a_pair or kind.entry.needs_head:
        raise ValueError(
            f"kind={text!r} is not fitted to one pair of sites in closed form: choose one such as "
            f"{MAT}, {AFFINE} or ridge:1e-2."
        )
    return kind


def _checked_layers(layers: object, config: ModelConfig) -> list[int]:
    check_several("layers", layers)
    chosen = sorted({whole("a layer", layer) for layer in layers})  # type: ignore[attr-defined]
    wrong = [layer for layer in chosen if not 1 <= layer < config.layers]
    if wrong or not chosen:
        raise ValueError(
            f"layers={layers!r}: expected layers from 1 to {config.layers - 1}, after which a "
            "token can leave."
        )
    return chosen
