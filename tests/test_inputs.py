"""What a model is given: checks on the host, positions, padding to few shapes, batches."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmat
from jmat import Add, At, Constant, Edit, Linear
from jmat.data.batches import Batch
from jmat.models.inputs import Spans, prepare, text_positions
from jmat.models.sites import readable
from tests import hf
from tests.families import BY_NAME
from tests.programs import programs

rng = np.random.default_rng(0)
NO_PADDING = {"pad_rows": False, "pad_length": False}


@pytest.fixture(scope="module")
def gpt2():
    return hf.ours(hf.gpt2("inputs", n_positions=12))


@pytest.fixture(scope="module")
def bert():
    return hf.ours(hf.bert("inputs", max_position_embeddings=12, type_ids=False))


def tokens_of(rows, length):
    return rng.integers(0, 37, (rows, length), dtype=np.int32)


# --- padding to few shapes ------------------------------------------------------------------------

# rows, length; 9 become 12, which are all positions that there are
PADDED = [(1, 7), (9, 9), (33, 5)]


@pytest.mark.parametrize(
    ("rows", "length"),
    [PADDED[0], *(pytest.param(*size, marks=pytest.mark.slow) for size in PADDED[1:])],
)
def test_padding_changes_nothing(gpt2, bert, rows, length):
    for model in (gpt2, bert):
        tokens, keep = tokens_of(rows, length), tuple(readable(2, 4))
        x, kept = jmat.run(model, tokens, keep=keep)
        y, expected = jmat.run(model, jnp.asarray(tokens), keep=keep)  # which is run as it is
        np.testing.assert_allclose(x, y, atol=2e-6 * float(jnp.abs(y).max()))
        for name in keep:
            assert kept[name].shape == expected[name].shape, name
            size = float(jnp.abs(expected[name]).max())
            np.testing.assert_allclose(
                kept[name], expected[name], atol=2e-6 * max(size, 1), err_msg=name
            )
        read = {
            "read_at": np.stack([np.full(rows, -1), np.zeros(rows, int)], axis=1),
            "keep": ("block.1.attn.pattern", "logits"),
        }
        (_, kept), (_, expected) = (
            jmat.run(model, given, **read) for given in (tokens, jnp.asarray(tokens))
        )
        assert kept["block.1.attn.pattern"].shape == (rows, 2, 4, length)
        for name in read["keep"]:
            np.testing.assert_allclose(kept[name], expected[name], atol=1e-5, err_msg=name)


def test_padding_changes_nothing_for_rows_that_hold_padding(gpt2, bert):
    mask = np.array([[1] * 6 + [0] * 3, [0] * 3 + [1] * 6, [0] * 2 + [1] * 5 + [0] * 2], bool)
    tokens = tokens_of(3, 9)
    for model in (gpt2, bert, hf.ours(BY_NAME["bloom-plain"])):
        keep = ("block.1.attn.pattern", "logits")
        x, kept = jmat.run(model, tokens, mask=mask, keep=keep)
        y, expected = jmat.run(model, jnp.asarray(tokens), mask=jnp.asarray(mask), keep=keep)
        for value, other in ((x, y), *((kept[name], expected[name]) for name in keep)):
            np.testing.assert_allclose(
                value, other, atol=1e-5 * max(float(jnp.abs(other).max()), 1)
            )


def test_ten_prompts_of_different_lengths_compile_few_programs(gpt2):
    def passes(lengths, seed):
        v = jnp.full(16, 0.1 * seed)
        for length in lengths:
            tokens = tokens_of(1, length)
            jmat.run(gpt2, tokens, keep="logits", read_at=-1)
            jmat.run(gpt2, tokens, sites={"block.0": Add(v), "block.1": At(-1, Constant(v[None]))})
            jmat.run(
                gpt2,
                tokens,
                sites={"block.0.ffn": Linear(jnp.eye(16)), "block.1.attn": gpt2.blocks[0].attn},
            )

    passes([3], 0)
    before = programs()
    passes([1, 2, 4, 5, 6, 7, 8], 1)
    assert programs() == before
    longer = [9, 10, 11, 12]
    passes(longer[:1], 2)
    before = programs()
    passes(longer, 3)
    assert programs() == before


def test_sites_that_depend_on_the_length_see_the_true_one(gpt2):
    """Any function may look at the last column; what has a value for each token cannot
    be padded.
    """
    tokens, source = tokens_of(2, 5), rng.normal(size=(2, 5, 16)).astype(np.float32)
    last = Edit(lambda y: y.at[:, -1].set(0))
    kept = np.asarray(jmat.run(gpt2, tokens, sites={"block.0": last}, keep="block.0")[1]["block.0"])
    assert not kept[:, -1].any()
    assert kept[:, :-1].all()
    for stand_in in (Constant(source), Add(source)):
        jmat.run(gpt2, tokens, sites={"block.0": stand_in})
    pattern = np.full((2, 4, 5, 5), 0.2, np.float32)
    kept = jmat.run(
        gpt2, tokens, sites={"block.0.attn.pattern": Constant(pattern)}, keep="block.0.attn.pattern"
    )[1]
    np.testing.assert_array_equal(kept["block.0.attn.pattern"], pattern)
    jmat.run(
        gpt2, tokens, sites={"block.0.attn.pattern": At(-1, Constant(np.full(5, 0.2, np.float32)))}
    )


def test_errors_speak_of_the_shapes_that_were_given(gpt2):
    with pytest.raises(
        ValueError,
        match=r"returned shape \(3, 5, 7\) for an input of \(3, 5, 16\); expected \(3, 5, 16",
    ):
        jmat.run(gpt2, tokens_of(3, 5), sites={"block.0.ffn": Linear(jnp.ones((16, 7)))})


# --- where things are read ------------------------------------------------------------------------


def test_positions_count_within_the_text_of_a_row(gpt2):
    mask = np.array(
        [[1] * 6 + [0] * 2, [0] * 3 + [1] * 5, [0] * 2 + [1] * 4 + [0] * 2, [0] * 8], bool
    )
    tokens = tokens_of(4, 8)
    whole = np.asarray(jmat.run(gpt2, tokens, mask=mask, keep="block.1")[1]["block.1"])
    expected = {0: [0, 3, 2, 0], -1: [5, 7, 5], 3: [3, 6, 5], -4: [2, 4, 2]}
    for mask_given in (mask, jnp.asarray(mask)):
        for position, columns in expected.items():
            rows = slice(0, len(columns))
            shapes = {
                (): position,
                (1,): [position],
                (4,): np.full(4, position),
                (4, 1): np.full((4, 1), position),
            }
            for shape, read_at in shapes.items():
                if position and len(columns) == 3 and isinstance(mask_given, np.ndarray):
                    given = (
                        tokens[rows],
                        mask_given[rows],
                        read_at[rows] if shape and shape[0] == 4 else read_at,
                    )
                else:
                    given = (tokens, mask_given, read_at)
                kept = jmat.run(gpt2, given[0], mask=given[1], keep="block.1", read_at=given[2])[1][
                    "block.1"
                ]
                value = np.asarray(kept)[rows].reshape(len(columns), 16)
                np.testing.assert_allclose(
                    value, whole[np.arange(len(columns)), columns], atol=1e-5
                )
    with pytest.raises(
        ValueError,
        match=r"read_at position -1 at \(3,\) is outside the text of row 3, which has 0 tokens",
    ):
        jmat.run(gpt2, tokens, mask=mask, keep="block.1", read_at=-1)


@pytest.mark.parametrize("where", ["host", "device", "device, segments on the host"])
def test_every_position_of_every_row_has_its_column(where):
    """Rows padded on the right, on the left, on both sides, not at all, and without any
    token.
    """
    segments = np.array(
        [[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [0, 1, 2, 0, 0], [1, 1, 1, 1, 1], [0] * 5], np.int32
    )
    real = [np.flatnonzero(row) for row in segments]
    given = jnp.asarray(segments) if where == "device" else segments
    spans = Spans(given, 5, 5)
    for position in range(-6, 6):
        wanted = [row[position] if -len(row) <= position < len(row) else 99 for row in real]
        if where != "host":
            found = spans.columns("read_at", jnp.full(5, position), empty=99)
            np.testing.assert_array_equal(found, wanted)
            continue
        for row, column in enumerate(wanted):
            alone = Spans(segments[row : row + 1], 1, 5)
            if column != 99 or (position == 0 and not len(real[row])):
                assert alone.columns("read_at", np.array([position]), empty=99).tolist() == [column]
            else:
                with pytest.raises(
                    ValueError,
                    match=f"read_at position {position} at .* is outside the text of row 0",
                ):
                    alone.columns("read_at", np.array([position]), empty=99)


def test_packed_texts_are_read_from_the_first_column_of_the_row(gpt2):
    segments = np.array([[1, 1, 1, 2, 2, 2, 2, 0]])
    tokens = tokens_of(1, 8)
    whole = jmat.run(gpt2, tokens, segments=segments, keep="block.1")[1]["block.1"]
    kept = jmat.run(gpt2, tokens, segments=segments, keep="block.1", read_at=[2, 3, -1])[1][
        "block.1"
    ]
    np.testing.assert_array_equal(kept[0], whole[0, np.array([2, 3, 6])])


def test_a_batch_brings_its_segments_and_positions(gpt2):
    segments = np.array([[1, 1, 1, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 1]], np.int32)
    positions = np.array([[0, 1, 2, 0, 1, 0, 0], [4, 5, 6, 7, 8, 9, 10]], np.int32)
    tokens, none = tokens_of(2, 7), np.zeros((2, 0), np.int32)
    batch = Batch(tokens, segments, positions, none, none)
    x, kept = jmat.run(gpt2, batch, keep="logits", read_at=0)
    y, expected = jmat.run(
        gpt2, tokens, segments=segments, positions=positions, keep="logits", read_at=0
    )
    np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(kept["logits"], expected["logits"])
    assert x.shape == (2, 7, 16)
    on_device = jax.tree.map(jnp.asarray, batch)
    np.testing.assert_allclose(jmat.run(gpt2, on_device)[0], y, atol=1e-5)
    for more in ({"mask": segments > 0}, {"segments": segments}, {"positions": positions}):
        with pytest.raises(
            ValueError, match="texts and a Batch have their own segments and positions"
        ):
            jmat.run(gpt2, batch, **more)


# --- the boundary ---------------------------------------------------------------------------------


def test_arrays_on_a_device_are_never_fetched(gpt2):
    """While a program is traced there is nothing to fetch: whoever tries, fails."""

    def both(tokens, segments, positions, read_at, place):
        given = {"segments": segments, "read_at": read_at, "keep": ("logits", "block.0")}
        sites = {"block.0": At(place, Constant(jnp.ones((1, 16))))}
        derived = jmat.run(gpt2, tokens, sites=sites, **given)
        return derived, jmat.run(gpt2, tokens, sites=sites, positions=positions, **given)

    segments, positions = np.array([[1, 1, 1, 2, 2, 0, 0, 0]]), np.array([[0, 1, 2, 0, 1, 0, 0, 0]])
    given = (tokens_of(1, 8), segments, positions, np.array([[0, 4]]), np.array([1]))
    traced = jax.jit(both)(*given)
    for values, expected in zip(traced, both(*given), strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), values, expected)


def test_ids_on_the_host_are_checked_beside_arrays_on_a_device(gpt2):
    tokens, mask = tokens_of(1, 8), jnp.ones((1, 8), bool)
    with pytest.raises(ValueError, match="token id 37"):
        jmat.run(gpt2, np.full_like(tokens, 37), mask=mask)
    with pytest.raises(ValueError, match="read_at position 8"):
        jmat.run(gpt2, tokens, mask=mask, read_at=8, keep="logits")
    with pytest.raises(ValueError, match="a text has 13 tokens"):
        jmat.run(gpt2, jnp.zeros((1, 13), jnp.int32))


def count_all(segments):
    """Index of each token among those of its text, looking from each at all others."""
    length = segments.shape[1]
    same = (segments[:, :, None] == segments[:, None, :]) & np.tril(
        np.ones((length, length), bool), k=-1
    )
    return np.where(segments > 0, same.sum(-1), 0)


@pytest.mark.parametrize("texts", [1, 3, 40])
def test_positions_follow_from_segments_wherever_their_tokens_lie(texts):
    segments = rng.integers(0, texts + 1, (6, 50)).astype(np.int32)
    segments[3:] = np.sort(segments[3:], axis=1)
    np.testing.assert_array_equal(text_positions(segments), count_all(segments))
    np.testing.assert_array_equal(text_positions(jnp.asarray(segments)), count_all(segments))


def test_positions_of_long_rows_take_little_memory(gpt2):
    segments = jnp.ones((8, 4096), jnp.int32)
    compiled = jax.jit(text_positions).lower(segments).compile().memory_analysis()
    # of T² integers, it would be 4096 times
    assert compiled.temp_size_in_bytes < 50 * segments.nbytes
    given, _ = prepare(
        gpt2.config, jnp.zeros((8, 4096), jnp.int32), 0, None, segments, None, None, **NO_PADDING
    )
    assert given.context.positions.shape == (8, 4096)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"read_at": [0, 8]},
            r"read_at position 8 at \(0, 1\) is outside the text of row 0, which has 8 tokens",
        ),
        ({"read_at": [0.5]}, r"read_at is float64 \(1, 1\); expected integers"),
        (
            {"read_at": np.zeros((3, 2), int)},
            r"read_at is int64 \(3, 2\); expected integers \[2\] or \[2, P\]",
        ),
        ({"read_at": np.zeros((2, 2, 2), int)}, r"read_at is int64 \(2, 2, 2\)"),
        ({"read_at": "last"}, r"read_at is .*; expected integers"),
    ],
)
def test_wrong_places_to_read_are_refused(gpt2, options, message):
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(jmat.run)(gpt2, tokens_of(2, 8), keep="logits", **options)
