"""Carries: least squares over stacked inputs of a token and the one before it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmat
from jmat.data.corpus import docs_sentences
from jmat.decode.draft import Earlier
from jmat.decode.drafting import Drafter, draft_tokens
from jmat.decode.passes import Rules, State, read_prompts
from jmat.decode.sample import Law
from jmat.maps.carry import Carry
from jmat.models.cache import new_cache


@pytest.fixture(scope="module")
def streams(gpt2, gpt2_examples):
    """h_2 and h_4 of all tokens, and which of them have one before."""
    split = gpt2_examples.fit
    split = split.with_examples(np.ones(len(split.tokens), bool))
    acts = jmat.capture(gpt2, split, ["block.1", "block.3"])
    return acts["block.1"], acts["block.3"], np.flatnonzero(split.positions > 0)


def solved(inputs, target):
    """Affine least squares in float64."""
    inputs = np.concatenate([inputs, np.ones((len(inputs), 1))], axis=1).astype(np.float64)
    weights = np.linalg.lstsq(inputs, target.astype(np.float64), rcond=None)[0]
    return weights[:-1], weights[-1]


def stacked(stream, state, later, both):
    parts = [stream[later], state[later - 1], stream[later - 1]]
    return np.concatenate(parts if both else parts[:2], axis=1)


@pytest.mark.parametrize("earlier", ["both", "final"])
@pytest.mark.parametrize(
    "rounds", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_it_is_least_squares_on_stacked_inputs(gpt2, gpt2_examples, streams, earlier, rounds):
    stream, final, later = streams
    both = earlier == "both"
    found = jmat.fit_carry(gpt2, gpt2_examples.fit, 2, earlier=earlier, rounds=rounds)
    states = [final]
    for _ in range(rounds):
        inputs = np.concatenate([stacked(stream, state, later, both) for state in states])
        weights, bias = solved(inputs, np.concatenate([final[later]] * len(states)))
        count, states = len(states), [final]
        for _ in range(count):  # what the map makes of h_L, one token more at a time
            state = final.copy()
            state[later] = stacked(stream, states[-1], later, both) @ weights + bias
            states.append(state)
    expected = stacked(stream, final, later, both) @ weights + bias
    got = found.map(stream[later], final[later - 1], stream[later - 1])
    assert np.abs(got - expected).max() < 2e-4 * np.abs(expected).max()
    assert (found.map.V is None) != both
    assert found.solution.n == len(later) * rounds
    assert f"Carry from layer 2 to the last one: full rank {64 * (3 if both else 2)}" in repr(found)


def test_texts_do_not_see_one_another(gpt2, gpt2_examples):
    """The order of the texts changes nothing, whether they come as tokens of one split or not."""
    split = gpt2_examples.fit
    turned = np.arange(split.num_sentences)[::-1]
    index = split.places(turned)
    other = type(split)(split.tokens[index], split.lengths[turned], split.positions[turned])
    one, two = (jmat.fit_carry(gpt2, each, 3).map for each in (split, other))
    for name in ("W", "U", "V", "bias"):
        np.testing.assert_allclose(getattr(one, name), getattr(two, name), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layer": 0}, "a carry from layer 0: expected 1 to 3"),
        ({"layer": 4}, "a carry from layer 4: expected 1 to 3"),
        ({"layer": 1.5}, "layer=1.5: expected a whole number"),
        ({"rounds": 0}, "rounds=0"),
        ({"earlier": "none"}, "earlier='none'"),
        ({"inputs": ["a text"]}, "texts need a tokenizer"),
    ],
)
def test_bad_arguments(gpt2, gpt2_examples, given, message, unchecked):
    given = {"inputs": gpt2_examples.fit, "layer": 2, **given}
    with pytest.raises(ValueError, match=message):
        jmat.fit_carry(gpt2, given.pop("inputs"), given.pop("layer"), **given)


def test_texts_of_one_token_have_no_pair(gpt2, gpt2_examples):
    split = gpt2_examples.fit
    single = type(split)(split.tokens[:3], np.ones(3, np.int32), np.zeros(3, np.int32))
    with pytest.raises(ValueError, match="no text has two tokens"):
        jmat.fit_carry(gpt2, single, 2)


def test_a_masked_model_is_refused(bert, bert_examples):
    with pytest.raises(ValueError, match="a masked model"):
        jmat.fit_carry(bert, bert_examples.fit, 2)


def test_a_carry_stands_in_for_no_part(gpt2, unchecked):
    eye = np.eye(64, dtype=np.float32)
    with pytest.raises(ValueError, match=r"block\.1"):
        jmat.run(gpt2, np.asarray([[5]]), sites={"block.1": Carry(eye, eye, eye[0])})


def test_drafts_take_the_streams_that_the_carry_made(gpt2):
    """A carry that looks at little else than h_L of the token before."""
    rng = np.random.default_rng(0)
    W, U, V = (rng.normal(size=(64, 64)).astype(np.float32) / size for size in (80, 8, 80))
    carry = Carry(W, U, np.zeros(64, np.float32), V)
    final, before = rng.normal(size=(2, 64)).astype(np.float32)
    text = [5, 9, 30, 11]
    _, cache = read_prompts(
        gpt2, np.asarray([text[:3]]), np.array([3], np.int32), new_cache(gpt2, 1, 32), {}, 8
    )
    state = State(
        cache=cache,
        tokens=jnp.asarray([text[3:]]),
        scores=None,
        written=jnp.ones(1, jnp.int32),
        going=jnp.ones(1, bool),
        seen=None,
    )
    rules = Rules(Law(), {}, np.full(1, -1, np.int32), np.int32(20), jax.random.key(0))
    earlier = Earlier(jnp.asarray(final)[None, None], jnp.asarray(before)[None, None])
    drafter = Drafter(carry, np.float32(0), None)
    drafted = draft_tokens(gpt2, state, rules, drafter, earlier, layer=2, tokens=5)
    for _ in range(5):
        _, acts = jmat.run(gpt2, np.asarray([text]), keep="block.1")
        stream = np.asarray(acts["block.1"])[0, -1]
        final, before = carry(stream, final, before), stream
        text.append(int(jmat.logits(gpt2, final).argmax()))
    assert drafted.tokens[0].tolist() == text[4:]
    assert len(set(text[4:])) > 1


@pytest.mark.slow
def test_it_agrees_with_the_model_more_often_than_a_map_of_the_stream_alone():
    model, tokenizer = jmat.load("gpt2-docs")
    texts = docs_sentences()
    held_out = jmat.capture(
        model, texts[9000:9200], [f"block.{i}" for i in range(8)], tokenizer=tokenizer
    )
    later = np.flatnonzero(held_out.position > 0)
    final = held_out["block.7"]
    own = np.asarray(jmat.logits(model, final[later]).argmax(-1))
    for layer in (1, 2, 4, 6, 7):
        affine = jmat.fit_map(model, texts[:1500], layer, 8, tokenizer=tokenizer, kind="affine").map
        carry = jmat.fit_carry(model, texts[:1500], layer, tokenizer=tokenizer).map
        stream = held_out[f"block.{layer - 1}"]
        guesses = affine(stream[later]), carry(stream[later], final[later - 1], stream[later - 1])
        without, with_it = (np.asarray(jmat.logits(model, each).argmax(-1)) for each in guesses)
        assert (with_it == own).mean() > (without == own).mean()
