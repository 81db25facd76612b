"""Checks that exits are of a model, and go with what else is asked of it, before any work."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Array, Float

from jmat.decode.draft import apply_map, check_token_map
from jmat.decode.exits import DIRECT, MAP, Exits
from jmat.decode.fills import keys_and_values
from jmat.models.config import ModelConfig
from jmat.models.edits import is_edit
from jmat.models.family import Transformer
from jmat.models.inputs import check_ids
from jmat.models.sites import Site


def check_exits(exits: Exits, model: Transformer, sites: Mapping[str, Site]) -> None:
    """Raises ValueError for exits that are not of this model, or do not go with sites."""
    if not isinstance(exits, Exits):
        raise ValueError(f"exits is of type {type(exits).__name__}; expected jmat.Exits.")
    config: ModelConfig = model.config
    if config.layers == 1:
        raise ValueError("a model of one block has no layer at which a token could leave.")
    looked_at = exits.looked_at(config)
    for layer in exits.maps:
        if not 1 <= layer < config.layers:
            raise ValueError(
                f"maps has one from layer {layer}: expected layers from 1 to {config.layers - 1}, "
                "after which a token can leave."
            )
    if not looked_at:
        raise ValueError(
            f"check_every={exits.check_every} looks at no layer of a model of {config.layers} "
            f"blocks: expected 1 to {config.layers - 1}."
        )
    if missing := [layer for layer in looked_at if layer not in exits.maps]:
        raise ValueError(
            f"check_every={exits.check_every} looks at layer {missing[0]}, for which maps has "
            f"none: give a map for each of {', '.join(map(str, looked_at))}."
        )
    for layer in looked_at:
        check_token_map(f"map of layer {layer}", exits.maps[layer], model)
    _check_fills(exits, model, sites)
    if exits.words is not None:
        check_ids("words: token id", np.asarray(exits.words), config.vocab_size)
        if "logits" in sites:
            raise ValueError(
                "words reads a few columns of the model's own head, and site 'logits' changes the "
                "head: leave out one of the two."
            )


def _check_fills(exits: Exits, model: Transformer, sites: Mapping[str, Site]) -> None:
    """Raises ValueError for maps of skipped blocks that are not there, or do not fit."""
    for l, k in exits.skipped(model.config):
        if (l, k) not in exits.fills:
            raise ValueError(
                f"fill={exits.fill!r} needs a map from layer {l} for block {k}, fills[({l}, {k})]: "
                "jmat.fit_exits fits them all."
            )

    def pair(site: Site, x: Float[Array, "B 1 D"]) -> tuple[Array, Array]:
        return keys_and_values(site, x, model.config)

    for l, k in exits.skipped(model.config):
        call = apply_map if exits.fill == MAP else pair
        check_token_map(f"fill of layer {l} for block {k}", exits.fills[l, k], model, call)
    for name, site in sites.items() if exits.fill == DIRECT else ():
        _, _, part = name.removeprefix("block.").partition(".")
        replaced = part in ("", "attn") and name.startswith("block.") and not is_edit(site)
        if part in ("attn.k", "attn.v") or replaced:
            raise ValueError(
                f"fill='direct' gives a block's keys and values, and site {name!r} changes what "
                "they come from: leave out one of the two."
            )
