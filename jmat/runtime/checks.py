"""Checks settings that the user gives, with one sentence for all that are wrong in the same way."""

from collections.abc import Collection


def check_choice(setting: str, value: object, valid: Collection[str]) -> None:
    """Raises ValueError for a setting that is none of the valid ones."""
    if value not in valid:
        raise ValueError(f"{setting}={value!r}: expected one of {', '.join(valid)}.")


def check_whole(setting: str, value: object, low: int, high: int | None = None) -> None:
    """Raises ValueError for a setting that is no whole number from `low` to `high` (None: any)."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high):
        return
    limits = f"of at least {low}" if high is None else f"from {low} to {high}"
    raise ValueError(f"{setting}={value!r}: expected a whole number {limits}.")
