"""Edits of what a model computes, at every site, everywhere or at some tokens; parts of
the model as stand-ins.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmat
from jmat import Add, At, Constant, Edit, Identity, Linear, Scale, Zero
from jmat.models.edits import OfBlock
from jmat.models.sites import is_square, place_shape, replaceable
from tests import hf
from tests.families import BY_NAME
from tests.programs import programs

CASES = [
    hf.gpt2("edits"),
    hf.bert("edits", type_ids=False),
    *(
        BY_NAME[name]
        for name in (
            "llama-plain",
            "gpt_neox-parallel",
            "bloom-from-norm",
            "opt-350m",
            "gpt_neo-plain",
        )
    ),
]
rng = np.random.default_rng(0)
# Padding on the right, on the left, on both sides, none; T = 8, so that rows are not padded
# further.
MASK = np.array([[1] * 5 + [0] * 3, [0] * 3 + [1] * 5, [0, 0] + [1] * 4 + [0, 0], [1] * 8], bool)
TOKENS = rng.integers(0, 37, MASK.shape, dtype=np.int32)
FIRST, LENGTH = MASK.argmax(1), MASK.sum(1)
ROWS = np.arange(4)


@pytest.fixture(scope="module")
def gpt2():
    return hf.ours(hf.gpt2("edits", n_layer=3))


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def small(request, gpt2):
    return gpt2 if request.param == "gpt2" else hf.ours(BY_NAME["llama-plain"])


def values(model, keep, sites=None, **options):
    _, kept = jmat.run(model, TOKENS, mask=MASK, keep=keep, sites=sites, **options)
    return {name: np.asarray(value) for name, value in kept.items()}


def changeable(model, heads=True):
    """The sites of block 0, of one head, and those outside blocks."""
    c = model.config
    block = ("block.0.", "block.0.attn.head.1") if heads else ("block.0.",)
    names = [
        name for name in replaceable(c.layers, c.heads) if ".head." not in name or name in block
    ]
    return [
        name
        for name in names
        if name == "block.0" or name.startswith("block.0.") or not name.startswith("block.")
    ]


def by_token(name, value):
    """The values with the axis of tokens (of queries, for scores and patterns) as the
    second.
    """
    return np.moveaxis(value, 2, 1) if is_square(name) else value


def keep_given(given, _):
    return given


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[pytest.mark.slow] * (number > 2))
        for number, case in enumerate(CASES)
    ],
)
def test_every_site_of_every_family_takes_an_edit_everywhere_and_at_tokens(case):
    """All sites at once, each with random values: a site that passed its edit over
    would show other ones.
    """
    model = hf.ours(case)
    names = changeable(model)
    plain = values(model, names)
    for name, value in plain.items():
        expected = place_shape(name, model.config, 8)
        assert by_token(name, value).shape == (4, 8, *expected), name
    given = {name: rng.normal(size=value.shape).astype(np.float32) for name, value in plain.items()}
    given["block.0.attn.z"][:, :, 1] = given["block.0.attn.head.1"]
    everywhere = {
        name: Edit(jax.tree_util.Partial(keep_given, value)) for name, value in given.items()
    }
    for name, value in values(model, names, everywhere).items():
        np.testing.assert_array_equal(value, given[name], err_msg=name)

    here = np.zeros(MASK.shape, bool)
    here[ROWS, FIRST], here[ROWS, FIRST + LENGTH - 1] = True, True
    at = np.stack([FIRST, FIRST + LENGTH - 1], axis=1)
    some = {
        name: Constant(by_token(name, value)[ROWS[:, None], at]) for name, value in given.items()
    }
    kept = values(model, names, {name: At([0, -1], stand_in) for name, stand_in in some.items()})
    for name, value in kept.items():
        value, expected = by_token(name, value), by_token(name, given[name])
        np.testing.assert_array_equal(value[here], expected[here], err_msg=name)
        assert not np.isclose(value[~here], expected[~here]).all(axis=-1).any(), name


def test_what_is_edited_goes_on_into_the_block(small):
    inside = [name for name in changeable(small) if name.startswith("block.0")]
    plain = values(small, [*inside, "block.0"], stop=1)
    for name in inside:
        kept = values(small, [name, "block.0"], {name: Scale(0.5)}, stop=1)
        np.testing.assert_allclose(kept[name], plain[name] / 2, rtol=1e-5, err_msg=name)
        assert not np.allclose(kept["block.0"][MASK], plain["block.0"][MASK], atol=1e-5), name


def test_every_site_is_replaced_by_nothing(small):
    for name in changeable(small):
        kept = values(small, name, {name: Zero()})[name]
        assert by_token(name, kept).shape == (4, 8, *place_shape(name, small.config, 8))
        assert not kept.any()


def test_the_embedding_is_replaced_by_a_constant(gpt2):
    for value in (np.arange(16, dtype=np.float32), rng.normal(size=(4, 8, 16)).astype(np.float32)):
        kept = values(gpt2, "embed", {"embed": Constant(value)})["embed"]
        np.testing.assert_array_equal(kept, np.broadcast_to(value, (4, 8, 16)))
    np.testing.assert_allclose(
        values(gpt2, "embed", {"embed": Add(np.ones(16))})["embed"],
        values(gpt2, "embed")["embed"] + 1,
        atol=1e-6,
    )


def columns(position):
    """Where a position of each row's text stands."""
    return FIRST + np.where(position < 0, LENGTH + position, position)


