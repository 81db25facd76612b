"""The kind `future_sum`: an affine map to the sum of a stream over a position and all
later ones.
"""

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression

import jmat
from jmat.capture.future import future_sums
from jmat.studies import map_zoo


@pytest.fixture(scope="module")
def expected(gpt2, gpt2_examples):
    """The sums at the examples to fit on, from every token's stream."""
    split = gpt2_examples.fit
    acts = jmat.capture(gpt2, split.with_examples(np.ones(len(split.tokens), bool)), "block.3")
    starts = split.starts
    return np.array(
        [
            acts["block.3"][starts[row] + at : starts[row] + split.lengths[row]].sum(0)
            for row, at in zip(split.rows, split.positions, strict=True)
        ]
    )


def test_sums_begin_at_the_example_and_end_with_its_text(gpt2, gpt2_examples, expected):
    found = future_sums(gpt2, gpt2_examples.fit, "block.3")
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_the_map_is_affine_least_squares_to_the_sums(gpt2, gpt2_examples, expected):
    X = jmat.capture(gpt2, gpt2_examples.fit, "block.0")["block.0"]
    fit = jmat.fit_map(gpt2, gpt2_examples.fit, 1, 4, kind="future_sum")
    exact = LinearRegression().fit(X.astype(np.float64), expected.astype(np.float64))
    error = np.asarray(fit.map(X)) - exact.predict(X)
    assert np.linalg.norm(error) < 1e-5 * np.linalg.norm(exact.predict(X))
    options = map_zoo.Options(kinds=("mat", "future_sum", "future_sum+int8"), layers=(1,))
    results = map_zoo.run(gpt2, gpt2_examples, options)
    np.testing.assert_allclose(results.maps["future_sum.1.4"].W, fit.map.W, rtol=0, atol=1e-4)
    plain = jmat.fit_map(gpt2, gpt2_examples.fit, 1, 4).map
    np.testing.assert_allclose(results.maps["mat.1.4"].W, plain.W, rtol=0, atol=1e-4)


def test_moments_alone_do_not_do():
    with pytest.raises(ValueError, match="stores no activations, which kind 'future_sum' needs"):
        map_zoo.Options(kinds=("future_sum",), route="streaming")
