"""Examples: what they must be, and their files."""

import io
import zipfile

import numpy as np
import pytest

from jmat.data import Examples, Split, check_tokens, load_examples, save_examples
from jmat.data.examples import count_shared
from tests.memory import peak_of
from tests.splits import make_split


def test_split_knows_its_sentences():
    split = make_split([3, 1, 4], [2, 0, 3])
    assert (split.num_sentences, split.num_examples) == (3, 3)
    assert split.starts.tolist() == [0, 3, 4]
    assert split.rows.tolist() == [0, 1, 2]
    assert split.rows.dtype == np.int32


@pytest.mark.parametrize(
    ("lengths", "positions", "rows", "message"),
    [
        ([3, 0], [0, 0], None, "sentence 1 has no tokens"),
        ([3, 2], [0, 2], None, "example 1 is at position 2 of a sentence of 2 tokens"),
        ([3, 2], [-1, 0], None, "example 0 is at position -1"),
        ([3, 2], [0], None, "1 positions for 2 rows"),
        ([3, 2], [0, 1, 1], [0, 1, 2], "example 2 is in sentence 2 of 2"),
    ],
)
def test_split_refuses_arrays_that_contradict_one_another(lengths, positions, rows, message):
    with pytest.raises(ValueError, match=message):
        make_split(lengths, positions, rows)


def test_split_refuses_lengths_that_do_not_add_up():
    with pytest.raises(ValueError, match="add up to 5, for 6 tokens"):
        Split(np.zeros(6, np.int32), np.array([3, 2], np.int32), np.zeros(2, np.int32))


@pytest.mark.parametrize(
    ("ids", "message"), [([1, 11, 12], "id 12 at place 2 .* 0 .. 9"), ([3, -1], "id -1 at place 1")]
)
def test_token_ids_outside_the_vocabulary_are_refused(ids, message):
    check_tokens(np.array([0, 9]), 10)
    with pytest.raises(ValueError, match=message):
        check_tokens(np.array(ids), 10)


# Files


@pytest.mark.parametrize("rows", [None, [0, 0, 2]])
def test_examples_survive_the_disk(tmp_path, rows):
    examples = Examples(
        fit=make_split([3, 1, 4], [2, 0, 3]), eval=make_split([5, 6, 2], [1, 4, 1], rows, seed=1)
    )
    path = tmp_path / "examples.bin"  # the name is taken as it is
    save_examples(path, examples)
    with np.load(path) as file:
        assert set(file.files) == {
            f"{p}_{f}" for p in ("fit", "eval") for f in ("tokens", "lengths", "positions")
        } | ({"eval_rows"} if rows else set())
    loaded = load_examples(path)
    for part in ("fit", "eval"):
        for field in ("tokens", "lengths", "positions", "rows"):
            after, before = (
                getattr(getattr(loaded, part), field),
                getattr(getattr(examples, part), field),
            )
            np.testing.assert_array_equal(after, before)
            assert after.dtype == np.int32


def written(tmp_path, **changes):
    arrays = {
        f"{part}_{field}": np.array(values, np.int32)
        for part in ("fit", "eval")
        for field, values in (("tokens", [5, 6, 7]), ("lengths", [2, 1]), ("positions", [1, 0]))
    }
    arrays = {name: value for name, value in (arrays | changes).items() if value is not None}
    np.savez(tmp_path / "examples.npz", **arrays)
    return tmp_path / "examples.npz"


def test_sentences_in_both_parts_are_counted():
    tokens = np.array([1, 2, 3, 1, 2, 4, 1], np.int32)
    fit = Split(tokens, np.array([3, 2, 2], np.int32), np.zeros(3, np.int32))  # 123, 12, 41
    held_out = Split(
        np.array([1, 2, 1, 1, 2, 4, 1], np.int32),
        np.array([2, 1, 2, 2], np.int32),
        np.zeros(4, np.int32),
    )
    assert count_shared(Examples(fit, held_out)) == 3  # 12, 12 and 41, but not 1
    assert count_shared(Examples(fit, fit)) == 3


