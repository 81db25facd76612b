import logging

import numpy as np
import pytest

from jmat.data import (
    Examples,
    Split,
    batches,
    check_tokens,
    load_examples,
    make_examples,
    padding_waste,
    save_examples,
    tokenize,
)
from jmat.data.batching import packed
from jmat.data.tokenizers import train_bpe, train_wordpiece

TEXT = [f"The function number {n} returns {'a list of ' * (n % 7)}values for key {n * n}." for n in range(400)]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(TEXT, 400)


@pytest.fixture(scope="module")
def wordpiece():
    return train_wordpiece(TEXT, 200)


def make_split(lengths, positions=None, rows=None, seed=0):
    generator = np.random.default_rng(seed)
    lengths = np.asarray(lengths, np.int32)
    if positions is None:
        positions = generator.integers(0, lengths)
    tokens = generator.integers(1, 1000, lengths.sum()).astype(np.int32)
    rows = None if rows is None else np.asarray(rows, np.int32)
    return Split(tokens, lengths, np.asarray(positions, np.int32), *([] if rows is None else [rows]))


def realistic(num, mean=30, seed=0):
    lengths = np.random.default_rng(seed).lognormal(np.log(mean), 0.5, num)
    return make_split(np.clip(lengths, 3, 512).astype(np.int32))


# Split


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


# Files


@pytest.mark.parametrize("rows", [None, [0, 0, 2]])
def test_examples_survive_the_disk(tmp_path, rows):
    examples = Examples(fit=make_split([3, 1, 4], [2, 0, 3]), eval=make_split([5, 6, 2], [1, 4, 1], rows, seed=1))
    path = tmp_path / "examples.bin"  # the name is taken as it is
    save_examples(path, examples)
    with np.load(path) as file:
        assert set(file.files) == {f"{p}_{f}" for p in ("fit", "eval") for f in ("tokens", "lengths", "positions")} | (
            {"eval_rows"} if rows else set()
        )
    loaded = load_examples(path)
    for part in ("fit", "eval"):
        for field in ("tokens", "lengths", "positions", "rows"):
            after, before = getattr(getattr(loaded, part), field), getattr(getattr(examples, part), field)
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


def test_int64_is_read_as_int32(tmp_path):
    assert load_examples(written(tmp_path, fit_tokens=np.array([5, 6, 7]))).fit.tokens.dtype == np.int32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fit_lengths": None, "fit_positions": None}, "fit_lengths, fit_positions missing; found"),
        ({"eval_tokens": np.array([5.0, 6.0, 7.0])}, r"eval: an array is float64\[3\]"),
        ({"eval_tokens": np.array([[5, 6, 7]])}, r"eval: an array is int64\[1, 3\]"),
        ({"fit_tokens": np.array([5, 6, 2**31])}, "fit: a number does not fit int32"),
        ({"fit_tokens": np.array([5, 6])}, "fit: the lengths add up to 3, for 2 tokens"),
        ({"fit_positions": np.array([2, 0])}, "fit: example 0 is at position 2 of a sentence of 2 tokens"),
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


# Tokens


def test_causal_tokens_read_back_as_the_text(bpe):
    tokens = tokenize(TEXT, bpe, max_length=200, special_tokens=False)
    assert [bpe.decode(ids) for ids in tokens] == TEXT
    assert {ids.dtype for ids in tokens} == {np.dtype(np.int32)}


def test_long_text_is_cut_and_counted(bpe, wordpiece, caplog):
    long = "a list of values and a list of values and a list of values"
    with caplog.at_level(logging.WARNING, logger="jmat.data.sampling"):
        short, cut = tokenize(["a list.", long], wordpiece, max_length=8, special_tokens=True)
    assert "1 of 2 sentences were cut at 8 tokens" in caplog.text
    assert len(cut) == 8
    assert (cut[0], cut[-1]) == (wordpiece.cls_token_id, wordpiece.sep_token_id)
    assert len(short) < 8
    whole, first = tokenize([long], bpe, 100, special_tokens=False), tokenize([long], bpe, 4, special_tokens=False)
    np.testing.assert_array_equal(first[0], whole[0][:4])


def test_sentences_without_tokens_are_left_out(bpe, wordpiece):
    assert len(tokenize(["a list", "", "values"], bpe, 8, special_tokens=False)) == 2
    assert len(tokenize(["a list", " ", "values"], wordpiece, 8, special_tokens=True)) == 2
    assert tokenize([], bpe, 8, special_tokens=False) == []
    with pytest.raises(ValueError, match="no room for text beside 2 special tokens"):
        tokenize(TEXT, wordpiece, 2, special_tokens=True)


# Positions


def test_din2023_draws_every_position_alike(wordpiece):
    """Chi-squared over the relative position; [CLS], position 0, and [SEP] are as likely as any other."""
    sentences = ["The function returns a list of values for key 7."] * 1500
    split = make_examples(
        sentences, sentences[:1], wordpiece, protocol="din2023", max_length=64, seed=0, masked=True
    ).fit
    T = int(split.lengths[0])
    assert split.num_examples == split.num_sentences == 1500
    assert split.tokens[0] == wordpiece.cls_token_id
    assert split.tokens[T - 1] == wordpiece.sep_token_id
    counts = np.bincount(split.positions, minlength=T)
    assert ((counts - 1500 / T) ** 2 / (1500 / T)).sum() < T + 5 * np.sqrt(2 * T)


