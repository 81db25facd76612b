"""Rotations, and matrices in int8."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from jmat.maps.compact import Quantised, quantised, rotate, rotation
from jmat.maps.types import Linear


@pytest.mark.parametrize("width", [1, 5, 8, 12, 24, 64])
def test_a_rotation_keeps_lengths_and_is_its_own_inverse(width):
    H = rotation(width)
    np.testing.assert_allclose(H @ H, np.eye(width), atol=1e-12)
    np.testing.assert_allclose(H, H.T, atol=1e-12)
    x = np.random.default_rng(0).normal(size=(2, 3, width)).astype(np.float32)
    np.testing.assert_allclose(rotate(x), x @ H, atol=1e-5)
    if width & (width - 1) == 0:
        np.testing.assert_allclose(H, scipy.linalg.hadamard(width) / np.sqrt(width))


def test_a_matrix_in_int8_is_off_by_half_a_step_at_most():
    rng = np.random.default_rng(0)
    W = (rng.normal(size=(6, 9)) * np.geomspace(1e-3, 1e3, 6)[:, None]).astype(np.float32)
    W[2] = 0
    small = quantised(Linear(W, rng.normal(size=9).astype(np.float32)))
    assert isinstance(small.W, Quantised)
    assert small.W.values.dtype == jnp.int8
    step = np.abs(W).max(1, keepdims=True) / 127
    assert (np.abs(np.asarray(small.W.astype(jnp.float32)) - W) <= 0.5001 * step).all()
    assert np.abs(np.asarray(small.W.values)).max(1).tolist() == [127, 127, 0, 127, 127, 127]
    x = rng.normal(size=(3, 6)).astype(np.float32)
    expected = x @ np.asarray(small.W.astype(jnp.float32)) + np.asarray(small.bias)
    np.testing.assert_allclose(jax.jit(lambda f, x: f(x))(small, x), expected, rtol=1e-5, atol=1e-3)
