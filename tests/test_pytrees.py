"""Types with as many fields have different structures, so that no compiled program of
one serves the other.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

import jmat
from jmat.maps.compact import Diagonal, Hadamard, LowRank, Quantised


def test_structures_differ_where_types_do():
    one, two = jnp.ones(4), jnp.ones(4)
    nodes = [
        jmat.Add(one),
        jmat.Scale(one),
        jmat.Constant(one),
        Diagonal(one, two),
        Hadamard(one, two),
    ]
    nodes += [
        jmat.Linear(one, two),
        Quantised(one, two),
        jmat.Zero(),
        jmat.Zero(3),
        jmat.Identity(),
    ]
    for first, second in itertools.combinations(nodes, 2):
        assert jax.tree.structure(first) != jax.tree.structure(second), (first, second)
    for node in nodes:
        again = jax.tree.map(lambda leaf: leaf, node)
        assert type(again) is type(node)
        assert jax.tree.structure(again) == jax.tree.structure(node)


def test_leaves_have_the_names_of_their_fields():
    found = jax.tree_util.tree_leaves_with_path(
        LowRank(np.ones((4, 1)), np.ones((1, 4)), np.ones(4))
    )
    assert [jax.tree_util.keystr(path) for path, _ in found] == [".A", ".B", ".bias"]


def test_a_program_is_not_taken_for_another_types():
    run = jax.jit(lambda site, x: site(x))
    x, s = jnp.arange(8.0), jnp.arange(8.0) + 1
    for _ in range(2):
        assert np.array_equal(run(Diagonal(s), x), x * s)
        np.testing.assert_allclose(run(Hadamard(s), x), Hadamard(s)(x), rtol=1e-5, atol=1e-5)
