"""Prepares sites for one pass over a model: names are checked, parts of the model are
bound to their own blocks, positions become columns, and names are as inside a block.
"""

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from jmat.models.attention import depends_on_block
from jmat.models.config import ModelConfig
from jmat.models.context import NeedsContext
from jmat.models.edits import At, Edit, OfBlock, is_edit
from jmat.models.family import Transformer
from jmat.models.inputs import Values
from jmat.models.site_checks import checked_sites
from jmat.models.sites import Site, is_reached, kept_names
from jmat.models.tap import BLOCK

# Takes what positions are for, and positions as `At` has them; returns columns.
Columns = Callable[[str, object], Values]


def reached_sites(
    config: ModelConfig,
    keep: str | Iterable[str],
    sites: Mapping[str, Site] | None,
    start: int,
    stop: int,
) -> tuple[dict[str, str], dict[str, Site]]:
    """Returns the sites to keep by the names asked for, and the sites to change,
    without patterns; raises ValueError as `run` says.
    """
    if not 0 <= start <= stop <= config.layers:
        raise ValueError(
            f"start={start}, stop={stop}: expected 0 <= start <= stop <= {config.layers}, the "
            "model's blocks."
        )
    asked = kept_names(keep, config, start, stop)
    sites = checked_sites(sites, config, start, stop)
    _check_reached([*asked.values(), *sites], sites, start, stop, config.layers)
    return asked, sites


def _check_reached(
    names: list[str], sites: Mapping[str, Site], start: int, stop: int, layers: int
) -> None:
    """Raises ValueError for a site outside the stretch that is run, or in a block that
    is replaced.

    It would be silently ignored.
    """
    for name in names:
        block = ".".join(name.split(".")[:2])
        if block != name and block in sites and not is_edit(sites[block]):
            raise ValueError(
                f"site {name!r} is never reached: {block!r} is replaced, and so not computed."
            )
        if not is_reached(name, start, stop, layers):
            raise ValueError(
                f"site {name!r} is not reached when blocks {start} .. {stop - 1} of {layers} are "
                "run."
            )


def settle(name: str, site: Site, model: Transformer, columns: Columns) -> Site:
    """Returns a site with positions as columns of the rows, and with parts of the model
    bound to their own block.

    Raises ValueError for positions that `columns` refuses, and for a part of another
    model whose block would have to be known.
    """
    if isinstance(site, At):
        inner = settle(name, site.site, model, columns)
        return At(columns(f"site {name!r}: At", site.positions), inner)
    if isinstance(site, Edit):
        f = settle(name, site.f, model, columns)
        return site if f is site.f else Edit(f)
    if not isinstance(site, NeedsContext) or isinstance(site, OfBlock):
        return site
    for i, block in enumerate(model.blocks):
        if site is block or site is block.attn:
            return OfBlock(site, np.int32(i))
    if depends_on_block(site):
        raise ValueError(
            f"the replacement for site {name!r} is a part of another model whose attention depends "
            "on its block; say which: jmat.models.edits.OfBlock(part, block)."
        )
    return site


def inside_block(
    i: int, sites: Mapping[str, Site], keep: tuple[str, ...]
) -> tuple[dict[str, Site], tuple[str, ...]]:
    """Returns the sites to change and the names to keep in block i, named as inside it."""
    block = f"block.{i}"
    names = {
        name: BLOCK if name == block else name.removeprefix(f"{block}.") for name in (*sites, *keep)
    }
    ours = {
        name: part for name, part in names.items() if name == block or name.startswith(f"{block}.")
    }
    # In one order, since what is kept is part of the program.
    wanted = tuple(sorted(ours[name] for name in keep if name in ours))
    return {ours[name]: site for name, site in sites.items() if name in ours}, wanted
