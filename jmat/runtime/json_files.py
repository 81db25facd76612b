"""Reads JSON files that other people wrote, or refuses them in one sentence."""

import json
import pathlib

from jmat.runtime.annotations import JsonObject

# of any config or index that there is; the worst content of so many takes 0.5 GB to parse
_MOST_BYTES = 1 << 24


def read_json_object(path: pathlib.Path, *, most_bytes: int = _MOST_BYTES) -> JsonObject:
    """Returns the JSON object that a file of at most so many bytes (by default 16 MiB)
    holds.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is too large, or not UTF-8, or no JSON, or nested too deeply,
        or holds no object; the message is what follows "FILE" in a sentence.
    """
    size = path.stat().st_size
    if size > most_bytes:
        raise ValueError(
            f"is too large: it has {size} bytes, and no such file needs more than {most_bytes}"
        )
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"holds a {type(content).__name__}; expected an object")
    return content
