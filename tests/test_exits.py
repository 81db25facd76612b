"""Early exit while writing: exact where it must be, and where tokens leave."""

import dataclasses
import itertools
import pathlib

import jax
import numpy as np
import pytest
from scipy import stats

import jmat
from jmat.decode import fit_exits as fitting
from jmat.decode import leave
from jmat.decode.coloured import colour
from jmat.decode.exits import TokenExits
from jmat.decode.fills import fill_in
from jmat.decode.passes import Rules
from jmat.decode.plan import looks_of
from jmat.decode.result import Generated
from jmat.decode.sample import Law
from jmat.decode.text import Follower
from jmat.maps.carry import Carry
from jmat.models.cache import new_cache
from jmat.models.rotary import rotate
from jmat.studies.early_exit.thresholds import exit_layers
from tests import families, hf
from tests.exiting import check_by_hand, check_exact, probabilities, sure
from tests.test_generate import CASES

NEW = 30
REFERENCE = pathlib.Path(__file__).parent / "data" / "reference" / "gpt2"
FILLS = ("recompute", "copy")  # those without maps


@pytest.fixture(autouse=True)
def exact():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def maps(gpt2, gpt2_examples):
    return {layer: jmat.fit_map(gpt2, gpt2_examples.fit, layer, 4).map for layer in (1, 2, 3)}


def prompts(vocab_size, lengths=(3, 11, 1, 6)):
    rng = np.random.default_rng(0)
    return [rng.integers(5, vocab_size, size=length) for length in lengths]


def write(model, exits, ids=None, **options):
    ids = prompts(min(model.config.vocab_size, 37)) if ids is None else ids
    options = {"max_new_tokens": NEW, "stop_tokens": [], "scores": True} | options
    return jmat.generate(model, ids, exits=exits, **options)


def same(one, other):
    assert [row.tolist() for row in one.tokens] == [row.tolist() for row in other.tokens]
    assert one.reasons == other.reasons


def everywhere(found, L):
    """Tokens left at each layer that was looked at, and some did not leave."""
    assert set(np.concatenate([row[1:] for row in found.exits.layers])) == {
        *found.exits.looked_at,
        L,
    }


# --- exactness ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("fill", [*FILLS, "map", "direct"])
@pytest.mark.parametrize("name", CASES)
def test_a_threshold_that_nothing_exceeds_changes_nothing(name, fill):
    model = hf.ours(CASES[name])
    c, maps = model.config, {1: jmat.Identity()}
    if c.layers == 1:
        with pytest.raises(ValueError, match="a model of one block has no layer"):
            write(model, jmat.Exits(maps, 1.0))
        return
    wide = c.width if fill == "map" else 2 * (c.kv_heads or c.heads) * c.head_width
    zero = jmat.Linear(np.zeros((c.width, wide), np.float32))
    fills = {} if fill in FILLS else {(1, k): zero for k in range(2, c.layers)}
    found = write(model, jmat.Exits(maps, 1.0, fill=fill, fills=fills), max_new_tokens=20)
    same(found, write(model, None, max_new_tokens=20))
    assert set(np.concatenate(found.exits.layers)) == {c.layers}
    assert found.exits.programs == 19 * c.layers


DEEP = {
    "llama": (families.llama("deep", num_hidden_layers=4), 0.1),
    "gpt_neox": (families.gpt_neox("deep", num_hidden_layers=4), 0.1),
    "bloom": (families.bloom("deep", n_layer=4), 0.02),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEEP)
def test_recomputed_blocks_are_those_of_full_passes_in_other_families(name):
    case, threshold = DEEP[name]
    model = hf.ours(case)
    exits = jmat.Exits(dict.fromkeys((1, 3), jmat.Identity()), threshold)
    found = write(model, exits, max_new_tokens=20)
    everywhere(found, 4)
    check_exact(model, found, exits)


