"""Decides whether the activations of a fit are stored, or only their moments are
summed.
"""

from jmat.runtime.threads import MOST_AT_ONCE

# So many bytes are always fine for activations.
FINE = 4e9


def memory_of_activations(tokens: int, width: int, layers: int) -> int:
    """Returns the bytes that `jmat.maps.jumps.fit_jumps` needs, float32.

    They hold h_0 .. h_L on the host; on the device, the sources that are factorised at
    a time, their Q, and one target.
    """
    return 4 * tokens * width * (layers + 1 + 2 * min(MOST_AT_ONCE, layers) + 1)


def choose_route(activations: int, moments: int) -> tuple[str, str]:
    """Returns (`memory` or `streaming`, why), by the bytes that each needs."""
    stored, summed = bytes_in_words(activations), bytes_in_words(moments)
    if activations <= moments:
        return (
            "memory",
            f"activations take {stored}, not more than the {summed} of their statistics",
        )
    if activations <= FINE:
        return (
            "memory",
            f"activations take {stored}, their statistics {summed}: up to {bytes_in_words(FINE)} "
            "are stored",
        )
    return (
        "streaming",
        f"activations take {stored}, their statistics {summed}, however long the text is",
    )


def bytes_in_words(size: float | int) -> str:
    """Returns bytes in words: 1.5 GB, 20 MB, 300 kB."""
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if size >= unit:
            return f"{size / unit:.{1 if unit == 1e9 else 0}f} {name}"
    return f"{size / 1e3:.0f} kB"
