"""Progress bars on standard error, for work that takes long."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import rich.console
import rich.progress

from jmat import hosts

Item = TypeVar("Item")


def track(items: Sequence[Item], description: str | None) -> Iterable[Item]:
    """The items, with a bar that shows how many are done and the time left; no bar where there is no description.

    Of several processes only the first shows bars.
    """
    if description is None or not hosts.is_first():
        return items
    console = rich.console.Console(stderr=True)
    return rich.progress.track(items, description=description, console=console)