def test_din2023_gives_causal_models_no_special_token(bpe, wordpiece):
    split = make_examples(TEXT, TEXT[:9], bpe, protocol="din2023", max_length=64, seed=0, masked=False).fit
    assert bpe.decode(split.tokens[: split.lengths[0]]) == TEXT[0]
    assert (split.positions == 0).any()
    split = make_examples(TEXT, TEXT[:9], wordpiece, protocol="din2023", max_length=64, seed=0, masked=False).fit
    assert not np.isin(split.tokens, [wordpiece.cls_token_id, wordpiece.sep_token_id]).any()


def test_jmat_draws_different_eligible_positions(bpe, wordpiece):
    options = {"protocol": "jmat", "max_length": 64, "seed": 0, "positions_per_sentence": 12}
    split = make_examples([*TEXT, "T"], TEXT[:9], bpe, masked=False, **options).fit
    assert split.num_sentences == len(TEXT)  # "T" is one token, and the first is never read
    counts = np.bincount(split.rows)
    np.testing.assert_array_equal(counts, np.minimum(12, split.lengths - 1))
    assert len({*zip(split.rows.tolist(), split.positions.tolist(), strict=True)}) == split.num_examples
    assert split.positions.min() == 1

    split = make_examples(TEXT, TEXT[:9], wordpiece, masked=True, **options).fit
    read = split.tokens[split.starts[split.rows] + split.positions]
    assert not np.isin(read, [wordpiece.cls_token_id, wordpiece.sep_token_id]).any()
    assert split.positions.min() == 1

    split = make_examples(TEXT, TEXT[:9], bpe, masked=False, skip_first=3, **options).fit
    assert split.positions.min() == 3


def test_the_seed_decides_the_positions(bpe):
    def positions(seed):
        examples = make_examples(TEXT[:60], TEXT[:60], bpe, protocol="din2023", max_length=64, seed=seed, masked=False)
        return examples.fit.positions.tolist(), examples.eval.positions.tolist()

    assert positions(3) == positions(3)
    assert positions(3)[0] != positions(4)[0]
    assert positions(3)[0] != positions(3)[1]  # the same sentences: the streams are independent


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"protocol": "din2024"}, "protocol 'din2024' is unknown; choose one of din2023, jmat"),
        ({"protocol": "din2023", "positions_per_sentence": 2}, "choose protocol jmat"),
        ({"protocol": "din2023", "skip_first": 1}, "choose protocol jmat"),
        ({"protocol": "jmat", "positions_per_sentence": 0}, "positions_per_sentence=0"),
        ({"protocol": "jmat", "skip_first": 1000}, "none of the 400 fit sentences has a position"),
    ],
)
def test_settings_that_make_no_examples_are_refused(bpe, options, message):
    with pytest.raises(ValueError, match=message):
        make_examples(TEXT, TEXT, bpe, max_length=64, seed=0, masked=False, **options)


@pytest.mark.parametrize(
    ("ids", "message"), [([1, 11, 12], "id 12 at place 2 .* 0 .. 9"), ([3, -1], "id -1 at place 1")]
)
def test_token_ids_outside_the_vocabulary_are_refused(ids, message):
    check_tokens(np.array([0, 9]), 10)
    with pytest.raises(ValueError, match=message):
        check_tokens(np.array(ids), 10)