@pytest.mark.parametrize(
    ("confidence", "threshold", "options"),
    [
        ("gap", 0.06, {}),
        pytest.param("max_probability", 0.12, {"check_every": 2}, marks=pytest.mark.slow),
        pytest.param("entropy", 0.6, {"words": range(0, 600, 7)}, marks=pytest.mark.slow),
        pytest.param("patience", 1, {}, marks=pytest.mark.slow),
        pytest.param("gap", 0.0, {"length": 20}, marks=pytest.mark.slow),
    ],
)
def test_recomputed_blocks_are_those_of_full_passes(gpt2, maps, confidence, threshold, options):
    """Ragged prompts; rows leave at other layers at one step."""
    exits = jmat.Exits(maps, threshold, confidence=confidence, **options)
    found = write(gpt2, exits, prompts(gpt2.config.vocab_size))
    assert found.exits.looked_at == ((2,) if "check_every" in options else (1, 2, 3))
    layers = np.stack(found.exits.layers)
    assert (layers[:, 1:] < 4).any()
    assert (layers[:, 1:] == 4).any()
    assert (layers != layers[0]).any()
    check_exact(gpt2, found, exits)


def test_layers_are_those_of_the_study(gpt2, maps):
    exits = jmat.Exits(maps, 0.06)
    found = write(gpt2, exits, prompts(gpt2.config.vocab_size))
    logged = np.concatenate([row[1:] for row in found.exits.confidences]).astype(np.float64)
    confidence = np.nan_to_num(np.pad(logged, ((0, 0), (1, 0))), nan=-1)
    expected = exit_layers(confidence, np.array([[0.06]]))[0]
    found_at = np.concatenate([row[1:] for row in found.exits.layers])
    np.testing.assert_array_equal(found_at, expected)


@pytest.mark.slow
def test_many_tokens_are_made_good_at_once(gpt2, maps):
    """A token that seldom goes on has more before it than one pass takes."""
    exits = jmat.Exits({1: maps[1]}, 0.007)
    found = write(gpt2, exits, prompts(gpt2.config.vocab_size), max_new_tokens=40)
    stays = [np.flatnonzero(row == 4) for row in found.exits.layers]
    assert max(np.diff(at).max(initial=0) for at in stays) > 9
    check_exact(gpt2, found, exits)


@pytest.mark.slow
def test_edits_change_tokens_that_are_made_good_as_others(gpt2, maps):
    push = np.random.default_rng(1).normal(size=64).astype(np.float32)
    sites = {"block.0.ffn": jmat.Scale(0.5), "block.3": jmat.At([8, 9, 15], jmat.Add(push))}
    exits = jmat.Exits(maps, 0.06)
    ids = prompts(gpt2.config.vocab_size)
    found = write(gpt2, exits, ids, sites=sites)
    everywhere(found, 4)
    check_exact(gpt2, found, exits, sites=sites)
    assert [row.tolist() for row in found.tokens] != [
        row.tolist() for row in write(gpt2, exits, ids).tokens
    ]


@pytest.mark.slow
def test_a_text_up_to_the_last_position(gpt2, maps):
    ids = prompts(gpt2.config.vocab_size, (gpt2.config.num_positions - 9,))
    exits = jmat.Exits(maps, 0.06)
    check_exact(gpt2, write(gpt2, exits, ids, max_new_tokens=9), exits)


@pytest.mark.slow
@pytest.mark.parametrize("fill", ["recompute", "copy", "map", "direct"])
def test_bfloat16(gpt2_examples, fill):
    """A threshold that nothing exceeds changes nothing; others let tokens leave."""
    model, _ = jmat.load(REFERENCE, dtype="bfloat16")
    exits = jmat.fit_exits(model, gpt2_examples.fit, [1, 3], 1.0, fill=fill)
    ids = prompts(model.config.vocab_size)
    same(write(model, exits, ids), write(model, None, ids))
    early = write(model, dataclasses.replace(exits, threshold=0.06), ids)
    assert (np.concatenate(early.exits.layers) < 4).any()


# --- filled caches --------------------------------------------------------------------------------