def test_int64_is_read_as_int32(tmp_path):
    assert (
        load_examples(written(tmp_path, fit_tokens=np.array([5, 6, 7]))).fit.tokens.dtype
        == np.int32
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fit_lengths": None, "fit_positions": None}, "fit_lengths, fit_positions missing; found"),
        ({"eval_tokens": np.array([5.0, 6.0, 7.0])}, r"eval: an array is float64\[3\]"),
        ({"eval_tokens": np.array([[5, 6, 7]])}, r"eval: an array is int64\[1, 3\]"),
        ({"fit_tokens": np.array([5, 6, 2**31])}, "fit: a number does not fit int32"),
        ({"fit_tokens": np.array([5, 6])}, "fit: the lengths add up to 3, for 2 tokens"),
        (
            {"fit_positions": np.array([2, 0])},
            "fit: example 0 is at position 2 of a sentence of 2 tokens",
        ),
        ({"eval_rows": np.array([0, 7])}, "eval: example 1 is in sentence 7 of 2"),
        ({"fit_tokens": np.array([{}, {}, {}], object)}, "not a readable .npz"),
    ],
)
def test_invalid_examples_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        load_examples(written(tmp_path, **changes))
    assert "examples.npz" in str(error.value)


def test_damaged_files_are_refused(tmp_path):
    path = written(tmp_path)
    whole = path.read_bytes()
    for size in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="not a readable"):
            load_examples(path)
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(ValueError, match="not a readable"):
        load_examples(tmp_path / "one.npy")
    with pytest.raises(FileNotFoundError, match="no examples file"):
        load_examples(tmp_path / "missing.npz")


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = written(tmp_path)
    whole = path.read_bytes()

    def full(file, **arrays):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(OSError, match="disk is full"):
        save_examples(path, load_examples(path))
    assert path.read_bytes() == whole
    assert list(tmp_path.iterdir()) == [path]


def npz_with(path, name, shape, zeros):
    """Adds an array to an .npz: a header of this shape, then so many bytes of zeros."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<i4", "fortran_order": False, "shape": shape}
    )
    with (
        zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive,
        archive.open(f"{name}.npy", "w") as part,
    ):
        part.write(header.getvalue())
        for _ in range(zeros >> 20):
            part.write(bytes(1 << 20))


def test_arrays_that_are_not_known_are_not_unpacked(tmp_path, gpt2_examples):
    path = tmp_path / "examples.npz"
    save_examples(path, gpt2_examples)
    before = peak_of(lambda: load_examples(path))
    npz_with(path, "junk", (2**24,), 2**26)
    assert peak_of(lambda: load_examples(path)) < before + 2**20


def test_arrays_that_announce_more_than_the_file_can_hold_are_refused(tmp_path, gpt2_examples):
    def refused(message):
        with pytest.raises(ValueError, match=message):
            load_examples(path)

    path = tmp_path / "bomb.npz"
    npz_with(path, "fit_tokens", (3 << 23,), 3 << 25)  # 100 MB of zeros in 100 kB
    assert peak_of(lambda: refused("it announces 100663")) < 2**22
    liar = tmp_path / "liar.npz"
    np.savez(
        liar,
        **{
            f"{s}_{f}": np.ones(1, np.int32)
            for s in ("fit", "eval")
            for f in ("lengths", "positions")
        },
    )
    npz_with(liar, "fit_tokens", (2**40,), 1 << 20)
    path = liar
    assert (
        peak_of(lambda: refused("an array announces 4398046511104 bytes, and 1048576 follow"))
        < 2**22
    )
    content = bytearray((tmp_path / "bomb.npz").read_bytes())
    place = content.rindex(b"PK\x01\x02") + 24  # the size in the zip's directory
    content[place : place + 4] = (1000).to_bytes(4, "little")
    path = tmp_path / "small.npz"
    path.write_bytes(content)
    assert peak_of(lambda: refused("not a readable")) < 2**22


def test_constant_arrays_shrink_a_thousandfold_and_load(tmp_path):
    split = Split(*(np.full(2**19, value, np.int32) for value in (7, 1, 0)))
    save_examples(tmp_path / "constant.npz", Examples(split, split))
    assert (tmp_path / "constant.npz").stat().st_size * 300 < 6 * split.tokens.nbytes
    assert load_examples(tmp_path / "constant.npz").fit.num_examples == 2**19
