"""The law of the next token against transformers' processors, and what is drawn by it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jmat.decode.sample import checked_law, draw, processed

LAWS = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_k": 1000},
    {"temperature": 1.5, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.01},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 60, "top_p": 0.999},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.2},
    {"temperature": 1.0, "repetition_penalty": 0.7},
]


def law(temperature=0.0, top_k=None, top_p=None, min_p=None, repetition_penalty=None):
    return checked_law(temperature, top_k, top_p, min_p, repetition_penalty)


@pytest.mark.parametrize("options", LAWS, ids=str)
def test_logits_are_processed_as_by_transformers(options):
    rng = np.random.default_rng(0)
    logits = (3 * rng.standard_normal((4, 60))).astype(np.float32)
    texts = rng.integers(0, 60, (4, 9))
    seen = np.zeros((4, 60), bool)
    np.put_along_axis(seen, texts, True, axis=1)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=60, n_embd=4, n_layer=1, n_head=1)
    )
    config = transformers.GenerationConfig(do_sample=True, **{"top_k": 0, **options})
    processors = model._get_logits_processor(config, input_ids_seq_length=9)
    expected = processors(torch.from_numpy(texts), torch.from_numpy(logits.copy()))
    expected = torch.log_softmax(expected, -1).numpy()
    found = processed(jnp.asarray(logits), jnp.asarray(seen), law(**options))
    found = np.asarray(jax.nn.log_softmax(found))
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected))
    finite = np.isfinite(expected)
    np.testing.assert_allclose(found[finite], expected[finite], atol=1e-5)


def test_as_likely_tokens_are_kept_together():
    logits = jnp.asarray([[2.0, 1.0, 1.0, 0.0]])
    found = processed(logits, None, law(temperature=1.0, top_k=2))
    assert np.isfinite(found).tolist() == [[True, True, True, False]]


def test_tokens_are_drawn_as_often_as_the_law_says():
    logits = jnp.asarray([2.0, 1.0, 0.0, -1.0, -2.0])
    options = law(temperature=0.8, top_k=4)
    count = 20_000
    rows = processed(jnp.tile(logits, (count, 1)), None, options)
    steps = jnp.zeros(count, jnp.int32)
    tokens = np.asarray(draw(rows, options, jax.random.key(0), steps))
    share = np.bincount(tokens, minlength=5) / count
    weights = np.exp(np.array([2.0, 1.0, 0.0, -1.0]) / 0.8)
    expected = np.append(weights / weights.sum(), 0)
    assert share[4] == 0
    chi = count * ((share[:4] - expected[:4]) ** 2 / expected[:4]).sum()
    assert chi < 16.3  # the 99.9 % point for 3 degrees of freedom


def test_draws_depend_on_row_and_step_alone():
    options, key = law(temperature=1.0), jax.random.key(1)
    logits = jax.random.normal(jax.random.key(2), (6, 50))
    steps = jnp.arange(6, dtype=jnp.int32)
    whole = draw(logits, options, key, steps)
    np.testing.assert_array_equal(draw(logits[:4], options, key, steps[:4]), whole[:4])
    alike = draw(jnp.zeros((40, 50)), options, key, jnp.full(40, 3))
    assert len(set(np.asarray(alike).tolist())) > 15
    later = draw(jnp.zeros((40, 50)), options, key, jnp.full(40, 4))
    assert (np.asarray(alike) != np.asarray(later)).any()


def test_neutral_options_are_no_part_of_the_program():
    assert law(1.0, None, 1.0, None, 1.0) == law(1.0)
    assert law().temperature is None


def test_a_small_temperature_takes_the_most_likely_token():
    logits = jnp.asarray([[9.0, 3.0, 20.0, 5.0], [-jnp.inf, 2.0, 1.0, 2.5]])
    law = checked_law(1e-30, None, None, None, None)
    found = draw(processed(logits, None, law), law, jax.random.key(0), jnp.zeros(2, jnp.int32))
    assert found.tolist() == [2, 3]