def by_policy(model, exits):
    """Returns a function that fills the cache block by block, in plain steps."""
    config = model.config

    def fill(cache, x, layer):
        at = int(cache.lengths[layer, 0])
        for k in range(layer, config.layers):
            if exits.fill == "direct" and k > layer:
                cache = put(cache, k, at, np.asarray(exits.fills[layer, k](x), np.float32))
                continue
            given = exits.fills[layer, k](x) if exits.fill == "map" and k > layer else x
            _, _, cache = jmat.run(model, given, start=k, stop=k + 1, cache=cache)
        return cache

    def put(cache, k, at, both):
        G, K = config.kv_heads or config.heads, config.head_width
        keys, values = both.reshape(2, G, K)
        if config.rotary is not None:
            at_position = jax.numpy.full((1, 1), at)
            keys = rotate(jax.numpy.asarray(keys[None, None]), at_position, config.rotary)
            keys = np.asarray(keys)[0, 0]
        block = cache.blocks[k]
        new = [np.array(each) for each in block]
        new[0][0, :, at], new[1][0, :, at] = keys, values
        blocks = list(cache.blocks)
        blocks[k] = block._replace(keys=jax.numpy.asarray(new[0]), values=jax.numpy.asarray(new[1]))
        lengths = cache.lengths.at[k].add(1)
        return dataclasses.replace(cache, blocks=tuple(blocks)).with_lengths(lengths)

    return fill


@pytest.mark.parametrize("fill", ["copy", pytest.param("map", marks=pytest.mark.slow), "direct"])
def test_fills_are_those_of_a_loop_over_blocks(gpt2, gpt2_examples, fill):
    exits = jmat.fit_exits(gpt2, gpt2_examples.fit, [1, 2, 3], 0.06, fill=fill)
    ids = prompts(gpt2.config.vocab_size, (3, 7))
    assert set(check_by_hand(gpt2, ids, exits, by_policy(gpt2, exits))) == {1, 2, 3, 4}


@pytest.mark.slow
@pytest.mark.parametrize("fill", ["copy", "map", "direct"])
@pytest.mark.parametrize("name", DEEP)
def test_fills_are_those_of_a_loop_over_blocks_in_other_families(name, fill):
    case, threshold = DEEP[name]
    model = hf.ours(case)
    c, rng = model.config, np.random.default_rng(0)
    wide = c.width if fill == "map" else 2 * (c.kv_heads or c.heads) * c.head_width

    def random_map():
        W = rng.normal(size=(c.width, wide)).astype(np.float32) / np.sqrt(c.width)
        return jmat.Linear(W, np.ones(wide, np.float32))

    fills = {(l, k): random_map() for l in (1, 3) for k in range(l + 1, 4)}
    maps = dict.fromkeys((1, 3), jmat.Identity())
    exits = jmat.Exits(maps, threshold, fill=fill, fills={} if fill == "copy" else fills)
    layers = check_by_hand(model, prompts(37), exits, by_policy(model, exits))
    assert {1, 4} <= set(layers)


@pytest.mark.parametrize(("fill", "per_block"), [("copy", 2), ("map", 3), ("direct", 2)])
def test_fills_compute_keys_and_values_alone(gpt2, fill, per_block):
    """What blocks make of the stream is not used, and so not computed."""
    rules = Rules(Law(), {}, np.array([-1]), np.int32(8), jax.random.key(0))
    cache, D = new_cache(gpt2, 4, 8), gpt2.config.width
    x, leaves = np.zeros((4, 1, D), np.float32), np.ones(4, bool)
    rng, wide = np.random.default_rng(0), D if fill == "map" else 2 * D
    weights = {(1, k): rng.normal(size=(D, wide)).astype(np.float32) for k in (2, 3)}
    fills = {} if fill == "copy" else {pair: jmat.Linear(W) for pair, W in weights.items()}
    exits = jmat.Exits({1: jmat.Identity()}, 0.5, fill=fill, fills=fills)
    looks, plan = looks_of(exits, gpt2.config)
    program = jax.jit(
        lambda x, leaves, cache: fill_in(gpt2, x, leaves, cache, rules, looks, plan, 1)
    )
    analysis = program.lower(x, leaves, cache).compile().cost_analysis()
    # blocks 1, 2 and 3, of which the first reads its own input
    products = 4 * 2 * D * D * (2 + 2 * per_block) / jax.device_count()
    assert products <= analysis["flops"] <= 1.5 * products