@pytest.mark.parametrize(
    "position", [0, -1, np.array([0, 1, -1, 6])], ids=["first", "last", "each"]
)
def test_one_token_is_changed_and_no_other(gpt2, position):
    here = np.zeros(MASK.shape, bool)
    here[ROWS, columns(np.asarray(position))] = True
    for name in ("embed", "block.0.attn.scores", "block.0.attn.z", "block.0.ffn", "block.0"):
        sites = {name: At(position, Add(7.0))}
        plain, kept = (by_token(name, values(gpt2, name, given)[name]) for given in (None, sites))
        np.testing.assert_allclose(kept[here], plain[here] + 7, rtol=1e-5, err_msg=name)
        np.testing.assert_array_equal(kept[~here], plain[~here], err_msg=name)


@pytest.mark.parametrize("name", ["block.0", "block.0.attn.pattern"])
def test_a_position_reads_and_patches_the_same_token(gpt2, name):
    other = {"embed": Scale(0.5)}
    whole = by_token(name, values(gpt2, name, other)[name])
    source, last = values(gpt2, name, other, read_at=-1)[name], np.full(4, -1)
    np.testing.assert_allclose(source, whole[ROWS, columns(-1)], atol=1e-6)
    for patched in (At(-1, Constant(source)), At(last, Constant(source))):
        np.testing.assert_array_equal(values(gpt2, name, {name: patched}, read_at=-1)[name], source)
        np.testing.assert_array_equal(
            values(gpt2, name, {name: patched}, read_at=last)[name], source
        )
    two = values(gpt2, name, other, read_at=[0, -1])[name]
    np.testing.assert_allclose(
        two, np.stack([whole[ROWS, columns(p)] for p in (0, -1)], axis=1), atol=1e-6
    )
    each = np.tile([[0, -1]], (4, 1))
    np.testing.assert_array_equal(
        values(gpt2, name, {name: At([0, -1], Constant(two))}, read_at=each)[name], two
    )


def test_stand_ins_at_a_token_see_the_input_of_the_part(gpt2):
    W = Linear(jax.random.normal(jax.random.key(0), (16, 16)))
    plain = values(gpt2, ["block.1.ffn.in", "block.1.ffn", "block.0"])
    kept = values(gpt2, "block.1.ffn", {"block.1.ffn": At([0, 2], W)})["block.1.ffn"]
    here = np.zeros(MASK.shape, bool)
    for position in (0, 2):
        here[ROWS, columns(position)] = True
    np.testing.assert_allclose(kept[here], W(plain["block.1.ffn.in"][here]), atol=1e-5)
    np.testing.assert_array_equal(kept[~here], plain["block.1.ffn"][~here])
    kept = values(gpt2, "block.1", {"block.1": At(-1, Identity())}, read_at=-1)["block.1"]
    np.testing.assert_array_equal(kept, plain["block.0"][ROWS, columns(-1)])
    whole = values(gpt2, "block.1.attn", {"block.1.attn": gpt2.blocks[0].attn})["block.1.attn"]
    some = values(gpt2, "block.1.attn", {"block.1.attn": At(-1, gpt2.blocks[0].attn)}, read_at=-1)[
        "block.1.attn"
    ]
    np.testing.assert_allclose(some, whole[ROWS, columns(-1)], atol=1e-6)


