"""What other libraries' exceptions say, in one line of ours."""


def first_line(error: Exception) -> str:
    """The first line of the message, or the kind of error where there is none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def in_one_line(error: BaseException) -> str:
    """All of the message, at most 300 characters, or the kind of error where there is none."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def shortened(value: object, most: int = 120) -> str:
    """What `repr` gives, cut after `most` characters: a value of a file may be of any length."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"