def test_maps_are_those_of_least_squares(gpt2, gpt2_examples):
    exits = jmat.fit_exits(gpt2, gpt2_examples.fit, [2], 0.5, fill="direct", kind="mat")
    names = ("block.1", "block.3", "block.3.attn.k", "block.3.attn.v")
    acts = jmat.capture(gpt2, gpt2_examples.fit, names)
    X, last, *pair = (acts[name].reshape(len(acts[name]), -1).astype(np.float64) for name in names)
    for stand_in, Y in ((exits.maps[2], last), (exits.fills[2, 3], np.concatenate(pair, axis=1))):
        expected, *_ = np.linalg.lstsq(X, Y, rcond=None)
        np.testing.assert_allclose(stand_in.W, expected, atol=1e-4 * np.abs(expected).max())
        assert stand_in.bias is None
    affine = jmat.fit_exits(gpt2, gpt2_examples.fit, [2], 0.5, fill="map", kind="affine")
    acts = jmat.capture(gpt2, gpt2_examples.fit, ["block.2"])
    ones = np.concatenate([X, np.ones((len(X), 1))], axis=1)
    expected, *_ = np.linalg.lstsq(ones, acts["block.2"].astype(np.float64), rcond=None)
    found = np.concatenate([affine.fills[2, 3].W, affine.fills[2, 3].bias[None]])
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


# --- work, laws, programs -------------------------------------------------------------------------


@pytest.mark.parametrize("fill", FILLS)
def test_blocks_are_run_for_tokens_that_go_on_alone(gpt2, maps, fill):
    found = write(gpt2, jmat.Exits(maps, 0.06, fill=fill), prompts(gpt2.config.vocab_size)).exits
    deepest = np.stack(found.layers)[:, 1:].max(0).sum()
    if fill == "copy":
        assert found.programs == deepest
    else:  # some runs more, for more than eight tokens that are made good
        assert deepest <= found.programs <= 1.2 * deepest
    assert found.programs < 4 * (NEW - 1)


@pytest.mark.slow
@pytest.mark.parametrize("fill", FILLS)
def test_a_fixed_layer_runs_the_blocks_before_it(gpt2, maps, fill):
    exits = jmat.Exits({2: maps[2]}, confidence="fixed", fill=fill)
    found = write(gpt2, exits, prompts(gpt2.config.vocab_size)).exits
    assert found.programs == 2 * (NEW - 1)
    assert (np.stack(found.layers)[:, 1:] == 2).all()


@pytest.mark.slow
def test_tokens_are_drawn_from_the_law_of_their_layer(gpt2, maps):
    prompt = [7, 30, 12]
    _, acts = jmat.run(gpt2, np.asarray([[*prompt, 40]]), keep="block.0")
    law = probabilities(np.asarray(jmat.logits(gpt2, maps[1](acts["block.0"][0, -1]))) / 1.3)
    top = np.argsort(-law)[:6]
    expected = law[top] / law[top].sum()
    # the first token is the whole model's: a stand-in for its logits makes it the same
    table = {"logits": jmat.At([2], jmat.Edit(lambda x: x.at[..., 40].set(1e4)))}
    found = write(
        gpt2,
        jmat.Exits(maps, confidence="fixed"),
        [prompt] * 4000,
        max_new_tokens=2,
        temperature=1.3,
        top_k=6,
        scores=False,
        sites=table,
    )
    assert {int(row[0]) for row in found.tokens} == {40}
    drawn = np.array([int(row[1]) for row in found.tokens])
    counts = np.array([(drawn == token).sum() for token in top])
    assert counts.sum() == len(drawn)
    assert stats.chisquare(counts, expected * len(drawn)).pvalue > 1e-3


