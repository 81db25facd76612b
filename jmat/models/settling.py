"""Prepares sites for one pass over a model: parts of the model are bound to their own
blocks, positions become columns, and names are told from inside a block.
"""

from collections.abc import Callable, Mapping

import numpy as np

from jmat.models.attention import depends_on_block
from jmat.models.edits import At, Edit, NeedsContext, OfBlock
from jmat.models.family import Transformer
from jmat.models.inputs import Values
from jmat.models.sites import Site
from jmat.models.tap import BLOCK

# Takes what positions are for, and positions as `At` has them; returns columns.
Columns = Callable[[str, object], Values]


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
