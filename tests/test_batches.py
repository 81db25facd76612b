"""From examples to padded batches and packed rows."""

import numpy as np
import pytest

from jmat.data import packed, padded_batches, padding_waste
from tests.splits import make_split, realistic


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("row_multiple", [1, 4])
@pytest.mark.parametrize("positions_per_sentence", [1, 3])
@pytest.mark.parametrize("num", [2, 37, 800])
def test_every_example_is_in_one_batch_with_its_sentence(
    num, cut, row_multiple, positions_per_sentence
):
    lengths = realistic(num).lengths
    generator = np.random.default_rng(1)
    rows = np.repeat(
        np.arange(num), np.minimum(generator.integers(0, positions_per_sentence + 1, num), lengths)
    )
    rows = generator.permutation(rows) if positions_per_sentence > 1 else np.arange(num)
    positions = generator.integers(0, lengths[rows])
    split = make_split(lengths, positions, rows)
    seen = []
    for batch in padded_batches(
        split,
        cut_after_position=cut,
        max_length=512,
        tokens_per_batch=1024,
        row_multiple=row_multiple,
        pad_id=7,
    ):
        B, T = batch.tokens.shape
        assert B % row_multiple == 0
        assert T % 8 == 0
        assert B in (row_multiple, *range(1024 // T + 1))
        real = np.arange(T) < batch.lengths[:, None]
        np.testing.assert_array_equal(batch.segments, real)  # one sentence a row
        np.testing.assert_array_equal(batch.positions, np.where(real, np.arange(T), 0))
        assert (batch.tokens[~real] == 7).all()
        assert (batch.read_at < np.maximum(batch.lengths, 1)[:, None]).all()
        assert (batch.read_at[batch.examples < 0] == 0).all()
        for b, p in zip(*np.nonzero(batch.examples >= 0), strict=True):
            example = batch.examples[b, p]
            row, length = split.rows[example], batch.lengths[b]
            start = split.starts[row]
            seen.append(example)
            assert batch.read_at[b, p] == split.positions[example]
            assert length == (
                split.positions[split.rows == row].max() + 1 if cut else split.lengths[row]
            )
            np.testing.assert_array_equal(
                batch.tokens[b, :length], split.tokens[start : start + length]
            )
    assert sorted(seen) == list(range(split.num_examples))


def test_only_the_last_batch_has_empty_rows():
    full = [
        (batch.examples >= 0).any(1).all()
        for batch in padded_batches(realistic(1000), cut_after_position=False)
    ]
    assert all(full[:-1])
    (only,) = padded_batches(make_split([5, 9, 3]), cut_after_position=False, row_multiple=2)
    assert only.tokens.shape == (4, 16)  # few sentences: no more rows than they need
    assert only.examples.tolist() == [[1], [0], [2], [-1]]
    assert only.lengths.tolist() == [9, 5, 3, 0]


def test_shapes_are_few_and_within_the_model():
    lengths = np.random.default_rng(0).integers(1, 1001, 6000)
    shapes = {
        batch.tokens.shape
        for batch in padded_batches(make_split(lengths), cut_after_position=False, max_length=1000)
    }
    assert len({T for _, T in shapes}) == len(shapes) <= 24
    assert max(T for _, T in shapes) == 1000
    # the last shape holds the rest
    rest = padded_batches(make_split([60] * 100 + [3] * 50), cut_after_position=False)
    assert [batch.tokens.shape for batch in rest] == [(64, 64)] * 3


def test_little_is_padding():
    split = realistic(9000)
    waste = padding_waste(split, cut_after_position=False)
    plan = padded_batches(split, cut_after_position=False)
    assert waste == pytest.approx(
        1 - split.lengths.sum() / sum(batch.tokens.size for batch in plan)
    )
    assert 0 < waste < 0.15
    # Cut sentences are half as long, so that rounding up to 8 weighs more.
    assert padding_waste(split, cut_after_position=True) < 0.25
    assert padding_waste(realistic(9000, mean=200), cut_after_position=True) < 0.15
    assert padding_waste(make_split([8] * 512), cut_after_position=False) == 0


def test_text_longer_than_the_positions_is_refused_at_once():
    with pytest.raises(
        ValueError, match="sentence 1 has 12 tokens, and the model reads 8 at most: cut texts"
    ):
        padded_batches(make_split([4, 12, 8], [0, 0, 0]), cut_after_position=True, max_length=8)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("row_multiple", [1, 4])
@pytest.mark.parametrize("positions_per_sentence", [1, 3])
@pytest.mark.parametrize("num", [1, 37, 800])
def test_packed_rows_hold_every_example_with_its_sentence(
    num, cut, row_multiple, positions_per_sentence
):
    lengths = realistic(num).lengths
    generator = np.random.default_rng(1)
    rows = np.repeat(
        np.arange(num), np.minimum(generator.integers(1, positions_per_sentence + 1, num), lengths)
    )
    rows = generator.permutation(rows)
    positions = generator.integers(0, lengths[rows])
    split = make_split(lengths, positions, rows)
    seen = []
    for batch in packed(
        split, cut_after_position=cut, tokens_per_batch=1024, row_multiple=row_multiple, pad_id=7
    ):
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
            np.testing.assert_array_equal(
                batch.tokens[b, mine], split.tokens[start : start + length]
            )
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
    # many examples a row would make room in all rows
    tiny = packed(make_split([1] * 500), cut_after_position=False)
    assert max(batch.examples.shape[1] for batch in tiny) == 16
    with pytest.raises(
        ValueError, match="sentence 1 has 12 tokens, and the model reads 8 at most: cut texts"
    ):
        packed(make_split([4, 12, 8], [0, 0, 0]), cut_after_position=True, max_length=8)
