"""A thousand damaged and hostile tokenizer files: each loads and reads text, or is
refused in one sentence.
"""

import json
import random
import resource
import time

import pytest

from jmat.checkpoint.tokenizer import load_tokenizer
from jmat.data import encoding
from tests import llama_tokenizer
from tests.test_reference import REFERENCE

COUNT = 1000
SECONDS, KILOBYTES = 5.0, 500_000
TEXTS = ["Return the sum of two arrays, naïve 12.", "word " * 60 + "(more).", "a" * 300]
NUMBERS = [
    2**31,
    2**32 - 1,
    2**32,
    2**63,
    2**64,
    10**30,
    -1,
    -(2**63),
    1e308,
    float("inf"),
    0,
    1 << 40,
]
VALUES = [
    "huge",
    None,
    True,
    [],
    {},
    "x",
    "",
    3,
    -1,
    2.5,
    [[]],
    {"type": "x"},
    "\ud800",
    "\0",
    ["a"] * 3,
]
PATTERNS = [
    *(r"(a+)+$", r"(\w+\s?)*$", r"(?=", "[", r"(.*)*\1", r"(?<=a*)b", "", r"\p{L}" * 2000),
    *("(" * 20 + "a*" + ")*" * 20 + "b", r"a{1,100000}{1,1000}", r"(a|aa)+$", r"(?:(?:\s*\w*)*)*!"),
]


def places(value, at=()):
    """Where the parts of a JSON value are; of a vocabulary only the first entries."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in list(keys)[:30]:
        yield (*at, key)
        yield from places(value[key], (*at, key))


def flipped(text, rng):
    content = bytearray(text.encode())
    for _ in range(rng.choice([1, 1, 3, 20])):
        content[rng.randrange(len(content))] = rng.randrange(256)
    return bytes(content)


def truncated(text, rng):
    return text.encode()[: rng.randrange(len(text))]


def changed(text, rng):
    """One part deleted, of another type, or a number out of all bounds."""
    whole = json.loads(text)
    *path, last = rng.choice(list(places(whole)))
    part = whole
    for key in path:
        part = part[key]
    if rng.random() < 0.3:
        del part[last]
    else:
        part[last] = rng.choice(NUMBERS if rng.random() < 0.4 else VALUES)
    return _json(whole)


def exploding(text, rng):
    """A regular expression that may take exponential time, many steps one in the other,
    or room without end.
    """
    whole, pattern = json.loads(text), {"Regex": rng.choice(PATTERNS)}
    split = {
        "type": "Split",
        "pattern": pattern,
        "behavior": "Isolated",
        "invert": rng.random() < 0.5,
    }
    nested = {"type": "Sequence", "normalizers": []}
    for _ in range(rng.choice([3, 100, 400])):
        nested = {"type": "Sequence", "normalizers": [nested]}
    padding = {
        "strategy": {"Fixed": rng.choice(NUMBERS)},
        "direction": "Right",
        "pad_to_multiple_of": 1 << 50,
    }
    whole |= rng.choice(
        [
            {"pre_tokenizer": split},
            {
                "normalizer": {
                    "type": "Replace",
                    "pattern": pattern,
                    "content": "x" * rng.choice([0, 1, 10_000]),
                }
            },
            {
                "pre_tokenizer": {
                    "type": "Sequence",
                    "pretokenizers": [split, whole["pre_tokenizer"] or split],
                }
            },
            {"normalizer": nested},
            {"padding": padding | {"pad_id": 0, "pad_type_id": 0, "pad_token": "x"}},
        ]
    )
    return _json(whole)


def _json(whole):
    return json.dumps(whole).replace('"huge"', 5000 * "9").encode()


@pytest.fixture(scope="module")
def sources():
    """The files of three tokenizers: byte-level BPE, WordPiece and LLaMA's BPE."""
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    llama = ("llama", llama_tokenizer.llama().to_str(), json.dumps(names))
    folders = {family: REFERENCE / family for family in ("gpt2", "bert")}
    files = ("tokenizer.json", "tokenizer_config.json")
    return [
        llama,
        *(
            (family, *((folder / name).read_text() for name in files))
            for family, folder in folders.items()
        ),
    ]


@pytest.mark.slow
def test_mutated_tokenizers_load_or_are_refused_in_one_sentence(sources, tmp_path, capfd):
    kept = refused = 0
    for number in range(COUNT):
        rng = random.Random(number)
        family, tokenizer, config = rng.choice(sources)
        mutate = rng.choice([flipped, truncated, changed, changed, changed, exploding])
        contents = {"tokenizer.json": tokenizer.encode(), "tokenizer_config.json": config.encode()}
        name = (
            "tokenizer_config.json"
            if mutate is not exploding and rng.random() < 0.25
            else "tokenizer.json"
        )
        contents[name] = mutate(contents[name].decode(), rng)
        contents["config.json"] = json.dumps({"model_type": family}).encode()
        for file, content in contents.items():
            (tmp_path / file).write_bytes(content)
        began, before = time.process_time(), _peak()
        try:
            loaded = load_tokenizer(tmp_path)
            encoding.encode(TEXTS, loaded, 64, encoding.special_tokens(loaded, masked=False))
            kept += 1
        except (ValueError, OSError) as error:
            message = str(error)
            assert "\n" not in message.strip(), (number, message)
            assert len(message) < 500, (number, message)
            refused += 1
        assert time.process_time() - began < SECONDS, number
        assert _peak() - before < KILOBYTES, number
    assert kept > 100
    assert refused > 400
    assert "panicked" not in capfd.readouterr().err


def _peak():
    """The most memory that this process has held so far, in kB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