@pytest.mark.slow
def test_rows_on_several_devices_are_the_same(gpt2, maps):
    """Several times, since programs that need all devices at once can wait for one another."""
    ids = prompts(gpt2.config.vocab_size)
    for fill in FILLS:
        exits = jmat.Exits(maps, 0.06, fill=fill)
        alone = [write(gpt2, exits, [row]) for row in ids]
        for _ in range(2):
            found = write(gpt2, exits, ids)
            for row, one in enumerate(alone):
                assert found.tokens[row].tolist() == one.tokens[0].tolist()
                assert found.exits.layers[row].tolist() == one.exits.layers[0].tolist()
    assert jax.device_count() == len(ids) == 4


@pytest.mark.slow
def test_other_numbers_compile_nothing_new(gpt2, maps):
    ids = prompts(gpt2.config.vocab_size)

    def run(layer, threshold, most):
        write(gpt2, jmat.Exits({2: maps[layer]}, threshold), ids, max_new_tokens=most)

    run(2, 0.1, 17)
    size = leave.write_leaving._cache_size()
    for layer, threshold, most in itertools.product((1, 3), (0.0, 0.5), (18, 20)):
        run(layer, threshold, most)
    assert leave.write_leaving._cache_size() == size


@pytest.mark.slow
def test_streaming_and_stop_strings():
    model, tokenizer = jmat.load("gpt2-docs")
    exits = jmat.Exits(dict.fromkeys((4, 6), jmat.Identity()), 0.2)
    given = {"max_new_tokens": 30, "stop_strings": ["."], "tokenizer": tokenizer}
    texts = ["Return a new", "The"]
    whole = write(model, exits, texts, **given)
    pieces = {0: "", 1: ""}

    def take(row, piece):
        pieces[row] += piece

    found = write(model, exits, texts, on_text=take, **given)
    assert found.texts == whole.texts == (pieces[0], pieces[1])
    for tokens, layers in zip(found.tokens, found.exits.layers, strict=True):
        assert len(tokens) == len(layers)
    assert tuple("".join(row) for row in found.exits.pieces) == found.texts


# --- what a result shows --------------------------------------------------------------------------


def luminance(colour):
    parts = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def test_a_result_shows_where_tokens_left(gpt2):
    layers = (np.array([4, 1, 2], np.int32), np.array([4, 4], np.int32))
    exits = TokenExits(layers, (), (1, 2), 4, 9, (("new ", "<b>", "é"), ("a", " b")))
    found = Generated(
        prompts=(np.array([1], np.int32), np.array([2], np.int32)),
        tokens=(np.array([5, 6, 7], np.int32), np.array([8, 9], np.int32)),
        reasons=("length", "stop token"),
        texts=("new <b>é", "a b"),
        prompt_texts=("Return", "The"),
        exits=exits,
    )
    shown = repr(found)
    assert "2 texts, 5 new tokens, which left after 3.0 blocks on average" in shown
    assert "(3 tokens, length; tokens by layer 1: 1, 2: 1, 4: 1)" in shown
    page = found._repr_html_()
    assert '<span title="whole model">new </span>' in page
    assert (
        '<span title="layer 1" style="background: #91c7f8; color: #191c22">&lt;b&gt;</span>' in page
    )
    assert "left at layer <span" in page
    assert "http" not in page
    ids = dataclasses.replace(
        found, texts=None, prompt_texts=None, exits=exits._replace(pieces=None)
    )
    assert ">6 </span>" in ids._repr_html_()
    for layer in range(1, 12):
        contrast = (luminance(colour(layer, 12)) + 0.05) / (luminance("#191c22") + 0.05)
        assert contrast > 7


def test_exits_show_their_rule():
    exits = jmat.Exits(ONE, 0.5, fill="copy")
    assert repr(exits) == "Exits from layers 1: gap above 0.5, fill='copy'"
    fixed = jmat.Exits({2: jmat.Identity(), **ONE}, confidence="fixed")
    assert repr(fixed) == "Exits from layers 1, 2: fixed, fill='recompute'"


