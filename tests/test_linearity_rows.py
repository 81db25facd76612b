"""Rows of linearity from numbers a token, worked out by hand: scores, histograms of
errors, kinds of token.
"""

import numpy as np
import pytest

from jmat.data.examples import Split
from jmat.maps.from_moments import Linearity
from jmat.studies.linearity.measure import Measured, PerToken, part_pairs, step_pairs
from jmat.studies.linearity.rows import error_rows, linearity_rows, next_steps, token_rows

LABELS = step_pairs(2, all_pairs=True) | part_pairs(1)
STEPS = [("embed", "block.0"), ("block.0", "block.1")]


def per_token(error, total):
    ones = np.ones(len(error), np.float32)
    return PerToken(
        np.float32(error), np.float32(total), ones, ones, ones, off_total=0.0, off_change=0.0
    )


def test_scores_come_under_their_names():
    found = Linearity(residual=1.0, total=4.0, contribution=2.0, n=11, dimensions=4)
    measured = Measured(dict.fromkeys(LABELS, found), {}, {}, np.arange(7), [0.25, 0.5, 0.125])
    rows = linearity_rows(measured, LABELS, {})
    expected = {
        "linearity": 0.75,
        "linearity_adjusted": 1 - 0.25 * 10 / 6,
        "linearity_without_residual": 0.5,
        "linearity_without_residual_adjusted": 1 - 0.5 * 10 / 6,
    }
    for label in LABELS.values():
        mine = [row for row in rows if {name: row.get(name) for name in ("map", "layer", "target")} == {
            "target": None, **label}]  # fmt: skip
        assert {row["metric"]: row["value"] for row in mine} == pytest.approx(expected), label
        assert {row["n"] for row in mine} == {11}
    shares = [
        (row["map"], row["layer"], row["value"]) for row in rows if row["metric"] == "anisotropy"
    ]
    assert shares == [("stream", 0, 0.25), ("stream", 1, 0.5), ("stream", 2, 0.125)]
    assert len(rows) == 4 * len(LABELS) + 3


def test_only_steps_to_the_next_layer_count_as_steps():
    rows = [
        {"map": "mat", "layer": 0, "target": 1},
        {"map": "mat", "layer": 0, "target": 2},
        {"map": "ffn", "layer": 0},
    ]
    assert next_steps(rows) == rows[:1]


def test_errors_fall_into_bins_of_their_share_of_the_mean_spread():
    # Against a mean spread of 2: 1e-9 (below all bins), 0.5, 0.5, 1.05, 1e5 (above all).
    error = 2 * np.array([1e-9, 0.5, 0.5, 1.05, 1e5])
    total = np.array([1.0, 3.0, 2.0, 2.0, 2.0])
    fitted = Linearity(residual=1.0, total=4.0, contribution=2.0, n=11, dimensions=4)
    each = per_token(error, total)
    measured = Measured(
        dict.fromkeys(LABELS, fitted), {}, dict.fromkeys(LABELS, each), np.arange(5), []
    )
    rows = error_rows(measured, LABELS)
    assert {(row["layer"], row["target"]) for row in rows} == {(0, 1), (1, 2)}
    mine = [(row["error_from"], row["error_to"], row["value"]) for row in rows if row["layer"] == 1]
    edges = 10.0 ** np.array([[-6, -5.75], [-0.5, -0.25], [0, 0.25], [1.75, 2]])
    np.testing.assert_allclose(mine, np.column_stack([edges, [0.2, 0.4, 0.2, 0.2]]), rtol=1e-9)
    assert {row["n"] for row in rows} == {5}


def test_kinds_of_token_are_ordered_by_their_mean_error_over_all_steps():
    """Tokens 5, 6 and 7 come ten times, token 8 nine times: too rarely."""
    ids = np.repeat([5, 6, 7, 8], [10, 10, 10, 9])
    read = np.arange(len(ids))[::-1]  # in another order than in the text
    of_kind = {
        ("embed", "block.0"): {5: 1.0, 6: 4.0, 7: 2.0, 8: 90.0},
        ("block.0", "block.1"): {5: 1, 6: 1, 7: 9, 8: 0},
    }
    fitted = Linearity(residual=1.0, total=4.0, contribution=2.0, n=11, dimensions=4)
    labels = step_pairs(2)
    each = {
        pair: per_token([of_kind[pair][k] for k in ids[read]], np.full(len(ids), 2.0))
        for pair in STEPS
    }
    split = Split(ids.astype(np.int32), np.array([len(ids)], np.int32), np.array([0], np.int32))
    rows = token_rows(
        Measured(dict.fromkeys(labels, fitted), {}, each, read, []), split, labels, str, count=2
    )
    found = [
        (row["extreme"], row["token"], row["token_id"], row["value"], row["n"]) for row in rows
    ]
    mean = {5: (1 / 2 + 1 / 2) / 2, 6: (4 / 2 + 1 / 2) / 2, 7: (2 / 2 + 9 / 2) / 2}
    assert found == [
        ("least_linear", "7", 7, pytest.approx(mean[7]), 10),
        ("least_linear", "6", 6, pytest.approx(mean[6]), 10),
        ("most_linear", "5", 5, pytest.approx(mean[5]), 10),
    ]
