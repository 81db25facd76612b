"""A cache in any pieces gives what one pass over the whole texts gives."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmat
from jmat import Add, At, Edit, Identity, Linear, Scale
from jmat.models.cache import Cache, new_cache
from tests import families, hf
from tests.programs import programs

CAUSAL = [
    case
    for case in [*hf.CASES, *families.CASES]
    if not case.name.startswith(("bert", "roberta", "xlmroberta", "distilbert"))
    or "decoder" in case.name
]
QUICK = ("gpt2-plain", "mistral-window", "gpt_neo-plain", "bloom-from-norm")
BY_NAME = {case.name: case for case in CAUSAL}
T = 9
# Padding on the right, on the left, on both sides, none.
MASK = np.array([[1] * 5 + [0] * 4, [0] * 3 + [1] * 6, [0, 0] + [1] * 6 + [0], [1] * T], bool)
TOKENS = np.random.default_rng(0).integers(0, 37, MASK.shape, dtype=np.int32)
PIECES = ([4, 1, T - 5], [T], [1] * T)


@pytest.fixture(scope="module")
def gpt2():
    return hf.ours(hf.gpt2("cached", n_layer=3))


@pytest.fixture(autouse=True)
def exact():
    with jax.default_matmul_precision("highest"):
        yield


def in_pieces(model, pieces, keep=(), room=T, tokens=TOKENS, **options):
    """Returns h_L and the kept sites of texts that are read piece by piece, and the cache."""
    cache, at, streams, kept = new_cache(model, len(tokens), room), 0, [], []
    for size in pieces:
        piece = slice(at, at + size)
        x, values, cache = jmat.run(
            model, tokens[:, piece], mask=MASK[:, piece], keep=keep, cache=cache, **options
        )
        streams.append(x)
        kept.append(values)
        at += size
    joined = {name: np.concatenate([values[name] for values in kept], axis=1) for name in keep}
    return np.concatenate(streams, axis=1), joined, cache


def close(found, expected, mask=MASK, bound=1e-5):
    found, expected = np.asarray(found)[mask], np.asarray(expected)[mask]
    assert np.abs(found - expected).max() <= bound * np.abs(expected).max()


def check_pieces(case, several):
    model = hf.ours(case)
    keep = ("block.0.attn", "block.0.attn.z", "final_norm")
    expected, at = jmat.run(model, TOKENS, mask=MASK, keep=keep)
    for pieces in several:
        x, kept, cache = in_pieces(model, pieces, keep)
        close(x, expected)
        for name in keep:
            close(kept[name], at[name])
        np.testing.assert_array_equal(cache.lengths, [MASK.sum(1)] * model.config.layers)


@pytest.mark.parametrize("name", QUICK)
def test_any_pieces_are_one_pass(name):
    check_pieces(BY_NAME[name], PIECES[:1])


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
def test_any_pieces_are_one_pass_in_every_family(name):
    check_pieces(BY_NAME[name], PIECES)


def test_more_room_changes_nothing(gpt2):
    expected, _ = jmat.run(gpt2, TOKENS, mask=MASK)
    close(in_pieces(gpt2, [4, 5], room=16)[0], expected)


def test_rows_of_the_cache_do_not_depend_on_padding(gpt2):
    _, _, cache = in_pieces(gpt2, [4, 5])
    for row, mask in enumerate(MASK):
        alone = new_cache(gpt2, 1, T)
        _, _, alone = jmat.run(gpt2, TOKENS[row, mask][None], cache=alone)
        for ours, theirs in zip(cache.blocks, alone.blocks, strict=True):
            n = int(mask.sum())
            np.testing.assert_allclose(ours.keys[row, :, :n], theirs.keys[0, :, :n], atol=1e-5)
            np.testing.assert_allclose(ours.values[row, :, :n], theirs.values[0, :, :n], atol=1e-5)


def test_blocks_and_rows_are_filled_separately(gpt2):
    """Row 0 leaves after block 1 at two tokens; what it skipped is made good later."""
    tokens = TOKENS[2:, :6]
    expected, _ = jmat.run(gpt2, tokens)
    cache = new_cache(gpt2, 2, 6)
    streams = []
    for at in range(6):
        early, _, cache = jmat.run(gpt2, tokens[:, at : at + 1], stop=1, cache=cache)
        streams.append(early)
        if at in (2, 3):
            stays = np.array([[False], [True]])
            x, _, cache = jmat.run(gpt2, early, start=1, mask=stays, cache=cache)
            close(x[1], expected[1, at : at + 1], ...)
            assert cache.lengths[:, 0].tolist() == [at + 1, 2, 2]
        elif at == 4:  # row 0 has three tokens to go on with
            late = jnp.concatenate(streams[2:5], axis=1)
            stays = np.array([[True] * 3, [False, False, True]])
            x, _, cache = jmat.run(gpt2, late, start=1, mask=stays, cache=cache)
            close(x[0], expected[0, 2:5], ...)
            close(x[1, -1], expected[1, 4], ...)
        else:
            x, _, cache = jmat.run(gpt2, early, start=1, cache=cache)
            close(x[:, 0], expected[:, at], ...)


def test_the_end_of_a_text_is_taken_back(gpt2):
    expected, _ = jmat.run(gpt2, TOKENS[3:])
    other = (TOKENS[3:] + 5) % 37
    cache = new_cache(gpt2, 1, T)
    _, _, cache = jmat.run(gpt2, TOKENS[3:, :4], cache=cache)
    _, _, cache = jmat.run(gpt2, other[:, :4], cache=cache)
    x, _, cache = jmat.run(gpt2, TOKENS[3:, 4:], cache=cache.with_lengths(np.array([[4]])))
    close(x, expected[:, 4:], ...)


SITES = {
    "edit": {"block.1.attn": Scale(0.5), "block.0": Add(jnp.linspace(-1, 1, 16))},
    "stand-in": {"block.1.ffn": Linear(jnp.eye(16) * 0.3)},
    "block": {"block.1": Identity()},
    "first block": {"block.0": Identity()},
    "head": {"block.2.attn.head.2": Linear(jnp.ones((16, 4)) * 0.1)},
    "keys": {"block.1.attn.k": Scale(2.0), "block.1.attn.v": Edit(jnp.tanh)},
    "embedding": {"embed": Scale(0.7)},
    "end": {"final_norm": Scale(2.0)},
}


def check_sites(model, sites):
    keep = ("final_norm",)
    _, expected = jmat.run(model, TOKENS, mask=MASK, sites=sites, keep=keep)
    _, kept, _ = in_pieces(model, [4, 1, 4], keep, sites=sites)
    close(kept["final_norm"], expected["final_norm"])
    _, plain = jmat.run(model, TOKENS, mask=MASK, keep=keep)
    assert not np.allclose(plain["final_norm"], expected["final_norm"], atol=1e-3)


def test_sites_apply_in_every_piece(gpt2):
    names = ("first block", "keys", "stand-in", "head", "end")
    check_sites(gpt2, {site: value for name in names for site, value in SITES[name].items()})


@pytest.mark.slow
@pytest.mark.parametrize("name", SITES)
def test_each_site_applies_in_every_piece(gpt2, name):
    check_sites(gpt2, SITES[name])


@pytest.mark.parametrize("name", ["gpt2-plain", "gpt_neo-plain"])
def test_attention_of_another_block_remembers(name):
    model = hf.ours(BY_NAME[name])
    sites = {"block.1.attn": model.blocks[0].attn}
    expected, _ = jmat.run(model, TOKENS, mask=MASK, sites=sites)
    close(in_pieces(model, [4, 1, 4], sites=sites)[0], expected)


def test_positions_count_within_the_piece(gpt2):
    cache = new_cache(gpt2, 4, T)
    _, _, cache = jmat.run(gpt2, TOKENS[:, :4], cache=cache)
    sites = {"block.1": At(-1, Scale(0.0)), "block.2": At(0, Scale(0.0))}
    x, kept, _ = jmat.run(
        gpt2, TOKENS[:, 4:], cache=cache, sites=sites, keep=("block.1", "embed"), read_at=[0, -1]
    )
    assert kept["block.1"].shape == (4, 2, 16)
    assert not kept["block.1"][:, 1].any()
    assert kept["block.1"][:, 0].all()
    assert not x[:, 0].any()


def test_scores_have_an_axis_of_the_cache(gpt2):
    keep = ("block.1.attn.scores", "block.1.attn.pattern")
    _, expected = jmat.run(gpt2, TOKENS, keep=keep)
    cache = new_cache(gpt2, 4, 12)
    _, _, cache = jmat.run(gpt2, TOKENS[:, :6], cache=cache)
    _, kept, _ = jmat.run(gpt2, TOKENS[:, 6:], cache=cache, keep=keep)
    for name in keep:
        assert kept[name].shape == (4, 4, 3, 12)
    pattern = kept["block.1.attn.pattern"]
    np.testing.assert_allclose(pattern[..., :T], expected[keep[1]][:, :, 6:], atol=1e-6)
    assert not pattern[..., T:].any()


def test_a_cache_takes_the_memory_of_the_one_before(gpt2):
    cache = new_cache(gpt2, 4, T)
    _, _, longer = jmat.run(gpt2, TOKENS[:, :4], cache=cache)
    assert all(part.is_deleted() for block in cache.blocks for part in block)
    assert longer.blocks[0].keys.shape == (4, 4, T, 4)
    assert repr(longer) == "Cache(3 blocks, float32 [B, G, S, K] = [4, 4, 9, 4])"


def test_arrays_on_the_device_are_taken_as_they_are(gpt2):
    expected, _ = jmat.run(gpt2, TOKENS)

    @jax.jit
    def read(model, first, second, cache):
        _, _, cache = jmat.run(model, first, cache=cache)
        return jmat.run(model, second, cache=cache)[0]

    tokens = jnp.asarray(TOKENS)
    found = read(gpt2, tokens[:, :5], tokens[:, 5:], new_cache(gpt2, 4, T))
    close(found, expected[:, 5:], ...)


def test_neither_lengths_nor_steps_compile_programs(gpt2):
    def read(first, steps, room):
        cache = new_cache(gpt2, 4, room)
        _, _, cache = jmat.run(gpt2, TOKENS[:, :first], cache=cache)
        for at in range(first, first + steps):
            _, _, cache = jmat.run(gpt2, TOKENS[:, at : at + 1], cache=cache)

    read(3, 2, 16)
    before = programs()
    read(2, 5, 16)
    read(7, 2, 16)
    assert programs() == before


def test_rows_are_split_over_the_devices(gpt2):
    cache = new_cache(gpt2, 4, T)
    assert len(cache.blocks[0].keys.sharding.device_set) == jax.device_count() > 1
    assert cache.blocks[0].keys.addressable_shards[0].data.shape == (1, 4, T, 4)
    whole = new_cache(gpt2, 3, T)
    assert whole.blocks[0].keys.addressable_shards[0].data.shape == (3, 4, T, 4)


@pytest.mark.parametrize("name", ["gpt2-plain", "llama-plain"])
def test_narrow_dtypes_are_near_their_own_full_pass(name):
    model = hf.ours(BY_NAME[name], dtype="bfloat16")
    expected, _ = jmat.run(model, TOKENS, mask=MASK)
    x, _, cache = in_pieces(model, [4, 1, 4])
    assert {str(x.dtype), str(cache.blocks[0].keys.dtype)} == {"bfloat16"}
    close(x.astype(np.float32), expected.astype(jnp.float32), bound=0.03)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positions": np.zeros((4, T), np.int32)}, "leave them out"),
        ({"segments": np.array([[1, 1, 2, 2, 0, 0, 0, 0, 0]] * 4)}, "row 0 holds several texts"),
        ({"room": T - 1}, r"row 0 has 9 tokens .* room for 8: make it with room=9"),
        ({"rows": 3}, "the cache is of 3 blocks and 3 texts; expected 3 blocks and as many"),
        ({"read": 8, "room": 20}, "row 0 has 17 tokens .* the model has positions for 16"),
        ({"lengths": [[2], [1], [1]]}, "block 0 has read 2 tokens of row 0 and block 1 1"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(gpt2, options, message):
    run = inspect.unwrap(jmat.run)
    cache = new_cache(gpt2, options.pop("rows", 4), options.pop("room", T))
    if count := options.pop("read", 0):
        _, _, cache = run(gpt2, TOKENS[:, :count], cache=cache)
    if (lengths := options.pop("lengths", None)) is not None:
        cache = cache.with_lengths(np.array(lengths))
    with pytest.raises(ValueError, match=message):
        run(gpt2, TOKENS, cache=cache, **options)
    assert not cache.blocks[0].keys.is_deleted()


def test_a_masked_model_has_no_cache():
    model = hf.ours(hf.bert("uncached"))
    with pytest.raises(ValueError, match=r"a masked model \(bert\) reads whole texts"):
        new_cache(model, 1, 8)
    cache = Cache((), jnp.zeros((2, 4), jnp.int32))
    with pytest.raises(ValueError, match="a masked model"):
        jmat.run(model, TOKENS, cache=cache)


@pytest.mark.parametrize("size", [{"rows": 0, "room": 4}, {"rows": 2, "room": 0}])
def test_a_cache_has_a_size(gpt2, size):
    with pytest.raises(ValueError, match="=0: expected a whole number of at least 1"):
        new_cache(gpt2, **size)