def test_pieces_are_the_text():
    """Also where characters take several tokens, and a stop string cuts the text."""
    _, tokenizer = jmat.load("gpt2-docs")
    for text, strings in (
        ("Return a new é ∑ array.", []),
        ("Return a new array of items", [" ar"]),
    ):
        ids = np.asarray(tokenizer([text])["input_ids"][0], np.int32)
        follower = Follower(tokenizer, ids[:2], strings, [], None)
        follower.take(ids[2:], ended=True)
        pieces = follower.pieces()
        assert "".join(pieces) == follower.text
        assert len(pieces) == (follower.stopped or len(ids) - 2)
        assert pieces[0] == " new"


# --- bad input ------------------------------------------------------------------------------------

ONE = {1: jmat.Identity()}
CARRY = Carry(np.eye(64), np.eye(64), np.zeros(64))
PAIRS = {(1, 2): jmat.Identity(), (1, 3): jmat.Identity()}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jmat.Exits({}, 0.5), "maps={}: expected a map to the last layer for each"),
        (lambda: jmat.Exits(jmat.Identity(), 0.5), "expected a map to the last layer for each"),
        (lambda: jmat.Exits({"1": jmat.Identity()}, 0.5), "a layer of maps='1': expected a whole"),
        (lambda: jmat.Exits({0: jmat.Identity()}, 0.5), "maps has one from layer 0: expected .* 3"),
        (lambda: jmat.Exits({4: jmat.Identity()}, 0.5), "maps has one from layer 4: expected .* 3"),
        (lambda: jmat.Exits(ONE), "threshold=None: expected a number from 0 to 1"),
        (lambda: jmat.Exits(ONE, 1.5), "threshold=1.5: expected a number from 0 to 1"),
        (lambda: jmat.Exits(ONE, float("nan")), "threshold=nan: expected a number from 0 to 1"),
        (lambda: jmat.Exits(ONE, True), "threshold=True: expected a number from 0 to 1"),
        (lambda: jmat.Exits(ONE, 1.2, length=9), "threshold=1.2: expected .* -1.112 to 1.112"),
        (lambda: jmat.Exits(ONE, 0.5, length=0), "length=0: expected a number of tokens above 0"),
        (lambda: jmat.Exits(ONE, 1, "patience", length=9), "for a confidence that is a share"),
        (lambda: jmat.Exits(ONE, 0.5, "patience"), "threshold=0.5: expected a whole number of"),
        (lambda: jmat.Exits(ONE, 0.5, "fixed"), "threshold=0.5: with confidence='fixed' each"),
        (lambda: jmat.Exits(ONE, 0.5, "margin"), "confidence='margin': expected one of gap"),
        (lambda: jmat.Exits(ONE, 0.5, fill="skip"), "fill='skip': expected one of recompute, copy"),
        (lambda: jmat.Exits(ONE, 0.5, fill="map"), r"fill='map' needs a map .* fills\[\(1, 2\)\]"),
        (lambda: jmat.Exits(ONE, 0.5, fill="copy", fills=PAIRS), "fill='copy' uses no maps"),
        (lambda: jmat.Exits(ONE, 0.5, fill="map", fills=[]), "fills=\\[\\]: expected maps by"),
        (
            lambda: jmat.Exits(ONE, 0.5, fill="direct", fills=PAIRS),
            "the fill of layer 1 for block 2 does not fit the model: .* expected \\(2, 1, 128\\)",
        ),
        (lambda: jmat.Exits(ONE, 0.5, check_every=0), "check_every=0: expected a whole number of"),
        (lambda: jmat.Exits(ONE, 0.5, check_every=4), "check_every=4 looks at no layer"),
        (lambda: jmat.Exits(ONE, 0.5, check_every=2), "looks at layer 2, for which maps has none"),
        (lambda: jmat.Exits(ONE, 0.5, words=[3]), r"words=\[3\]: expected two token ids at least"),
        (lambda: jmat.Exits(ONE, 0.5, words=[3, 10**6]), r"words: token id 1000000 at \(1,\)"),
        (lambda: jmat.Exits({1: jmat.Add(np.ones(64))}, 0.5), "got the edit Add"),
        (lambda: jmat.Exits({1: CARRY}, 0.5), "is a carry, which reads h_L of the token before"),
        (lambda: jmat.Exits({1: 3}, 0.5), r"'maps\[1\]' .*int"),
        (
            lambda: jmat.Exits({1: jmat.Linear(np.eye(5, dtype=np.float32))}, 0.5),
            "the map of layer 1 does not fit the model",
        ),
        (lambda: "mat", "exits is of type str; expected jmat.Exits"),
    ],
)
def test_bad_exits(gpt2, make, message, unchecked, monkeypatch):
    monkeypatch.setattr("jmat.decode.generate._run", lambda *_, **__: pytest.fail("work was begun"))
    with pytest.raises(ValueError, match=message):
        jmat.generate(gpt2, [[5]], exits=make())


