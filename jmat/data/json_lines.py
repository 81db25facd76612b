"""Files of JSON lines that users write: what is wrong with one is said with the number
of its line.
"""

import json
import os
from collections.abc import Callable
from typing import TypeVar

from jmat.data.encoding import check_text
from jmat.runtime.annotations import JsonObject
from jmat.runtime.files import text_lines

Item = TypeVar("Item")


def read_json_lines(
    path: str | os.PathLike[str], parse: Callable[[JsonObject], Item], expected: str
) -> list[Item]:
    """Reads the items of a file, one JSON object a line; blank lines do not count.

    Args:
      path: of the file.
      parse: makes an item of an object, or raises ValueError or KeyError.
      expected: what a line should be, for the error.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is no UTF-8 text, holds nothing, a line is nested too deeply or
        spells half a character, or `parse` refuses one.
    """
    lines = text_lines(path)
    if not any(lines):
        raise ValueError(f"{path} is empty; expected JSON lines, {expected}.")
    items = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            fields = json.loads(line)
            if "\\u" in line:  # the only way in which JSON can spell half a character
                check_text(json.dumps(fields, ensure_ascii=False), "the text of this line")
            if not isinstance(fields, dict):
                raise ValueError("this line is not a JSON object")
            items.append(parse(fields))
        except json.JSONDecodeError:
            raise ValueError(f"{path}, line {number} is not JSON; expected {expected}.") from None
        except RecursionError:
            raise ValueError(
                f"{path}, line {number} is nested too deeply; expected {expected}."
            ) from None
        except KeyError as error:
            raise ValueError(
                f"{path}, line {number}: {error} is missing; expected {expected}."
            ) from None
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}: {str(error).rstrip('.')}; expected {expected}."
            ) from None
    return items
