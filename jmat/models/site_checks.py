"""Checks what `sites=` is given, on the host, before anything runs."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jmat.models.config import ModelConfig
from jmat.models.context import IgnoresInput, IgnoresPadding
from jmat.models.edits import Add, At, Edit, Scale, role
from jmat.models.sites import Site, is_square, named_sites


def checked_sites(
    sites: Mapping[str, Site] | None, config: ModelConfig, start: int, stop: int
) -> dict[str, Site]:
    """Returns `sites=` without patterns. Raises ValueError as `named_sites` and
    `check_site`.
    """
    named = named_sites(sites, config, start, stop)
    for name, site in named.items():
        check_site(name, site)
    return named


def check_site(name: str, site: object) -> None:
    """Raises ValueError for what is no callable pytree: a bare function would be traced
    each time.
    """
    if isinstance(site, At):
        if isinstance(site.site, At):
            raise ValueError(f"site {name!r}: At inside At; give all positions to one of them.")
        return check_site(name, site.site)
    if isinstance(site, Edit) and not callable(site.f):
        raise ValueError(
            f"site {name!r}: Edit takes a function of the site's value; got a "
            f"{type(site.f).__name__}."
        )
    if not callable(site) or jax.tree_util.all_leaves([site]):
        if isinstance(site, jax.Array | np.ndarray):
            raise ValueError(
                f"the replacement for site {name!r} is an array; expected jmat.Constant(array), "
                "which gives the array in place of the part's value, or jmat.Add(array), which "
                "adds it."
            )
        raise ValueError(
            f"the replacement for site {name!r} is a {type(site).__name__}; expected a callable "
            "pytree such as jmat.Linear(W), a dataclass registered with JAX, or "
            "jax.tree_util.Partial(function), which stands in for the part; or, to change what the "
            "part computes, jmat.Edit(function)."
        )
    _check_values(name, site)


# the last are keys of random numbers
_KINDS = (jnp.floating, jnp.integer, jnp.bool_, jax.dtypes.extended)


def _check_values(name: str, site: object) -> None:
    """Raises ValueError for what holds something else than real numbers, such as text."""
    for leaf in jax.tree.leaves(site):
        if isinstance(leaf, bool | int | float):
            continue
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not any(jnp.issubdtype(dtype, kind) for kind in _KINDS):
            got = f"a {type(leaf).__name__}" if dtype is None else f"an array of {dtype}"
            raise ValueError(
                f"the {role(site)} for site {name!r} holds {got}; expected real numbers."
            )


def is_any_length(name: str, site: Site) -> bool:
    """Returns whether a site does to a row what it does to the row padded further on
    the right.
    """
    if is_square(name):
        return False  # the values have an axis of keys
    if isinstance(site, At):
        return True  # sees chosen tokens alone
    if isinstance(site, Edit):
        return isinstance(site.f, IgnoresPadding)
    if isinstance(site, Add | Scale | IgnoresInput):
        return all(np.ndim(leaf) <= 1 for leaf in jax.tree.leaves(site))  # none for each token
    return isinstance(site, IgnoresPadding)