def test_edits_of_embedding_norm_and_head_at_a_token_are_read_there_too(gpt2):
    for name in ("final_norm", "logits"):
        whole = values(gpt2, name, {name: At(-1, Scale(3.0))})[name]
        read = values(gpt2, name, {name: At(-1, Scale(3.0))}, read_at=-1)[name]
        np.testing.assert_allclose(read, whole[ROWS, columns(-1)], atol=1e-5)
        np.testing.assert_allclose(read, 3 * values(gpt2, name, read_at=-1)[name], rtol=1e-5)
    np.testing.assert_allclose(jmat.logits(gpt2, jnp.ones((2, 16)), sites={"logits": Scale(3.0)}),
                               3 * jmat.logits(gpt2, jnp.ones((2, 16))), rtol=1e-5)  # fmt: skip


# --- parts of the model ---------------------------------------------------------------------------


def test_parts_of_the_model_stand_in_for_themselves(small):
    model = small
    plain = values(model, "logits")["logits"]
    blocks = model.blocks
    for sites in (
        {
            "block.1.attn": blocks[1].attn,
            "block.0.ffn": blocks[0].ffn,
            "block.1.ln_2": blocks[1].ln_2,
        },
        {"block.0": blocks[0], "block.1": blocks[1]},
        {"final_norm": model.final_norm},
        {"block.1.attn": OfBlock(blocks[1].attn, 1)},
    ):
        np.testing.assert_allclose(values(model, "logits", sites)["logits"], plain, atol=1e-5)


# A window in one block only; a scale by block.
INDEXED = [
    BY_NAME["gpt_neo-local-untied"],
    BY_NAME["qwen2-window"],
    hf.gpt2("by-layer", n_layer=3, scale_attn_by_inverse_layer_idx=True),
]


@pytest.mark.parametrize("case", INDEXED, ids=lambda case: case.name)
def test_a_part_behaves_as_in_its_own_block(case):
    model = hf.ours(case)
    last = model.config.layers - 1
    site, x = (
        f"block.{last}.attn",
        jnp.asarray(rng.normal(size=(1, 8, model.config.width)), jnp.float32),
    )
    own = jmat.run(model, x, keep="block.0.attn", sites={"block.0.ln_1": Identity()})[1][
        "block.0.attn"
    ]
    for stand_in in (
        model.blocks[0].attn,
        At(list(range(8)), model.blocks[0].attn),
        OfBlock(model.blocks[0].attn, 0),
    ):
        sites = {site: stand_in, f"block.{last}.ln_1": Identity()}
        there = jmat.run(model, x, start=last, keep=site, sites=sites)[1][site]
        np.testing.assert_allclose(there, own, atol=1e-5)
    other = hf.ours(case, seed=1)
    with pytest.raises(
        ValueError,
        match=rf"site '{site}' is a part of another model whose attention depends on its",
    ):
        jmat.run(model, x, sites={site: other.blocks[0].attn})
    jmat.run(model, x, sites={site: OfBlock(other.blocks[0].attn, 0)})


# --- compiling and differentiating ----------------------------------------------------------------


def triple(y):
    return 3 * y


