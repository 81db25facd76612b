"""Pickles of PyTorch and NumPy are read without either running: what they hold is what
torch and numpy read, and whatever else is in one ends in one sentence, soon, in little
memory.
"""

import io
import os
import pickle
import re
import struct
import time
import zipfile

import ml_dtypes
import numpy as np
import pytest
import torch

from jmat.checkpoint.torch_files import read_torch, tensor_values
from jmat.checkpoint.torch_writing import write_torch
from tests.memory import peak_of

LINEAR = torch.nn.Linear(3, 2)
MATRIX = torch.arange(12.0).reshape(3, 4) - 5


def plain(value, path):
    """What a file holds, tensors as arrays."""
    if isinstance(value, dict):
        return {key: plain(each, path) for key, each in value.items()}
    if isinstance(value, list):
        return [plain(each, path) for each in value]
    values = tensor_values(value, path)
    return value if values is None else values


def expected(value):
    if isinstance(value, dict):
        return {key: expected(each) for key, each in value.items()}
    if isinstance(value, list):
        return [expected(each) for each in value]
    if isinstance(value, torch.Tensor):
        return value.detach().float().numpy()
    return np.asarray(value, np.float32) if isinstance(value, np.ndarray) else value


CONTENTS = {
    "one tensor": MATRIX,
    "a lens": {"J": {0: MATRIX.half(), 1: MATRIX.T.bfloat16()}, "n_prompts": 3, "about": [None, "x", 1.5, True]},
    "a piece of another": {"a": MATRIX[1:, ::2].double(), "b": torch.zeros(0, 3), "c": torch.tensor(4.0)},
    "parameters of a module": LINEAR.state_dict(),
    "a pair": [MATRIX.double(), MATRIX[:, :1]],
}  # fmt: skip
WAYS = {
    "torch.save": lambda content, path: torch.save(content, path),
    "old torch.save": lambda content, path: torch.save(
        content, path, _use_new_zipfile_serialization=False
    ),
    **{
        f"pickle {protocol}": lambda content, path, protocol=protocol: path.write_bytes(
            pickle.dumps(content, protocol=protocol)
        )
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_what_torch_writes_is_read(way, tmp_path):
    path = tmp_path / "file"
    for name, content in CONTENTS.items():
        WAYS[way](content, path)
        found, wanted = plain(read_torch(path), path), expected(content)
        np.testing.assert_equal(found, wanted, err_msg=name)
        if isinstance(content, dict):
            assert list(found) == list(wanted)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_arrays_of_numpy_are_read(protocol, tmp_path):
    rng, path = np.random.default_rng(0), tmp_path / "file"
    arrays = [
        rng.normal(size=(4, 5)),
        np.asfortranarray(rng.normal(size=(4, 5)).astype(np.float32)),
        np.arange(3).astype(">f2"),
        np.zeros((0, 2)),
    ]
    path.write_bytes(pickle.dumps(arrays, protocol=protocol))
    np.testing.assert_equal(plain(read_torch(path), path), expected(arrays))


def test_what_we_write_is_read_by_torch_and_by_us(tmp_path):
    path = tmp_path / "file"
    values = MATRIX.numpy()
    content = {
        "J": {0: values.astype(np.float16), 70000: values.astype(ml_dtypes.bfloat16)},
        "d": values.astype(np.float64).T,
        "n": [-3, 2**40, 0, 255, 1.5, None, True, False, "ä", [], {}],
    }
    write_torch(path, content)
    for mapped in (False, True):
        found = torch.load(path, weights_only=True, mmap=mapped)
        assert found["J"][0].dtype == torch.float16
        assert found["J"][70000].dtype == torch.bfloat16
        assert found["d"].dtype == torch.float64
        np.testing.assert_equal(expected(found), expected(content))
        assert found["n"] == content["n"]
    np.testing.assert_equal(plain(read_torch(path), path), expected(content))
    first = path.read_bytes()
    write_torch(path, content)
    assert path.read_bytes() == first
    with zipfile.ZipFile(path) as archive:
        offsets = [entry.header_offset for entry in archive.infolist()]
    for offset in offsets:  # bytes of members begin at multiples of 64
        name, extra = struct.unpack_from("<HH", first, offset + 26)
        assert (offset + 30 + name + extra) % 64 == 0
    with pytest.raises(ValueError, match="cannot hold an array of int32"):
        write_torch(path, np.zeros(3, np.int32))


# --- hostile files --------------------------------------------------------------------------------


class Call:
    """What a pickle calls when it is loaded by Python's own machine."""

    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return (self.function, self.args)


def zipped(pickled, members=(), **options):
    """A zip as torch.save writes it, of a pickle and the bytes of storages."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **options) as archive:
        archive.writestr("archive/data.pkl", pickled)
        for name, content in dict(members).items():
            archive.writestr(f"archive/{name}", content)
    return file.getvalue()


def tensor(shape, strides, offset=0, count=4, key="0", kind="FloatStorage", hooks=()):
    """A pickle with one tensor in a storage, written by Python's own pickler."""

    class Storage:
        pass

    file = io.BytesIO()
    pickler = pickle.Pickler(file, 2)
    storage = Storage()
    pickler.persistent_id = lambda each: (
        ("storage", getattr(torch, kind), key, "cpu", count) if each is storage else None
    )
    pickler.dump(
        Call(torch._utils._rebuild_tensor_v2, storage, offset, shape, strides, False, hooks)
    )
    return file.getvalue()


FOUR = {"data/0": np.arange(4, dtype=np.float32).tobytes()}

GOOD = zipped(tensor((2, 2), (2, 1)), FOUR)


def many_tensors(count):
    """A table of so many tensors, all of one storage."""
    one = tensor((1000, 1000), (1000, 1), count=10**6)[2:-1]
    return zipped(b"\x80\x02](" + one * count + b"e.", {"data/0": bytes(4 * 10**6)})


def nested_key():
    """A dict whose key takes 2^20 steps to hash."""
    return b"\x80\x02})" + b"q\x00h\x00\x86" * 20 + b"Ns."


def overlapping():
    """A zip of a hundred members that are the same bytes."""
    content = bytearray(
        zipped(tensor((2,), (1,), count=2), {f"data/{i}": bytes(8) for i in range(100)})
    )
    entries = [at for at in range(len(content)) if content[at : at + 4] == b"PK\1\2"]
    size = 4096
    for at in entries[1:]:
        struct.pack_into("<LLL", content, at + 16, 0, size, size)
        struct.pack_into("<L", content, at + 42, 0)
    return bytes(content)


def encrypted():
    content = bytearray(zipped(tensor((2, 2), (2, 1)), FOUR))
    for at in [at for at in range(len(content)) if content[at : at + 4] == b"PK\1\2"]:
        content[at + 8] |= 1
    return bytes(content)


def long_directory(wide):
    """A zip that says its list of members takes 2 GB, in 64 bits or in 32."""
    at = GOOD.index(b"PK\5\6")
    end = bytearray(GOOD[at:])
    if wide:
        record = struct.pack("<4sQHHLLQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, 1 << 31, 0)
        return GOOD[:at] + record + struct.pack("<4sLQL", b"PK\6\7", 0, at, 1) + bytes(end)
    struct.pack_into("<L", end, 12, (1 << 31) - 1)
    return GOOD[:at] + bytes(end)


def broken_value():
    content = zipped(tensor((2, 2), (2, 1)), FOUR)
    at = content.index(FOUR["data/0"])
    return content[: at + 4] + b"\x01" + content[at + 5 :]


def huge_array():
    """An array of shape (0, 2**100) and no bytes, as a pickle makes it in two steps."""
    content = pickle.dumps(np.zeros((0, 77)), protocol=2)
    small, large = b"K\x00KM\x86", b"K\x00\x8a\x0d" + (2**100).to_bytes(13, "little") + b"\x86"
    assert content.count(small) == 1
    return content.replace(small, large)


NEGATIVE = "no whole numbers of at least 0"
BEYOND = "beyond the 4 numbers"
HOSTILE = {
    "os.system": (pickle.dumps(Call(os.system, "touch sprung")), "names posix.system"),
    "os.system in a zip": (zipped(pickle.dumps(Call(os.system, "touch sprung"))), "names posix.system"),
    "eval": (pickle.dumps(Call(eval, "open('sprung', 'w')")), "names builtins.eval"),
    "getattr": (pickle.dumps(Call(getattr, "text", "upper")), "names builtins.getattr"),
    "nested getattr": (b"\x80\x04\x8c\x05torch\x8c\x0eos.path.exists\x93.", "names torch.os.path.exists"),
    "another function of torch": (b"\x80\x02ctorch\nload\n.", "names torch.load"),
    "a class of torch": (pickle.dumps(LINEAR), "names torch.nn.modules.linear.Linear"),
    "a tensor of whole numbers": (zipped(tensor((2, 2), (2, 1), kind="LongStorage"), FOUR), "names torch.LongStorage"),
    "an array of objects": (pickle.dumps(np.array([None, {}])), "another dtype 'O8' than floating point"),
    "a call of plain text": (b"\x80\x02X\x01\x00\x00\x00a)R.", "calls something that is no function"),
    "a call without arguments": (b"\x80\x02ccollections\nOrderedDict\nNR.", "calls something"),
    "new objects": (b"\x80\x02ccollections\nOrderedDict\n)\x81.", "the instruction NEWOBJ"),
    "old objects": (b"(ccollections\nOrderedDict\no.", "the instruction OBJ"),
    "an extension": (b"\x80\x02\x82\x01.", "the instruction EXT1"),
    "attributes of a list": (b"\x80\x02]}b.", "sets attributes of something that has none"),
    "attributes of a name": (b"\x80\x02cnumpy\ndtype\n}b.", "sets attributes of something that has none"),
    "attributes of a function": (b"\x80\x02c_codecs\nencode\n}b.", "sets attributes of something that has none"),
    "too many arguments": (b"\x80\x02c_codecs\nencode\nNNN\x87R.", "with other arguments than it takes"),
    "too many bytes": (b"\x80\x04\x8c\x0dtorch.storage\x8c\x10_load_from_bytes\x93NN\x86R.", "with other arguments than it takes"),
    "an ordered dict of a call": (b"\x80\x02ccollections\nOrderedDict\nN\x85R.", "in a way that no file of maps does"),
    "a reference without a zip": (tensor((2, 2), (2, 1)), "names torch.FloatStorage"),
    "a reference to something": (zipped(b"\x80\x02X\x01\x00\x00\x00aQ."), "something else than a storage"),
    "a path as a key": (zipped(tensor((2, 2), (2, 1), key="../../x"), FOUR), "lacks the member data/../../x"),
    "no such member": (zipped(tensor((2, 2), (2, 1), key="7"), FOUR), "lacks the member data/7"),
    "more than the member has": (zipped(tensor((2, 2), (2, 1), count=10**9), FOUR), "announces 4000000000 bytes"),
    "less than the member has": (zipped(tensor((1, 1), (1, 1), count=1), FOUR), "announces 4 bytes"),
    "a negative count": (zipped(tensor((2, 2), (2, 1), count=-4), FOUR), "something else than a storage"),
    "a negative size": (zipped(tensor((-2, -2), (2, 1)), FOUR), NEGATIVE),
    "a negative stride": (zipped(tensor((2, 2), (-2, 1)), FOUR), NEGATIVE),
    "a negative offset": (zipped(tensor((2, 2), (2, 1), offset=-1), FOUR), NEGATIVE),
    "sizes that are text": (zipped(tensor(("2", "2"), (2, 1)), FOUR), NEGATIVE),
    "a size that is a truth": (zipped(tensor((True, 2), (2, 1)), FOUR), NEGATIVE),
    "too many axes": (zipped(tensor((1,) * 9, (1,) * 9), FOUR), "more than 8 axes"),
    "fewer strides": (zipped(tensor((2, 2), (1,)), FOUR), "more strides than axes, or fewer"),
    "strides out of range": (zipped(tensor((2, 2), (3, 1)), FOUR), BEYOND),
    "an offset out of range": (zipped(tensor((2, 2), (2, 1), offset=1), FOUR), BEYOND),
    "large axes": (zipped(tensor((2**20, 2**20), (0, 0)), FOUR), BEYOND),
    "huge axes": (zipped(tensor((2**62, 2**62), (0, 0)), FOUR), NEGATIVE),
    "a huge stride": (zipped(tensor((1, 2, 2), (2**100, 2, 1)), FOUR), NEGATIVE),
    "a huge offset": (zipped(tensor((0, 2), (2, 1), offset=2**100), FOUR), NEGATIVE),
    "a huge axis of nothing": (zipped(tensor((0, 2**100), (1, 1)), FOUR), NEGATIVE),
    "large axes of nothing": (zipped(tensor((0, 2**40, 2**40), (1, 1, 1)), FOUR), "which is too large"),
    "a huge array of nothing": (huge_array(), NEGATIVE),
    "one number for many": (zipped(tensor((10**5, 10**5), (0, 0)), FOUR), BEYOND),
    "hooks": (zipped(tensor((2, 2), (2, 1), hooks=(1,)), FOUR), "of another kind than numbers"),
    "many tensors of one storage": (many_tensors(500), "announces more numbers than"),
    "a compressed member": (zipped(tensor((2500,), (1,), count=2500), {"data/0": bytes(10_000)}, compression=zipfile.ZIP_DEFLATED), "has a compressed member"),
    "a zip bomb": (zipped(b"\x80\x02N.", {"data/0": bytes(20_000_000)}, compression=zipfile.ZIP_DEFLATED), "has a compressed member"),
    "an encrypted member": (encrypted(), "has an encrypted member"),
    "members that overlap": (overlapping(), "overlap"),
    "a long list of members": (long_directory(False), "of more members than any file of maps has"),
    "a longer list of members": (long_directory(True), "of more members than any file of maps has"),
    "a changed number": (broken_value(), "does not have its checksum"),
    "no pickle in the zip": (zipped(b"N.").replace(b"data.pkl", b"data.pkx"), "without data.pkl"),
    "an empty pickle": (zipped(b""), "is no pickle, or a truncated one"),
    "half a zip": (GOOD[: len(GOOD) // 2], "damaged or truncated zip"),
    "an empty file": (b"", "is no pickle, or a truncated one"),
    "no pickle": (b"hello, world", "is a damaged pickle"),
    "half a pickle": (pickle.dumps(MATRIX)[:-40], "is no pickle, or a truncated one"),
    "a length beyond the file": (b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"abc", "truncated one"),
    "a place of the memo far away": (b"\x80\x02Nr\xff\xff\xff\x7f0.", "the instruction POP"),
    "a place of the memo that is empty": (b"\x80\x02h\x07.", "is a damaged pickle"),
    "an empty stack": (b"\x80\x02.", "is a damaged pickle"),
    "no mark": (b"\x80\x02t.", "is a damaged pickle"),
    "a huge whole number": (b"\x80\x02\x8b" + struct.pack("<i", 10_000) + b"\x01" * 10_000 + b".", "more than 128 bits"),
    "a key that takes forever": (nested_key(), "has a key that is neither text nor"),
    "a pickle of Git LFS": (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
    "bytes of another code": (b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00utf-7\x86R.", "in another code"),
    "bytes that are no storage": (b"\x80\x04\x8c\x0dtorch.storage\x8c\x10_load_from_bytes\x93C\x03abc\x85R.", "is a damaged pickle"),
    "too few bytes of an array": (pickle.dumps(np.zeros(4)).replace(bytes(32), bytes(24)).replace(b"C ", b"C\x18"), "and 24 bytes for it"),
}  # fmt: skip


def test_a_pickle_of_endless_values_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("jmat.checkpoint.pickles._MOST_STEPS", 500)
    path = tmp_path / "file"
    for count, fits in ((490, True), (510, False)):
        path.write_bytes(b"\x80\x02](" + b"N" * count + b"e.")
        if fits:
            assert read_torch(path) == [None] * count
        else:
            with pytest.raises(ValueError, match="holds more than 500 values"):
                read_torch(path)


def test_a_large_file_of_something_else_is_not_read(tmp_path):
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(3 << 30)  # takes no room on the disk

    def read():
        with pytest.raises(ValueError, match="is no zip, and has more than 2147483648 bytes"):
            read_torch(path)

    assert peak_of(read) < 1e6


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_end_in_one_sentence(name, tmp_path, monkeypatch):
    content, message = HOSTILE[name]
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "file"
    path.write_bytes(content)
    caught = []

    def read():
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            plain(read_torch(path), path)
        caught.append(str(error.value))

    began = time.monotonic()
    memory = peak_of(read)
    assert time.monotonic() - began < 5
    assert memory < 100e6
    assert caught[0].startswith(str(path))
    assert caught[0].count("\n") == 0
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
