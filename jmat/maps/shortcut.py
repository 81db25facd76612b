"""Shortcuts: a map from one layer to a later one, in place of the blocks between them."""

import dataclasses
from collections.abc import Iterator, Mapping

from jmat.maps.types import Identity
from jmat.models.edits import is_edit
from jmat.models.site_checks import check_site
from jmat.models.sites import Site
from jmat.runtime.checks import whole


@dataclasses.dataclass(frozen=True, eq=False)
class Shortcut(Mapping[str, Site]):
    """Replaces the blocks from layer `source` to layer `target` by one map of the
    stream.

    A shortcut is a mapping from the sites of these blocks to what stands in for them,
    so that it can be given as `sites=`:
    `jmat.run(model, batch, sites=Shortcut(3, 8, linear))` computes blocks 0 to 2, the
    map, and the blocks from 8 on. It combines with other sites as
    `{**shortcut, "block.0.attn": jmat.Zero()}`.

    Attributes:
      source: layer that the map reads, from 0, the embedding.
      target: layer that it predicts, above `source` and at most L, the last.
      map: callable pytree from h_source to h_target.

    Raises:
      ValueError: the layers are no whole numbers, or not in order; the map is an edit,
        or no callable pytree.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> batch = jmat.encode(tokenizer, ["Return a new array", "The default is None"])
      >>> exit_at_3 = jmat.Shortcut(3, 8, jmat.Identity())
      >>> x, _ = jmat.run(model, batch, sites=exit_at_3)
    """

    source: int
    target: int
    map: Site

    def __post_init__(self) -> None:
        for end in ("source", "target"):
            object.__setattr__(self, end, whole(end, getattr(self, end)))
        if not 0 <= self.source < self.target:
            raise ValueError(
                f"a shortcut goes from a layer to a later one; got {self.source} to {self.target}."
            )
        if is_edit(self.map):
            raise ValueError(
                f"a shortcut's map stands in for blocks; got the edit {type(self.map).__name__}, "
                "which changes what they compute: give it to sites=."
            )
        check_site(f"block.{self.source}", self.map)

    def __getitem__(self, site: str) -> Site:
        if site not in self._sites():
            raise KeyError(site)
        return self.map if site == f"block.{self.source}" else Identity()

    def __iter__(self) -> Iterator[str]:
        return iter(self._sites())

    def __len__(self) -> int:
        return self.target - self.source

    def _sites(self) -> list[str]:
        return [f"block.{i}" for i in range(self.source, self.target)]