def test_other_values_and_positions_compile_nothing(gpt2):
    """Nor does the order in which sites are kept, nor a plain function that was used
    before.
    """

    def passes(seed):
        v = jax.random.normal(jax.random.key(seed), (16,))
        sites = {
            "block.0.attn": Add(v),
            "block.1": At(seed % 3, Scale(v)),
            "block.2.ffn.hidden": At(np.full(4, seed % 3), Scale(0.1 * seed)),
            "block.1.attn.pattern": Edit(jax.tree_util.Partial(jnp.add, 0.1 * v[0])),
            "block.0.ffn": Edit(triple),
        }  # fmt: skip
        keep = ["block.1.attn.q", "block.1.attn", "block.1", "logits"]
        return values(gpt2, keep if seed % 2 else keep[::-1], sites)

    first, before = passes(0), programs()
    second = passes(1)
    assert programs() == before
    assert (
        list(first) == list(second)[::-1] == ["logits", "block.1", "block.1.attn", "block.1.attn.q"]
    )
    assert not np.allclose(first["logits"], second["logits"])


def test_gradients_go_through_edits(gpt2):
    def score(v, edit=Add):
        x, _ = jmat.run(gpt2, TOKENS[3:, :6], sites={"block.0": edit(v)})
        return jmat.logits(gpt2, x)[0, -1, 5]

    v, step = jnp.zeros(16), 1e-2
    gradient = jax.grad(score)(v)
    for k in (0, 7):
        up, down = score(v.at[k].add(step)), score(v.at[k].add(-step))
        np.testing.assert_allclose(gradient[k], (up - down) / (2 * step), rtol=0.02, atol=1e-3)
    np.testing.assert_allclose(jax.jit(jax.grad(score))(v), gradient, atol=1e-5)
    closed = jax.grad(lambda v: score(v, lambda v: Edit(lambda y: y + v)))(v)
    np.testing.assert_allclose(closed, gradient, atol=1e-5)
    at_last = jax.grad(lambda v: score(v, lambda v: At(-1, Add(v))))(v)
    assert jnp.abs(at_last).max() > 0
    assert not np.allclose(at_last, gradient)


def test_an_edited_part_is_computed_and_a_replaced_one_is_not_traced(gpt2, monkeypatch):
    calls = []
    original = type(gpt2.blocks[0].ffn).hidden
    monkeypatch.setattr(
        type(gpt2.blocks[0].ffn), "hidden", lambda *given: calls.append(1) or original(*given)
    )
    tokens = TOKENS[:3, :7]  # another shape: nothing is traced already
    jmat.run(gpt2, tokens, sites={"block.0.ffn": Constant(jnp.ones(16))}, stop=1)
    jmat.run(gpt2, tokens, sites={"block.0.ffn.hidden": Zero()}, stop=1)
    assert not calls
    jmat.run(gpt2, tokens, sites={"block.0.ffn.hidden": Scale(2.0)}, stop=1)
    assert calls


# --- errors ---------------------------------------------------------------------------------------

OUTSIDE = "site 'block.1': At position {} at .* is outside the text of row {}, which has {} tokens: expected -{} .. {}"


