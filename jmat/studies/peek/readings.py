"""Maps through which `peek` reads: given ones, of any kind and library, or new ones
that are fitted on text.
"""

import pathlib
from collections.abc import Mapping, Sequence

from jmat.capture.shared import SharedActivations
from jmat.data.encoding import Tokenizer
from jmat.data.examples import Examples, fingerprint
from jmat.maps.compact import Map
from jmat.maps.forms import jump_of
from jmat.maps.jumps import fit_jumps
from jmat.maps.kinds import IDENTITY, MAT, parse_kind, parse_kinds
from jmat.maps.sharing import load_maps
from jmat.maps.types import Identity
from jmat.models.config import ModelConfig
from jmat.models.family import Transformer
from jmat.models.sites import stream_sites
from jmat.studies.fitting import announce_ranks
from jmat.studies.map_zoo.fits import check_fitted_here, fit_zoo
from jmat.studies.map_zoo.jumps import stream_jumps
from jmat.studies.settings import Say, Settings, read_subject

Readings = dict[str, dict[int, Map]]  # kind → layer → map to the final layer
KINDS = (IDENTITY, MAT)  # by default, where maps are fitted


def check_kinds(kinds: Sequence[str], config: ModelConfig) -> None:
    """Raises ValueError for a kind of map that cannot be fitted here."""
    chosen = parse_kinds(kinds or KINDS)
    for kind in chosen:
        kind.check_width(config.width, config.width)
    check_fitted_here(chosen, "peek", "and give the folder as maps")


def given_maps(
    model: Transformer,
    maps: Mapping[str, Map] | str | pathlib.Path,
    kinds: Sequence[str],
    layers: Sequence[int] | None,
) -> Readings:
    """Returns the given maps to the final layer, by kind.

    Args:
      model: maps of another one are refused.
      maps: by name (`mat.3.12`), or a folder, a file or a name on the hub
        (`jmat.load_maps`).
      kinds: which to take; none: `id`, and all kinds that there are.
      layers: source layers; None: all from which there is a map of every kind.

    Raises:
      ValueError: there is no map of a kind, or none from one of the layers.
    """
    L, source = model.config.layers, "maps="
    if isinstance(maps, str | pathlib.Path):
        source = str(maps)
        maps = load_maps(maps, model=model)
    found: Readings = {}
    for name, stand_in in maps.items():
        jump = jump_of(name)
        if jump is not None and jump[1] < jump[2] == L:
            kind, layer, _ = jump
            found.setdefault(_written(kind), {})[layer] = stand_in
    direct: dict[int, Map] = {layer: Identity() for layer in range(L)}
    found = {IDENTITY: direct} | found
    if not kinds and len(found) == 1:
        raise ValueError(
            f"{source} has no map to layer {L}, the last; expected what experiments.layer_jump "
            "saves, or a lens."
        )
    chosen = list(dict.fromkeys(_written(kind) for kind in kinds or found))
    if unknown := [kind for kind in chosen if kind not in found]:
        raise ValueError(f"{source} has no kind {unknown[0]!r}; it has {', '.join(found)}.")
    if layers is None:
        layers = [layer for layer in range(L) if all(layer in found[kind] for kind in chosen)]
        if not layers:
            raise ValueError(
                f"{source} has no layer from which maps of all kinds lead: {', '.join(chosen)}."
            )
    for kind in chosen:
        if missing := [layer for layer in layers if layer < L and layer not in found[kind]]:
            raise ValueError(
                f"{source} has no map {kind}.{missing[0]}.{L}; expected what "
                "experiments.layer_jump saves, or name the layers that there are."
            )
    return {kind: {layer: found[kind][layer] for layer in layers if layer < L} for kind in chosen}


def _written(kind: str) -> str:
    """Returns a kind as files name it, `ridge:0.01` for `ridge:1e-2`; unchanged where
    jmat has no such kind.
    """
    try:
        return str(parse_kind(kind))
    except ValueError:
        return kind


def fitted_maps(
    model: Transformer,
    examples: Examples | Sequence[str],
    options: Settings,
    kinds: Sequence[str],
    layers: Sequence[int],
    *,
    tokenizer: Tokenizer,
    say: Say | None,
    shared: SharedActivations | None,
) -> tuple[Readings, dict[str, str]]:
    """Returns new maps from the layers to the final one, by kind, and what results.json
    says of the text. The final layer itself gets none.
    """
    subject = read_subject(model, examples, tokenizer, options, say=say, shared=shared)
    text = {"source": "texts"} | {name: fingerprint(split) for name, split in subject.splits}
    sources = [layer for layer in layers if layer < model.config.layers]
    chosen = [str(parse_kind(kind)) for kind in kinds or KINDS]
    if not sources:
        return {kind: {} for kind in chosen}, text
    streams = subject.streams("fit")
    found: Readings = {IDENTITY: dict.fromkeys(sources, Identity())}
    if MAT in chosen:
        maps, solutions = fit_jumps(
            streams, targets="final", intercept=options.intercept, progress=subject.bar("fit")
        )
        announce_ranks(subject, solutions)
        found[MAT] = {layer: linear for (layer, _), linear in maps.items() if layer in sources}
    if others := [parse_kind(kind) for kind in chosen if kind not in found]:
        L = model.config.layers
        acts = dict(zip(stream_sites(L), streams, strict=True))
        jumps = stream_jumps(L, sources, [L])
        fits = fit_zoo(model, acts, others, jumps, seed=options.seed, progress=subject.bar("fit"))
        for (kind, jump), stand_in in fits.maps.items():
            found.setdefault(kind, {})[jump.layer] = stand_in
    return {kind: found[kind] for kind in dict.fromkeys(chosen)}, text
