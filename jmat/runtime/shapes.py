"""Rounds sizes up to a few, since JAX compiles a program for every shape."""


def rung(size: int, multiple: int = 1) -> int:
    """Returns the least of 1, 2, … 8, 10, 12, 14, 16, 20, 24, … times `multiple` (four
    an octave) that holds a size.
    """
    parts = -(-size // multiple)
    step = 1 << max((parts - 1).bit_length() - 3, 0)
    return multiple * -(-parts // step) * step