@pytest.mark.parametrize(
    ("sites", "message"),
    [
        ({"block.1": At(5, Zero())}, OUTSIDE.format(5, 0, 5, 5, 4)),
        ({"block.1": At(-5, Zero())}, OUTSIDE.format(-5, 2, 4, 4, 3)),
        ({"block.1": At(np.array([0, 0, 0, 8]), Zero())}, OUTSIDE.format(8, 3, 8, 8, 7)),
        ({"block.1": At([0, 4], Zero())}, OUTSIDE.format(4, 2, 4, 4, 3)),
        ({"block.1": At(np.array([0, 1]), Zero())}, r"site 'block.1': At is int64 \(2,\); expected integers \[4\] or"),
        ({"block.1": At(0.5, Zero())}, r"site 'block.1': At is float64 \(\)"),
        ({"block.1": At(0, At(1, Zero()))}, "site 'block.1': At inside At"),
        ({"block.1": At(0, Add(np.ones(3)))}, r"edit for site 'block.1' does not take its input float32 \[4, 8, 16\]"),
        ({"block.1": At(0, lambda x: x)}, "site 'block.1' is a function; expected a callable pytree.*jmat.Edit"),
        ({"block.1.attn": Add(np.ones(3))}, "edit for site 'block.1.attn' does not take its input"),
        ({"block.1.attn": Add(np.ones((2, 4, 8, 16)))}, "edit for site 'block.1.attn' (returned shape|does not take)"),
        ({"block.1.attn": Edit(lambda y: y[0])}, "edit for site 'block.1.attn' (returned shape|does not take)"),
        ({"block.1.attn": Edit(lambda y: y.nothing)}, "edit for site 'block.1.attn' does not take its input.*nothing"),
        ({"block.1.attn": Constant(np.ones(3))}, "replacement for site 'block.1.attn' does not take its input"),
        ({"embed": Constant(np.ones(3))}, "replacement for site 'embed' does not take its input"),
        ({"final_norm": Add(np.ones(3))}, "edit for site 'final_norm' does not take its input"),
        ({"logits": Add(np.ones(3))}, "edit for site 'logits' does not take its input"),
        ({"logits": Linear(np.ones((3, 3)))}, "replacement for site 'logits' does not take its input"),
        ({"block.1.attn": Zero(), "block.1.attn.q": Scale(2.0)}, "'block.1.attn.q' is never reached"),
        ({"block.1": Zero(), "block.1.ffn.hidden": Scale(2.0)}, "'block.1.ffn.hidden' is never reached"),
        ({"block.1.attn.z": Zero(), "block.1.attn.head.1": Scale(2.0)}, "'block.1.attn.head.1' is never reached"),
    ],
)  # fmt: skip
def test_a_wrong_edit_is_refused_in_one_sentence(gpt2, sites, message):
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(jmat.run)(gpt2, TOKENS, mask=MASK, sites=sites, keep="logits")


def test_edits_are_refused_before_they_run(gpt2):
    with pytest.raises(ValueError, match=r"'block.1': Edit takes a function of .*; got a float"):
        jmat.run(gpt2, TOKENS, sites={"block.1": Edit.tree_unflatten(2.0, (None,))})
    with pytest.raises(ValueError, match="'logits': At names tokens of texts"):
        jmat.logits(gpt2, jnp.ones((2, 16)), sites={"logits": At(-1, Zero())})


def test_positions_on_a_device_are_not_checked_and_never_reach_padding(gpt2):
    plain = values(gpt2, "block.1")["block.1"]
    kept = values(gpt2, "block.1", {"block.1": At(jnp.array([4, 5, -5, -9]), Add(7.0))})["block.1"]
    changed = np.abs(kept - plain).max(-1) > 1
    assert np.argwhere(changed).tolist() == [[0, 4]]


def test_an_edit_returns_floats(gpt2):
    with pytest.raises(
        ValueError, match=r"edit for site 'block\.1' returned bool; expected floats"
    ):
        jmat.run(gpt2, np.zeros((1, 4), int), sites={"block.1": jmat.Edit(lambda y: y > 0)})


SHARP = jax.tree_util.Partial(
    lambda factor, scores: jax.nn.softmax(factor * scores, axis=-1), np.float32(2)
)


@pytest.mark.parametrize("positions", [3, [1, 3], np.array([0, 2, 1, 5])])
def test_a_stand_in_for_the_pattern_at_some_queries_sees_their_masked_scores(gpt2, positions):
    """The softmax of doubled scores, at these queries alone."""
    tokens, pattern, T = TOKENS[:, :6], "block.1.attn.pattern", 6
    scores = np.asarray(
        jmat.run(gpt2, tokens, keep="block.1.attn.scores")[1]["block.1.attn.scores"], np.float64
    )
    scores = np.where(np.tril(np.ones((T, T), bool)), scores, -np.inf)
    plain, sharp = (np.exp(f * scores) / np.exp(f * scores).sum(-1, keepdims=True) for f in (1, 2))
    wanted = plain.copy()
    for row in ROWS:
        here = np.atleast_1d(positions[row] if isinstance(positions, np.ndarray) else positions)
        wanted[row][:, here] = sharp[row][:, here]
    found = jmat.run(gpt2, tokens, keep=pattern, sites={pattern: At(positions, SHARP)})[1][pattern]
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    whole = jmat.run(gpt2, tokens, keep=pattern, sites={pattern: SHARP})[1][pattern]
    np.testing.assert_allclose(whole, sharp, atol=1e-5)
