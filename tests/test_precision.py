"""Half-precision models round at the end: scores, softmax and logits are kept in
float32 on the way.
"""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jmat import models
from jmat.models import layers
from jmat.models.attention import attention_pattern, attention_scores, masked


def rounded(values):
    """The nearest bfloat16 numbers, as float64."""
    return np.asarray(jnp.asarray(values, jnp.float32).astype(jnp.bfloat16), np.float64)


def test_attention_scores_and_softmax_are_not_rounded():
    """Scores near 300, which bfloat16 holds to 1 only: their differences decide the
    weights.
    """
    rng = np.random.default_rng(0)
    T, K = 12, 16
    q, k, v = (
        rounded(rng.normal(mean, spread, (T, K))) for mean, spread in ((4, 0.5), (5, 0.3), (0, 1))
    )
    scores = q @ k.T
    assert scores.max() > 256
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = weights / weights.sum(-1, keepdims=True) @ v
    q, k, v = (jnp.asarray(x, jnp.bfloat16)[None, :, None] for x in (q, k, v))
    scores = masked(attention_scores(q, k, jnp.float32(1)), jnp.ones((1, T, T), bool))
    found = jnp.einsum("BHTS,BSHK->BTHK", attention_pattern(scores, v.dtype), v)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float64)[0, :, 0], expected, atol=0.03)


def test_norms_are_not_rounded():
    rng = np.random.default_rng(1)
    x = rounded(rng.normal(40, 1, (5, 64)))
    centred = x - x.mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    found = layers.layer_norm(jnp.asarray(x, jnp.bfloat16), None, None, 1e-5)
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=0.01, rtol=2**-8)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    found = layers.rms_norm(jnp.asarray(x, jnp.bfloat16), jnp.ones(64), 1e-5)
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=2**-8)


def test_logits_are_not_rounded():
    """Of both kinds of head, tied and untied."""
    rng = np.random.default_rng(2)
    for family, sizes in (("gpt2", {"n_embd": 16, "n_head": 2, "n_layer": 1}),
                          ("bert", {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1})):  # fmt: skip
        for tied in (True, False):
            hf = {
                "model_type": family,
                "vocab_size": 50,
                "tie_word_embeddings": tied,
                "initializer_range": 3.0,
                **sizes,
            }
            head = models.build(models.config_from_hf(hf), nnx.Rngs(0)).head
            for _, leaf in nnx.iter_graph(head):
                if isinstance(leaf, nnx.Param):
                    leaf.set_value(leaf.get_value().astype(jnp.bfloat16))
            x, table = rounded(rng.normal(size=(3, 16))), rounded(rng.normal(0, 3, (50, 16)))
            found = head(jnp.asarray(x, jnp.bfloat16), jnp.asarray(table, jnp.bfloat16))
            assert found.dtype == jnp.float32
            seen = np.asarray(found, np.float64)
            # digits that bfloat16 has not
            assert np.abs(seen - rounded(seen)).max() > 1e-3, (family, tied)
            if family == "gpt2":
                kernel = table.T if tied else np.asarray(head.out.kernel.get_value(), np.float64)
                np.testing.assert_allclose(seen, x @ kernel, rtol=1e-4, atol=1e-4)
