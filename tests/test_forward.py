"""Properties of the forward pass that hold whatever the weights are."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmat
from jmat import Linear, checkpoint
from jmat.models import attention, layers
from tests import hf
from tests.programs import programs

CASES = {
    "gpt2": hf.gpt2("forward", n_layer=3),
    "bert": hf.bert("forward", num_hidden_layers=3),
}
DECODER = hf.bert("decoder", num_hidden_layers=3, is_decoder=True, model="BertLMHeadModel")
rng = np.random.default_rng(0)
TOKENS = rng.integers(0, 37, (3, 6), dtype=np.int32)
# The same texts with three tokens of padding: on the right, on the left, on both sides.
MASK = np.array([[1] * 6 + [0] * 3, [0] * 3 + [1] * 6, [0, 0] + [1] * 6 + [0]], bool)
PADDED = rng.integers(0, 37, (3, 9), dtype=np.int32)
PADDED[MASK] = TOKENS.ravel()


@pytest.fixture(scope="module", params=CASES)
def model(request):
    return hf.ours(CASES[request.param])


@pytest.fixture(scope="module")
def gpt2():
    return hf.ours(CASES["gpt2"])


def close(x, y, atol=1e-5):
    np.testing.assert_allclose(x, y, rtol=0, atol=atol)


def matrix(seed=0):
    return Linear(jax.random.normal(jax.random.key(seed), (16, 16)))


def poisoned(model, part):
    """The model with NaN in all parameters of one part, by the beginning of their path."""
    params = checkpoint.parameters(model)
    bad = {
        path: jnp.full_like(value, jnp.nan)
        for path, value in params.items()
        if path.startswith(part)
    }
    assert bad
    return checkpoint.with_parameters(model, params | bad)


def flops(model, **options):
    """What one pass over a stream costs, before any optimisation by the compiler."""
    stream = jnp.zeros((1, 6, 16))
    return (
        jax.jit(lambda x: jmat.run(model, x, **options)[0])
        .lower(stream)
        .cost_analysis()
        .get("flops", 0.0)
    )


# --- what depends on what -------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*CASES.values(), DECODER], ids=lambda case: case.name)
def test_a_causal_model_sees_nothing_later_and_a_bidirectional_one_everything(case):
    model = hf.ours(case)
    stream = jax.random.normal(jax.random.key(0), (1, 6, 16))
    jacobian = jax.jacobian(lambda x: jmat.run(model, x)[0][0].sum(-1))(stream)  # [T, 1, T, D]
    depends = jnp.abs(jacobian[:, 0]).max(-1) > 1e-8
    causal = case.name != "bert-forward"
    np.testing.assert_array_equal(
        depends, np.tril(np.ones((6, 6), bool)) if causal else np.ones((6, 6), bool)
    )


def test_padding_on_either_side_changes_nothing(model):
    keep = ("embed", "block.1.attn", "block.2", "logits")
    _, expected = jmat.run(model, TOKENS, keep=keep)
    _, padded = jmat.run(model, PADDED, mask=MASK, keep=keep)
    for site in keep:
        close(padded[site][MASK].reshape(expected[site].shape), expected[site], atol=3e-5)
    other = np.where(MASK, PADDED, (PADDED + 5) % 37).astype(np.int32)
    _, with_other_padding = jmat.run(model, other, mask=MASK, keep=keep)
    for site in keep:
        np.testing.assert_array_equal(with_other_padding[site][MASK], padded[site][MASK])


def test_packed_texts_are_blind_to_one_another(model):
    _, apart = jmat.run(model, PADDED, mask=MASK, keep=("logits",))
    # All three texts in one row, longer than the model's positions, with padding at its ends and in
    # between.
    segments = np.pad(np.concatenate([(k + 1) * MASK[k] for k in range(3)]), 1)[None].astype(
        np.int32
    )
    assert segments.size > model.config.num_positions
    row = np.pad(PADDED.ravel(), 1)[None]
    _, packed = jmat.run(model, row, segments=segments, keep=("logits",))
    close(packed["logits"][0][segments[0] > 0], apart["logits"][MASK], atol=3e-5)


def test_positions_count_from_the_first_real_token(gpt2):
    _, expected = jmat.run(gpt2, PADDED, mask=MASK, keep=("logits",))
    positions = np.where(MASK, np.cumsum(MASK, axis=1) - 1, 0).astype(np.int32)
    _, given = jmat.run(gpt2, PADDED, mask=MASK, positions=positions, keep=("logits",))
    np.testing.assert_array_equal(given["logits"][MASK], expected["logits"][MASK])
    _, other = jmat.run(gpt2, PADDED, mask=MASK, positions=positions[:, ::-1], keep=("logits",))
    assert not np.allclose(other["logits"][MASK], expected["logits"][MASK], atol=1e-2)


# --- stretches ------------------------------------------------------------------------------------


def test_two_stretches_are_one(model):
    tokens = jnp.asarray(PADDED)  # which are run at their own length, as streams are
    expected, at = jmat.run(model, tokens, mask=MASK, keep=("logits", "block.0", "embed"))
    close(jmat.run(model, PADDED, mask=MASK)[0], expected)
    for k in range(4):
        x, _ = jmat.run(model, tokens, mask=MASK, stop=k)
        y, kept = jmat.run(model, x, mask=MASK, start=k, keep=("logits",))
        np.testing.assert_array_equal(y, expected)
        np.testing.assert_array_equal(kept["logits"], at["logits"])
        if k < 2:
            np.testing.assert_array_equal(x, at["block.0" if k else "embed"])
    np.testing.assert_array_equal(jmat.logits(model, expected), at["logits"])


def test_jit_is_eager(model):
    keep = ("block.1.attn", "block.1.ln_2", "block.1.ffn", "logits")
    compiled = jmat.run(model, PADDED, mask=MASK, keep=keep)
    with jax.disable_jit():
        eager = jmat.run(model, PADDED, mask=MASK, keep=keep)
    jax.tree.map(lambda x, y: close(x, y, atol=3e-5), compiled, eager)


def test_it_runs_inside_a_jitted_function(gpt2):
    expected, _ = jmat.run(gpt2, TOKENS)
    close(
        jax.jit(lambda model, tokens: jmat.run(model, tokens)[0])(gpt2, jnp.asarray(TOKENS)),
        expected,
    )


def test_read_at_is_gather(gpt2):
    keep = (
        "embed",
        "block.0.attn.head.1",
        "block.0.ffn.in",
        "block.1",
        "block.2.mid",
        "final_norm.in",
        "logits",
    )
    sites = {"block.1": matrix()}
    x, full = jmat.run(gpt2, TOKENS, keep=keep, sites=sites)
    for where in (np.array([0, 5, 2]), np.array([[0, 0], [5, 1], [2, 4]])):
        y, read = jmat.run(gpt2, TOKENS, keep=keep, sites=sites, read_at=where)
        np.testing.assert_array_equal(y, x)
        index = where.reshape(3, -1, 1)
        for site in keep:
            expected = np.take_along_axis(np.asarray(full[site]), index, axis=1).reshape(
                *where.shape, -1
            )
            close(read[site], expected, atol=3e-5)


# --- surgery costs nothing ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("site", "part"),
    [
        ("block.1.attn", "blocks.1.attn"),
        ("block.1.ffn", "blocks.1.ffn"),
        ("block.1.ln_1", "blocks.1.ln_1"),
        ("block.1.ln_2", "blocks.1.ln_2"),
        ("block.1", "blocks.1"),
        ("final_norm", "final_norm"),
    ],
)
def test_a_replaced_part_is_not_used(gpt2, site, part):
    model = poisoned(gpt2, part)
    _, broken = jmat.run(model, TOKENS, keep=("logits",))
    assert not jnp.isfinite(broken["logits"]).any()
    _, mended = jmat.run(model, TOKENS, keep=("logits",), sites={site: matrix()})
    assert jnp.isfinite(mended["logits"]).all()


def test_a_replaced_part_is_not_computed(gpt2):
    D, F, T = 16, 64, 6
    whole, stand_in = flops(gpt2), 2 * T * D * D
    up_and_down = 2 * 2 * T * D * F
    saved = whole - flops(gpt2, sites={"block.1.ffn": matrix()})
    assert saved > up_and_down - stand_in
    projections_and_scores = 2 * T * (4 * D * D + 2 * T * D)
    saved = whole - flops(gpt2, sites={"block.1.attn": matrix()})
    assert saved > projections_and_scores - stand_in
    block = (whole - flops(gpt2, stop=0)) / 3
    assert whole - flops(gpt2, sites={"block.1": matrix()}) == pytest.approx(
        block - stand_in, rel=0.02
    )
    assert whole - flops(gpt2, stop=2) == pytest.approx(block, rel=0.02)


def test_a_replaced_part_is_not_even_traced(gpt2, monkeypatch):
    for part in (attention.Attention, layers.FeedForward, layers.LayerNorm):
        monkeypatch.setattr(part, "__call__", lambda *_: pytest.fail("called"))
    sites = {
        f"block.{i}.{part}": matrix() for i in range(3) for part in ("ln_1", "attn", "ln_2", "ffn")
    }
    other_shape = TOKENS[:1, :5]  # so that nothing is traced already
    jmat.run(gpt2, other_shape, sites=sites | {"final_norm": matrix()}, keep=("logits",))
    with pytest.raises(pytest.fail.Exception, match="called"):
        jmat.run(gpt2, other_shape)


def test_a_replaced_head_is_not_computed(gpt2):
    keep_heads = {"keep": ("block.1.attn.head.0",)}
    one_head = 2 * 6 * (3 * 16 * 4 + 2 * 6 * 4)
    stand_in = Linear(jnp.ones((16, 4)))
    saved = flops(gpt2, **keep_heads) - flops(
        gpt2, sites={"block.1.attn.head.2": stand_in}, **keep_heads
    )
    assert saved > one_head - 2 * 6 * 16 * 4


def test_other_values_of_a_replacement_compile_nothing(gpt2):
    def pass_with(seed):
        sites = {
            "block.1.ffn": matrix(seed),
            "block.0.attn": matrix(seed + 1),
            "block.2": matrix(seed + 2),
        }
        return jmat.run(gpt2, TOKENS, sites=sites, keep=("block.1.mid", "logits"))

    pass_with(0)
    before = programs()
    pass_with(10)
    assert programs() == before


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_a_sweep_over_layers_compiles_the_same_programs_at_any_depth(family):
    def compiled(layers, width):  # widths that nothing else has: no program is there already
        names = {"gpt2": ("n_layer", "n_embd"), "bert": ("num_hidden_layers", "hidden_size")}[
            family
        ]
        model = hf.ours(
            getattr(hf, family)("sweep", **dict(zip(names, (layers, width), strict=True)))
        )
        stand_in = Linear(jnp.eye(width))
        before = programs()
        for i in range(layers):
            x, _ = jmat.run(model, TOKENS, stop=i, keep=("embed",))
            jmat.run(model, x, start=i, keep=("logits",))
            jmat.run(model, TOKENS, sites={f"block.{i}.ffn": stand_in}, keep=(f"block.{i}.attn",))
            jmat.run(model, TOKENS, sites={f"block.{i}": stand_in})
        return programs() - before

    assert compiled(5, width=40) == compiled(2, width=28) > 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"sites": {"block.1.ffn": Linear(jnp.eye(7))}},
            "the replacement for site 'block.1.ffn' does not take its input",
        ),
        ({"sites": {"block.1.ffn": Linear(jnp.ones((16, 7)))}}, "'block.1.ffn' returned shape"),
        ({"sites": {"block.2": Linear(jnp.ones((16, 7)))}}, "'block.2' returned shape"),
    ],
)
def test_misuse_is_one_sentence_that_names_the_site(given, message):
    model = hf.ours(CASES["gpt2"])
    with pytest.raises(ValueError, match=message):
        jmat.run(model, TOKENS, **given)


# --- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_narrow_dtypes_are_near_float32_and_predict_in_float32(dtype):
    for case in (CASES["gpt2"], CASES["bert"]):
        wide, narrow = hf.ours(case), hf.ours(case, dtype=dtype)
        _, expected = jmat.run(wide, TOKENS, keep=("block.1.attn", "logits"))
        x, kept = jmat.run(narrow, TOKENS, keep=("block.1.attn", "logits"))
        assert {x.dtype, kept["block.1.attn"].dtype} == {jnp.dtype(dtype)}
        assert kept["logits"].dtype == jnp.float32
        unit = jnp.finfo(dtype).eps * float(jnp.abs(expected["logits"]).max())
        assert 0 < float(jnp.abs(kept["logits"] - expected["logits"]).max()) < 20 * unit
        # A stream that comes from elsewhere in float32 goes on in the model's dtype.
        stream = jnp.ones((3, 6, 16))
        y, kept = jmat.run(narrow, stream, start=1, keep=("logits",))
        assert y.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(jmat.logits(narrow, y.astype(jnp.float32)), kept["logits"])


# --- bad input ------------------------------------------------------------------------------------


def changed(index, value):
    tokens = TOKENS.copy()
    tokens[index] = value
    return tokens


STREAM = np.zeros((3, 6, 16), np.float32)
POSITIONS = np.tile(np.arange(6), (3, 1))


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        (changed((1, 2), 37), {}, r"token id 37 at \(1, 2\) is outside the model's range 0 .. 36"),
        (changed((0, 5), -1), {}, r"token id -1 at \(0, 5\)"),
        (
            np.zeros((1, 17), np.int32),
            {},
            r"a text has 17 tokens; the model has positions for 16: cut the text",
        ),
        (np.zeros((1, 20), np.int32), {"mask": np.arange(20)[None] > 1}, r"a text has 18 tokens"),
        (np.zeros((2, 0), np.int32), {}, r"no token to run the model on"),
        (TOKENS[0], {}, r"inputs are int32 \(6,\); expected token ids \[B, T\]"),
        (
            TOKENS.astype(np.float32),
            {},
            r"inputs are float32 \(3, 6\); expected tokens \[B, T\] or a stream",
        ),
        (STREAM[..., :15], {}, r"inputs are float32 \(3, 6, 15\); expected .*\[B, T, 16\]"),
        (TOKENS, {"start": 1}, r"expected the stream \[B, T, 16\] that enters block 1"),
        (STREAM, {"start": 4}, r"start=4, stop=3: expected 0 <= start <= stop <= 3"),
        (STREAM, {"start": 2, "stop": 1}, r"start=2, stop=1"),
        (TOKENS, {"start": -1}, r"start=-1"),
        (TOKENS, {"stop": 4}, r"stop=4"),
        (TOKENS, {"mask": np.ones((3, 5), bool)}, r"mask has shape \(3, 5\); expected \(3, 6\)"),
        (TOKENS, {"mask": np.zeros((3, 6), np.float32)}, r"mask is float32; expected booleans"),
        (TOKENS, {"mask": np.ones((3, 6), np.int64)}, r"mask is int64; expected booleans"),
        (
            TOKENS,
            {"segments": np.ones((3, 6), np.float32)},
            r"segments is float32; expected integers",
        ),
        (TOKENS, {"mask": TOKENS > 1, "segments": TOKENS}, r"either mask or segments"),
        (
            TOKENS,
            {"positions": POSITIONS + 11},
            r"row 0 reaches position 16, and the model has positions 0 .. 15",
        ),
        (TOKENS, {"read_at": np.array([0, 6, 0])}, r"read_at position 6 at \(1,\) is outside"),
        (
            TOKENS,
            {"read_at": np.array([0, 1])},
            r"read_at is int64 \(2,\); expected integers \[3\]",
        ),
        (TOKENS, {"read_at": np.zeros(3)}, r"read_at is float64"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(gpt2, inputs, options, message):
    # as users call it: without the test suite's checks of annotations
    unchecked = inspect.unwrap(jmat.run)
    with pytest.raises(ValueError, match=message):
        unchecked(gpt2, inputs, **options)


def test_type_ids_are_checked():
    model = hf.ours(hf.bert("types", type_vocab_size=3))
    with pytest.raises(
        ValueError, match=r"type id 3 at \(0, 0\) is outside the model's range 0 .. 2"
    ):
        jmat.run(model, TOKENS, type_ids=np.full_like(TOKENS, 3))


def test_logits_refuses_what_is_no_stream(gpt2):
    for wrong in (np.zeros((2, 15), np.float32), np.zeros((2, 16), np.int32)):
        with pytest.raises(ValueError, match=r"expected a stream \[..., 16\]"):
            inspect.unwrap(jmat.logits)(gpt2, wrong)
