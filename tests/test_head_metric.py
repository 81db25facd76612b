"""The metric of the head, by which low-rank maps of logits are fitted, against products
in float64.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jmat.forward import logits
from jmat.maps.metric import head_metric
from jmat.models.layers import Head, LayerNorm, NoNorm, RMSNorm


def test_the_metric_of_a_linear_head(gpt2):
    U = (
        np.asarray(gpt2.final_norm.scale[...], np.float64)[:, None]
        * np.asarray(gpt2.embed.tokens.table[...]).T
    )
    gamma = U @ U.T
    gamma += 1e-6 * np.trace(gamma) / len(gamma) * np.eye(len(gamma))
    metric = head_metric(gpt2, np.zeros(len(gamma)))
    root, inverse = np.asarray(metric.root), np.asarray(metric.inverse_root)
    np.testing.assert_allclose(root @ root, gamma, rtol=0, atol=1e-6 * np.abs(gamma).max())
    np.testing.assert_allclose(root @ inverse, np.eye(len(gamma)), rtol=0, atol=1e-8)


@pytest.mark.parametrize("norm", ["rms", "none", "plain", "projected"])
def test_the_metric_of_other_norms_and_heads(gpt2, norm):
    """The scale of an RMS norm is stored less its offset; a norm without a scale, and
    none; a head that projects.
    """
    rng = np.random.default_rng(0)
    model = nnx.clone(gpt2)
    U, D = np.asarray(gpt2.embed.tokens.table[...], np.float64).T, gpt2.config.width
    scale = rng.uniform(0.5, 2, D)
    if norm == "rms":
        model.final_norm = RMSNorm(dataclasses.replace(gpt2.config, norm_scale_offset=1.0))
        model.final_norm.scale[...] = jnp.asarray(scale - 1, jnp.float32)
    elif norm == "none":
        model.final_norm, scale = NoNorm(gpt2.config), np.ones(D)
    elif norm == "plain":
        model.final_norm, scale = (
            LayerNorm(dataclasses.replace(gpt2.config, norm_affine=False)),
            np.ones(D),
        )
    else:
        scale = np.asarray(gpt2.final_norm.scale[...], np.float64)
        model.head = Head(dataclasses.replace(gpt2.config, embed_width=48), rngs=nnx.Rngs(0))
        model.embed.tokens.table = nnx.Param(jnp.asarray(rng.normal(size=(768, 48)), jnp.float32))
        U = (
            np.asarray(model.head.project.kernel[...], np.float64)
            @ np.asarray(model.embed.tokens.table[...]).T
        )
    gamma = scale[:, None] * (U @ U.T) * scale
    gamma += 1e-6 * np.trace(gamma) / D * np.eye(D)
    root = np.asarray(head_metric(model, np.zeros(D)).root)
    np.testing.assert_allclose(root @ root, gamma, rtol=0, atol=1e-6 * np.abs(gamma).max())


def test_the_metric_of_a_masked_head_is_that_of_its_derivative(bert):
    D = bert.config.width
    mean = np.random.default_rng(0).normal(size=D)
    step = np.random.default_rng(1).normal(size=D)
    at = [
        np.asarray(logits(bert, (mean + sign * 0.01 * step).astype(np.float32)), np.float64)
        for sign in (1, -1)
    ]
    expected = np.square((at[0] - at[1]) / 0.02).sum()
    root = np.asarray(head_metric(bert, mean).root)
    assert np.square(step @ root).sum() == pytest.approx(expected, rel=1e-2)