# Batches


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("row_multiple", [1, 4])
@pytest.mark.parametrize("positions_per_sentence", [1, 3])
@pytest.mark.parametrize("num", [2, 37, 800])
def test_every_example_is_in_one_batch_with_its_sentence(num, cut, row_multiple, positions_per_sentence):
    lengths = realistic(num).lengths
    generator = np.random.default_rng(1)
    rows = np.repeat(np.arange(num), np.minimum(generator.integers(0, positions_per_sentence + 1, num), lengths))
    rows = generator.permutation(rows) if positions_per_sentence > 1 else np.arange(num)
    positions = generator.integers(0, lengths[rows])
    split = make_split(lengths, positions, rows)
    seen = []
    for batch in batches(
        split, cut_after_position=cut, max_length=512, tokens_per_batch=1024, row_multiple=row_multiple, pad_id=7
    ):
        B, T = batch.tokens.shape
        assert B % row_multiple == 0
        assert T % 8 == 0
        assert B in (row_multiple, *range(1024 // T + 1))
        assert (batch.lengths >= 1).all()
        assert (batch.lengths <= T).all()
        assert (batch.tokens[np.arange(T) >= batch.lengths[:, None]] == 7).all()
        assert (batch.positions < batch.lengths[:, None]).all()
        assert (batch.positions[batch.examples < 0] == 0).all()
        for b, p in zip(*np.nonzero(batch.examples >= 0), strict=True):
            example = batch.examples[b, p]
            row, length = split.rows[example], batch.lengths[b]
            start = split.starts[row]
            seen.append(example)
            assert batch.positions[b, p] == split.positions[example]
            assert length == (split.positions[split.rows == row].max() + 1 if cut else split.lengths[row])
            np.testing.assert_array_equal(batch.tokens[b, :length], split.tokens[start : start + length])
    assert sorted(seen) == list(range(split.num_examples))


def test_only_the_last_batch_has_empty_rows():
    full = [(batch.examples >= 0).any(1).all() for batch in batches(realistic(1000), cut_after_position=False)]
    assert all(full[:-1])
    (only,) = batches(make_split([5, 9, 3]), cut_after_position=False, row_multiple=2)
    assert only.tokens.shape == (4, 16)  # few sentences: no more rows than they need
    assert only.examples.tolist() == [[1], [0], [2], [-1]]
    assert only.lengths.tolist() == [9, 5, 3, 1]


def test_shapes_are_few_and_within_the_model():
    lengths = np.random.default_rng(0).integers(1, 1001, 6000)
    shapes = {batch.tokens.shape for batch in batches(make_split(lengths), cut_after_position=False, max_length=1000)}
    assert len({T for _, T in shapes}) == len(shapes) <= 24
    assert max(T for _, T in shapes) == 1000
    rest = batches(make_split([60] * 100 + [3] * 50), cut_after_position=False)  # the last shape holds the rest
    assert [batch.tokens.shape for batch in rest] == [(64, 64)] * 3


def test_little_is_padding():
    split = realistic(9000)
    waste = padding_waste(split, cut_after_position=False)
    plan = list(batches(split, cut_after_position=False))
    assert waste == pytest.approx(1 - split.lengths.sum() / sum(batch.tokens.size for batch in plan))
    assert 0 < waste < 0.15
    # Cut sentences are half as long, so that rounding up to 8 weighs more.
    assert padding_waste(split, cut_after_position=True) < 0.25
    assert padding_waste(realistic(9000, mean=200), cut_after_position=True) < 0.15
    assert padding_waste(make_split([8] * 512), cut_after_position=False) == 0


def test_text_longer_than_the_positions_is_refused_at_once():
    with pytest.raises(ValueError, match="sentence 1 has 12 tokens, the model only 8 positions"):
        batches(make_split([4, 12, 8], [0, 0, 0]), cut_after_position=True, max_length=8)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("row_multiple", [1, 4])
@pytest.mark.parametrize("positions_per_sentence", [1, 3])
@pytest.mark.parametrize("num", [1, 37, 800])
def test_packed_rows_hold_every_example_with_its_sentence(num, cut, row_multiple, positions_per_sentence):
    lengths = realistic(num).lengths
    generator = np.random.default_rng(1)
    rows = np.repeat(np.arange(num), np.minimum(generator.integers(1, positions_per_sentence + 1, num), lengths))
    rows = generator.permutation(rows)
    positions = generator.integers(0, lengths[rows])
    split = make_split(lengths, positions, rows)
    seen = []
    for batch in packed(split, cut_after_position=cut, tokens_per_batch=1024, row_multiple=row_multiple, pad_id=7):
        B, T = batch.tokens.shape
        assert B % row_multiple == 0
        assert B * T <= 1024 or row_multiple == B
        assert (batch.tokens[batch.segments == 0] == 7).all()
        assert (batch.positions[batch.segments == 0] == 0).all()
        for b, p in zip(*np.nonzero(batch.examples >= 0), strict=True):
            example, place = batch.examples[b, p], batch.read_at[b, p]
            row = split.rows[example]
            mine = np.flatnonzero(batch.segments[b] == batch.segments[b, place])
            length = split.positions[split.rows == row].max() + 1 if cut else split.lengths[row]
            start = split.starts[row]
            seen.append(example)
            assert batch.positions[b, place] == split.positions[example]
            np.testing.assert_array_equal(batch.positions[b, mine], np.arange(length))
            np.testing.assert_array_equal(batch.tokens[b, mine], split.tokens[start : start + length])
            np.testing.assert_array_equal(np.diff(mine), 1)  # in one piece
    assert sorted(seen) == list(range(split.num_examples))


def test_packed_rows_are_nearly_full_and_of_few_shapes():
    for count in (400, 3000):
        split = realistic(count)
        plan = packed(split, cut_after_position=True)
        places = sum(batch.tokens.size for batch in plan)
        assert 1 - (split.positions + 1).sum() / places < (0.08 if count == 3000 else 0.15)
        assert len({(batch.tokens.shape, batch.examples.shape) for batch in plan}) <= 4
    (only,) = packed(make_split([5, 9, 3]), cut_after_position=False)
    assert only.tokens.shape == (1, 24)  # no more than they need
    tiny = packed(make_split([1] * 500), cut_after_position=False)  # many examples a row would make room in all rows
    assert max(batch.examples.shape[1] for batch in tiny) == 16
    with pytest.raises(ValueError, match="sentence 1 has 12 tokens, the model only 8 positions"):
        packed(make_split([4, 12, 8], [0, 0, 0]), cut_after_position=True, max_length=8)
