"""Damages files: bytes of any kind, numbers in headers, and JSON; the same damage for
the same seed.
"""

import copy
import json
import random
import struct

HUGE = (0, 1, -1, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**53, 2**63 - 1, 2**64 - 1)
# stands for one until the JSON is written: Python copies and writes none so deep
_DEEP = "a deep value"
# What a value of JSON becomes.
VALUES = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 2**31 - 1, 2**31, 2**40, 10**30, 0.5, 1e-50, 1e200),
    *(float("nan"), float("inf"), "", "x", "F64", "I32", "\x1b[31m", "\ud800", "a" * 5000, _DEEP),
    *([], {}, [0], [[]], {"a": 1}, [2**31, 2**31], ["x"] * 100),
)


def damaged(content: bytes, rng: random.Random, header: int) -> bytes:
    """Some bytes of a file changed, most often among the first `header` ones."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        end = min(header, len(data)) if rng.random() < 0.7 else len(data)
        at = rng.randrange(max(end, 1))
        size = rng.choice((1, 2, 4, 8, 16, 100, 1000))
        match rng.randrange(9):
            case 0 | 1:
                data[at : at + 1] = bytes(
                    [(data[at] if at < len(data) else 0) ^ 1 << rng.randrange(8)]
                )
            case 2:
                data[at : at + 1] = rng.randbytes(1)
            case 3:
                data[at : at + 8] = struct.pack("<Q", rng.choice(HUGE) % 2**64)
            case 4:
                data[at : at + 4] = struct.pack("<I", rng.choice(HUGE) % 2**32)
            case 5:
                del data[at : at + size]
            case 6:
                data[at:at] = rng.randbytes(size) if rng.random() < 0.5 else data[at : at + size]
            case 7:
                data[at : at + size] = rng.choice((b"\0", b"\xff", b"9", b"[")) * size
            case 8:
                del data[rng.randrange(len(data) + 1) :]
    return bytes(data)


def damaged_json(value: object, rng: random.Random) -> object:
    """A JSON value of which some parts are changed, left out, or doubled under another
    name.
    """
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 2, 3))):
        spots = list(_spots(value))
        if not spots:
            return rng.choice(VALUES)
        holder, key = rng.choice(spots)
        match rng.randrange(6):
            case 0:
                del holder[key]
            case 1:
                other = rng.choice(("", "x\x1b[31m", "wte.weight", "__metadata__", "hidden_size"))
                (
                    holder.__setitem__(other, holder[key])
                    if isinstance(holder, dict)
                    else holder.append(holder[key])
                )
            case 2 if isinstance(number := holder[key], int | float):
                holder[key] = rng.choice(
                    (-number, number + 1, number * 2, number * 1e6, str(number))
                )
            case 3:
                twin, name = rng.choice(spots)
                holder[key] = copy.deepcopy(twin[name])
            case _:
                holder[key] = rng.choice(VALUES)
    return value


def _spots(value):
    """Where a value or a part of it stands: the list or object, and the index or name
    there.
    """
    queue = [value]
    while queue:
        holder = queue.pop()
        keys = (
            holder
            if isinstance(holder, dict)
            else range(len(holder))
            if isinstance(holder, list)
            else ()
        )
        for key in keys:
            yield holder, key
            queue.append(holder[key])


def _written(value: object, rng: random.Random) -> bytes:
    depth = rng.choice((500, 960, 100_000))
    return json.dumps(value).replace(json.dumps(_DEEP), "[" * depth + "]" * depth).encode()


def damaged_json_text(content: bytes, rng: random.Random) -> bytes:
    """A JSON file changed as a value, or as text."""
    if rng.random() < 0.7:
        return _written(damaged_json(json.loads(content), rng), rng)
    return damaged(content, rng, len(content))


def damaged_safetensors(content: bytes, rng: random.Random) -> bytes:
    """A safetensors file changed as bytes, or in what its header says, which then has
    its new length.
    """
    size = int.from_bytes(content[:8], "little")
    if rng.random() < 0.5:
        return damaged(content, rng, size + 8)
    header = _written(damaged_json(json.loads(content[8 : 8 + size]), rng), rng)
    return struct.pack("<Q", len(header)) + header + content[8 + size :]


def damaged_zip(parts: dict[str, bytes], rng: random.Random, pack) -> bytes:
    """An .npz changed as a file, or of which one array was changed before it was
    packed.
    """
    if rng.random() < 0.4:
        content = pack(parts)
        return damaged(content, rng, len(content))
    parts = dict(parts)
    name = rng.choice(list(parts))
    parts[name] = damaged(parts[name], rng, 128)
    return pack(parts)