def test_what_does_not_go_together(gpt2, bert, maps):
    exits = jmat.Exits(maps, 0.5)
    with pytest.raises(ValueError, match="draft keeps the whole model's text and exits changes"):
        jmat.generate(gpt2, [[5]], exits=exits, draft=jmat.Draft(1, maps[1]))
    words = jmat.Exits(maps, 0.5, words=[3, 4])
    with pytest.raises(ValueError, match="words reads a few columns of the model's own head"):
        jmat.generate(gpt2, [[5]], exits=words, sites={"logits": jmat.Scale(2.0)})
    wide = jmat.Linear(np.zeros((64, 128), np.float32))
    direct = jmat.Exits(ONE, 0.5, fill="direct", fills=dict.fromkeys(PAIRS, wide))
    for name, site in (("block.2.attn.k", jmat.Scale(2.0)), ("block.3", jmat.Identity())):
        with pytest.raises(ValueError, match=f"site '{name}' changes what they come from"):
            jmat.generate(gpt2, [[5]], exits=direct, sites={name: site})
    with pytest.raises(ValueError, match=r"a masked model \(bert\) reads whole texts"):
        jmat.generate(bert, [[5]], exits=exits)
    with pytest.raises(ValueError, match="this one needs the others"):
        jmat.generate(gpt2, [[5]], exits=jmat.Exits({1: gpt2.blocks[0]}, 0.5))


@pytest.mark.parametrize(
    ("layers", "options", "message"),
    [
        ([0], {}, r"layers=\[0\]: expected layers from 1 to 3"),
        ([4], {}, r"layers=\[4\]: expected layers from 1 to 3"),
        ([], {}, r"layers=\[\]: expected layers from 1 to 3"),
        (2, {}, "layers=2: expected a list"),
        ([2], {"kind": "jacobian"}, "is not fitted to one pair of sites in closed form"),
        ([2], {"kind": "future_sum"}, "is not fitted to one pair of sites in closed form"),
        ([2], {"kind": "diag", "fill": "direct"}, "keeps the width"),
        ([2], {"fill": "none"}, "fill='none': expected one of recompute, copy, map, direct"),
        ([2], {"threshold": 2}, "threshold=2: expected a number from 0 to 1"),
    ],
)
def test_bad_fits(gpt2, gpt2_examples, layers, options, message, unchecked, monkeypatch):
    monkeypatch.setattr(fitting, "capture", lambda *_, **__: pytest.fail("texts were read"))
    with pytest.raises(ValueError, match=message):
        fitting.fit_exits(gpt2, gpt2_examples.fit, layers, **{"threshold": 0.5, **options})


def test_confidences_by_their_definitions():
    p = np.array([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]])
    np.testing.assert_allclose(sure("gap", p), [0.25, 1])
    np.testing.assert_allclose(sure("entropy", p), [1 - 1.5 * np.log(2) / np.log(3), 1])
