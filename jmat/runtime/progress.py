"""Progress bars on standard error, for work that takes long."""

from collections.abc import Iterable
from typing import TypeVar

import rich.console
import rich.markup
import rich.progress

from jmat.runtime import hosts
from jmat.runtime.errors import printable

Item = TypeVar("Item")


def track(items: Iterable[Item], description: str | None, *, total: int | None = None) -> Iterable[Item]:
    """The items, with a bar that shows how many are done and the time left; no bar where there is no description.

    `total` says how many, where the items do not know it. Of several processes only the first shows bars.
    """
    if description is None or not hosts.is_first():
        return items
    console = rich.console.Console(stderr=True)
    shown = rich.markup.escape(printable(description, lines=False))
    return rich.progress.track(items, description=shown, total=total, console=console)
