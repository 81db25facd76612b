"""Checks settings that the user gives, with one sentence for all that are wrong in the
same way.
"""

import importlib.util
import operator
import os
from collections.abc import Collection, Iterable, Sequence

LARGEST_SEED = 2**32 - 1  # JAX takes 32 bits of a seed: larger ones would repeat smaller ones


def check_choice(setting: str, value: object, valid: Collection[str]) -> None:
    """Raises ValueError for a setting that is none of the valid ones."""
    if value not in valid:
        raise ValueError(f"{setting}={value!r}: expected one of {', '.join(valid)}.")


def check_whole(setting: str, value: object, low: int, high: int | None = None) -> None:
    """Raises ValueError for a setting that is no whole number from `low` to `high`
    (None: any).
    """
    if (
        isinstance(value, int)
        and not isinstance(value, bool)
        and value >= low
        and (high is None or value <= high)
    ):
        return
    limits = f"of at least {low}" if high is None else f"from {low} to {high}"
    raise ValueError(f"{setting}={value!r}: expected a whole number {limits}.")


def check_seed(value: object) -> None:
    """Raises ValueError for a seed that is out of range."""
    check_whole("seed", value, 0, LARGEST_SEED)


def check_flag(setting: str, value: object) -> None:
    """Raises ValueError for a setting that is neither True nor False, such as text,
    which would count as True.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{setting}={value!r}: expected True or False.")


def check_path(setting: str, value: object) -> None:
    """Raises ValueError for what names no file or folder."""
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"{setting}={value!r}: expected a path.")


def whole(setting: str, value: object) -> int:
    """Returns a whole number, also one of NumPy, as an int. Raises ValueError for
    anything else.
    """
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    except TypeError:  # no whole number
        pass
    raise ValueError(f"{setting}={value!r}: expected a whole number.")


def check_several(setting: str, given: object) -> None:
    """Raises ValueError for what is no list: text would count as one name a letter."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ValueError(f"{setting}={given!r}: expected a list.")


def chosen(setting: str, given: Sequence[str], valid: Sequence[str]) -> list[str]:
    """Returns the names in a list of them, each once. Raises ValueError for no name,
    and for one that is not valid.
    """
    check_several(setting, given)
    wrong = [name for name in given if name not in valid]
    if wrong or not given:
        raise ValueError(
            f"{setting} has {repr(wrong[0]) if wrong else 'no name'}; choose from "
            f"{', '.join(valid)}."
        )
    return list(dict.fromkeys(given))


def chosen_layers(given: Sequence[int | str], layers: int) -> list[int]:
    """Returns the source layers that are named, each once; all of 0 .. `layers` where
    none is.
    """
    check_several("layers", given)
    valid = [str(layer) for layer in range(layers + 1)]
    return [
        int(layer) for layer in chosen("layers", [str(layer) for layer in given] or valid, valid)
    ]


def check_number(setting: str, value: object, low: float | int) -> None:
    """Raises ValueError for a setting that is no number of at least `low`."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= low:
        raise ValueError(f"{setting}={value!r}: expected a number of at least {low}.")


def check_share(setting: str, value: object) -> None:
    """Raises ValueError for a setting that is no number from 0 to 1."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ValueError(f"{setting}={value!r}: expected a number from 0 to 1.")


def check_same_kind(name: str, causal: bool, other: str, other_causal: bool) -> None:
    """Raises ValueError for two models to be compared of which one is causal and the
    other a masked one.
    """
    if causal != other_causal:
        kinds = {True: "a causal model", False: "a masked model"}
        raise ValueError(
            f"{name} is {kinds[causal]} and {other} is {kinds[other_causal]}: they are read at "
            "different positions and predict different tokens, so nothing can be compared."
        )


def check_sklearn(work: str) -> None:
    """Raises ValueError, which says work to install, where scikit-learn is missing."""
    if importlib.util.find_spec("sklearn") is None:
        raise ValueError(f"{work} needs scikit-learn: pip install 'jmat[probe]'.")
