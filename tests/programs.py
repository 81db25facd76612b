"""Counts the programs that the forward pass has compiled."""

from jmat.models import stack


def programs() -> int:
    """Returns how many programs the stages of models (`jmat.models.stack`) have
    compiled so far.
    """
    return sum(
        value._cache_size() for value in vars(stack).values() if hasattr(value, "_cache_size")
    )
