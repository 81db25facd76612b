"""Programs that XLA gets wrong by itself are right with the options they are given."""

import jax
import jax.numpy as jnp
import numpy as np

from jmat.runtime.compiling import batched_gradients


def test_gradients_of_a_norm_under_vmap_are_right():
    rng = np.random.default_rng(0)
    x, g = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((8, 32, 16), (16, 8, 32, 16))
    )

    def norm(x):
        z = x - x.mean(-1, keepdims=True)
        return z * jax.lax.rsqrt(jnp.square(z).mean(-1, keepdims=True) + 1e-5)

    def gradients(x, g):
        pull = jax.vjp(norm, x)[1]
        return jax.vmap(lambda each: pull(each)[0])(g)

    z = x - x.mean(-1, keepdims=True, dtype=np.float64)
    scale = 1 / np.sqrt(np.square(z).mean(-1, keepdims=True) + 1e-5)
    y = z * scale
    expected = scale * (g - g.mean(-1, keepdims=True) - y * (g * y).mean(-1, keepdims=True))
    ours = jax.jit(gradients, compiler_options=batched_gradients())(x, g)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)
