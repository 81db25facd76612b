"""Cuts a text file into pieces of equal length instead of lines, as arXiv 2405.12250
does with enwik8.

Its public code cuts the file into pieces of 512 characters, wherever words or sentences
end, and draws 128 of them with Python's `random.sample` after `random.seed(0)`. The
pieces to fit on here are the same ones for the same seed; those to evaluate on, which
the paper does not have, are drawn from the rest.
"""

import os
import random

from jmat.runtime.files import file_text


def draw_pieces(
    path: str | os.PathLike[str], length: int, num_fit: int, num_eval: int, seed: int
) -> tuple[list[str], list[str]]:
    """Returns pieces of a text file to fit on, and others to evaluate on, in the order
    drawn.

    Args:
      path: of the file; a scrap at its end that is shorter than a piece is left out.
      length: characters of a piece.
      num_fit: how many to fit on.
      num_eval: how many to evaluate on.
      seed: of the draw.

    Raises:
      FileNotFoundError, ValueError: as `jmat.runtime.files.file_text`; or there are
        fewer pieces.
    """
    if min(length, num_fit, num_eval) < 1:
        raise ValueError(f"{length=}, {num_fit=}, {num_eval=}: each must be at least 1.")
    text = file_text(path)
    count = len(text) // length
    if count < num_fit + num_eval:
        raise ValueError(
            f"{path} has {count} pieces of {length} characters, but num_fit={num_fit} and "
            f"num_eval={num_eval} were asked for: ask for fewer or shorter ones, or give more text."
        )
    generator = random.Random(seed)
    fit = generator.sample(range(count), num_fit)
    rest = sorted(set(range(count)).difference(fit))
    held_out = generator.sample(rest, num_eval)
    fit_pieces, eval_pieces = (
        [text[place * length : (place + 1) * length] for place in places]
        for places in (fit, held_out)
    )
    return fit_pieces, eval_pieces
