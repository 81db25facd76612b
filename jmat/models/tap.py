"""The tap through which a block calls its parts: it reads sites, and lets edits and
stand-ins take part.
"""

from collections.abc import Callable, Mapping
from functools import partial

import jax
from jax.typing import DTypeLike

from jmat.models.context import Context
from jmat.models.edits import apply_site, is_edit
from jmat.models.sites import Site, gather, is_square

# A block itself, in contrast to its parts, is called so inside the jitted program that all blocks
# share.
BLOCK = ""


class Tap:
    """Calls the parts of one block while it is traced: records what is kept, applies
    edits and stand-ins.

    `tap(name, part, x, *arguments)` is `part(x, *arguments)`, or what an edit makes of
    that, or `stand_in(x)` where the site is replaced; the part is then never called and
    costs nothing.
    """

    def __init__(
        self,
        sites: Mapping[str, Site],
        keep: tuple[str, ...],
        read_at: jax.Array | None = None,
        context: Context | None = None,
    ):
        self._sites = sites
        self._keep = frozenset(keep)
        self._read_at = read_at
        self._context = context
        self._kept: dict[str, jax.Array] = {}
        self._used: set[str] = set()

    def __call__(
        self,
        name: str,
        part: Callable[..., jax.Array],
        x: jax.Array,
        *arguments: object,
        shape: tuple[int, ...] | None = None,
        dtype: DTypeLike | None = None,
    ) -> jax.Array:
        """Returns the value of a site; `shape` and `dtype` are the part's output's
        where they are not its input's.
        """
        self.read(f"{name}.in", x)
        with jax.named_scope(name or "block"):
            if name in self._sites:
                self._used.add(name)
                compute = partial(part, x, *arguments)
                site = self._sites[name]
                y = apply_site(
                    _full(name), site, compute, x, shape or x.shape, dtype or x.dtype, self._context
                )
            else:
                y = part(x, *arguments)
        return self.read(name, y)

    def touches(self, *names: str) -> bool:
        """Returns whether any of these sites, or a site whose name begins with one of
        them and a dot, is asked for.
        """
        beginnings = tuple(f"{name}." for name in names)
        return any(
            name in names or name.startswith(beginnings) for name in (*self._keep, *self._sites)
        )

    def replaces(self, name: str) -> bool:
        """Returns whether something stands in for a part, so that it need not be
        computed.
        """
        return name in self._sites and not is_edit(self._sites[name])

    def read(self, name: str, value: jax.Array) -> jax.Array:
        """Records the value if it is kept; returns it unchanged."""
        if name in self._keep:
            self._kept[name] = gather(value, self._read_at, axis=2 if is_square(name) else 1)
        return value

    def finish(self) -> dict[str, jax.Array]:
        """Returns the values that were kept, by name.

        Raises ValueError for a site inside a part that is replaced, which was never
        reached.
        """
        unreached = (self._keep - self._kept.keys()) | (self._sites.keys() - self._used)
        if unreached:
            raise ValueError(
                f"site {_full(min(unreached))!r} is never reached: the part of the block that "
                "holds it is replaced, and so not computed."
            )
        return self._kept


def _full(name: str) -> str:
    """Returns the name of a part in the whole model; `jmat.run` puts the block's number
    in.
    """
    return f"block.{{i}}.{name}" if name else "block.{i}"


UNTAPPED = Tap({}, ())  # of a part that is called by itself
