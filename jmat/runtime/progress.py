"""Progress bars, for work that takes long: on standard error, or as one line of a
notebook.
"""

import html
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar

import rich.console
import rich.markup
import rich.progress

from jmat.runtime import hosts
from jmat.runtime.errors import printable

Item = TypeVar("Item")

_NOTEBOOK_SHELLS = ("ZMQInteractiveShell", "Shell")  # of Jupyter, and of Colab
_PAUSE = 0.2  # seconds between two changes of a bar in a notebook


def track(
    items: Iterable[Item], description: str | None, *, total: int | None = None
) -> Iterable[Item]:
    """Returns the items, with a bar that shows how many are done and the time left.

    In a notebook the bar is one line of HTML, which keeps its last state where the
    notebook is exported. Of several processes only the first shows bars.

    Args:
      items: the work.
      description: the words of the bar; None: no bar.
      total: number of items, where they do not know it.
    """
    if description is None or not hosts.is_first():
        return items
    words = printable(description, lines=False)
    if _in_notebook():
        return _tracked_in_notebook(items, words, total)
    console = rich.console.Console(stderr=True)
    return rich.progress.track(
        items, description=rich.markup.escape(words), total=total, console=console
    )


def _in_notebook() -> bool:
    """Returns whether this code runs in a notebook; IPython is not imported for it."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return type(shell).__name__ in _NOTEBOOK_SHELLS


def _tracked_in_notebook(items: Iterable[Item], words: str, total: int | None) -> Iterator[Item]:
    """Yields the items, and shows how many are done in one output that is updated in
    place.
    """
    from IPython.display import HTML, display

    size = len(items) if total is None and isinstance(items, Sized) else total
    began = shown = time.monotonic()
    bar: Any = display(HTML(_bar(words, 0, size, 0.0)), display_id=True)
    done = 0
    try:
        for done, item in enumerate(items, start=1):
            yield item
            if time.monotonic() - shown > _PAUSE:
                shown = time.monotonic()
                bar.update(HTML(_bar(words, done, size, shown - began)))
    finally:
        bar.update(HTML(_bar(words, done, size, time.monotonic() - began)))


def _bar(words: str, done: int, total: int | None, seconds: float) -> str:
    """Returns a bar as HTML. `seconds` is the time since the start."""
    bar = "" if total is None else f'<progress value="{done}" max="{max(total, 1)}"></progress> '
    count = f"{done}" if total is None else f"{done} of {total}"
    return f"<div>{bar}{html.escape(words)}: {count}, {seconds:.1f} s</div>"
