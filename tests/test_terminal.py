"""Nothing out of a file reaches the terminal as a command: names, values, tokens and
messages are written out.
"""

import io
import json
import logging
import signal
import struct
import sys
import time

import absl.logging
import numpy as np
import pytest
import safetensors.numpy
import torch

from experiments import cli
from jmat import models
from jmat.checkpoint import load_model
from jmat.data import load_examples
from jmat.maps.files import read_maps
from jmat.runtime.errors import printable
from jmat.runtime.progress import track
from jmat.runtime.stopping import lasting_interrupts
from tests import hf

EVIL = "x\x1b[31mRED\x1b]0;title\x07\u202e\x9b2J\r"
CONTROL = [
    chr(code)
    for code in (*range(9), *range(11, 32), *range(127, 160), 0x2028, 0x202E, 0x2066, 0xD800)
]


def test_control_characters_are_written_out():
    assert printable(EVIL) == r"x\x1b[31mRED\x1b]0;title\x07\u202e\x9b2J\r"
    assert all(printable(character).startswith("\\") for character in CONTROL)
    assert printable("Käse, 猫 🐈, é\n\t→") == "Käse, 猫 🐈, é\n\t→"
    assert printable("two\nlines", lines=False) == r"two\nlines"


def is_clean(text):
    return not any(character in text for character in CONTROL) and "\n" not in text


@pytest.fixture(scope="module")
def gpt2_model():
    return hf.make(hf.gpt2("terminal"))


def bad_tensor_name(folder, model):
    hf.rewrite(folder, model, lambda tensors: {**tensors, EVIL: torch.zeros(1)})


def bad_prefix(folder, model):
    hf.rewrite(folder, model, lambda tensors: {**tensors, f"wte.weight\n{EVIL}": torch.zeros(1)})


def bad_field(folder, model):
    hf.rewrite(folder, model, **{EVIL: 1, "n_layer": EVIL})


def bad_type(folder, model):
    hf.rewrite(folder, model, model_type=EVIL)


def bad_rotary(folder, model):
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "rope_parameters": {EVIL: 1}})
    )


def bad_shard(folder, model):
    model.config.save_pretrained(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": EVIL}}))


def bad_gguf(folder, model):
    def text(value):
        return struct.pack("<Q", len(value.encode())) + value.encode()

    fields = (
        text("general.architecture")
        + struct.pack("<I", 8)
        + text(EVIL)
        + (text(EVIL) + struct.pack("<IB", 0, 1)) * 2
    )
    (folder / "model.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 3) + fields)


@pytest.mark.parametrize(
    "spoil",
    [bad_tensor_name, bad_prefix, bad_field, bad_type, bad_rotary, bad_shard, bad_gguf],
    ids=lambda f: f.__name__,
)
def test_messages_about_checkpoints_are_printable(spoil, gpt2_model, tmp_path):
    spoil(tmp_path, gpt2_model)
    with pytest.raises((ValueError, FileNotFoundError), match=r"\\x1b\[31mRED") as caught:
        load_model(tmp_path)
    assert is_clean(str(caught.value))


def test_messages_about_maps_and_examples_are_printable(tmp_path):
    described = {EVIL: {"shape": [2, 2], "bias": False}}
    info = {
        "model": "m",
        "model_hash": "h",
        "protocol": "p",
        "corpus": "c",
        "n": 1,
        "seed": 0,
        "dtype": "float32",
    }
    (tmp_path / "maps.json").write_text(json.dumps({**info, "maps": described}))
    safetensors.numpy.save_file(
        {EVIL: np.full((2, 2), np.nan, np.float32)}, tmp_path / "maps.safetensors"
    )
    np.savez(tmp_path / f"{EVIL}.npz", a=np.zeros(2, np.int32))
    for read in (lambda: read_maps(tmp_path), lambda: load_examples(tmp_path / f"{EVIL}.npz")):
        with pytest.raises(ValueError, match=r"x1b") as caught:
            read()
        assert is_clean(str(caught.value))


def test_logged_names_are_printable(caplog, gpt2_model, tmp_path):
    models.config_from_hf({"model_type": "gpt2", EVIL: 1})
    load_model(hf.rewrite(tmp_path, gpt2_model, lambda t: {**t, f"v_head.{EVIL}": torch.zeros(1)}))
    assert len(caplog.messages) == 2
    assert all(is_clean(message) and "RED" in message for message in caplog.messages)


def test_scripts_print_nothing_that_a_terminal_obeys(monkeypatch, capsys):
    """Tables, what is said, what is logged, and the error at the end."""

    def main(argv):
        print(f"a table\twith {EVIL}\nand a second line")
        cli.say(f"saying {EVIL}")
        logging.getLogger("jmat").warning("logging %s", EVIL)
        raise ValueError(f"error with {EVIL}\nand a second line")

    handler = absl.logging.get_absl_handler()
    formatter, before = handler.formatter, sys.stdout
    monkeypatch.setattr(cli.app, "run", lambda guarded, **_: guarded(["script"]))
    try:
        with pytest.raises(SystemExit):
            cli.run(main)
        record = logging.LogRecord("jmat", logging.WARNING, "", 0, "logging %s", (EVIL,), None)
        logged = handler.format(record)
    finally:
        handler.setFormatter(formatter)
    assert sys.stdout is before
    printed, said = capsys.readouterr()
    assert printed == f"a table\twith {printable(EVIL)}\nand a second line\n"
    assert said.splitlines()[0] == f"· saying {printable(EVIL)}"
    assert said.splitlines()[-1] == rf"error: error with {printable(EVIL)}\nand a second line"
    assert is_clean(logged)


def test_progress_shows_names_as_they_are(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    assert list(track(range(2), f"[red]{EVIL}")) == [0, 1]
    assert "[red]x" in stream.getvalue()
    assert "\x1b]0;" not in stream.getvalue()


def test_messages_are_said_once(monkeypatch):
    kept = logging.NullHandler()
    monkeypatch.setattr(logging.root, "handlers", [kept, logging.StreamHandler()])
    cli.drop_plain_handlers()
    assert logging.root.handlers == [kept]


def test_ctrl_c_that_python_drops_comes_again(capfd, monkeypatch, request):
    class Dropping:
        def __init__(self, error):
            self.error = error

        def __del__(self):
            raise self.error

    dropped = []
    monkeypatch.setattr(sys, "unraisablehook", lambda seen: dropped.append(seen.exc_type))
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # processes of pytest ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    def interrupted():
        with lasting_interrupts():
            Dropping(KeyboardInterrupt())
            time.sleep(5)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert dropped == []
    with lasting_interrupts():
        Dropping(ValueError())
    Dropping(KeyboardInterrupt())
    assert dropped == [ValueError, KeyboardInterrupt]
    assert capfd.readouterr() == ("", "")
