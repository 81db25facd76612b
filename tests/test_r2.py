"""r2 against scikit-learn, and what is left out of its variants."""

import numpy as np
import pytest
from sklearn.metrics import r2_score

from jmat.maps.types import Linear
from jmat.metrics.r2 import usual_coordinates
from jmat.studies.r2 import Target, r2_rows, resamples


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    streams = [
        rng.normal(size=(300, 6)).astype(np.float32) * np.array([1, 1, 1, 1, 1, 500], np.float32)
    ]
    streams.append(streams[0] @ rng.normal(size=(6, 6)).astype(np.float32) + 1)
    return streams, rng.integers(4, size=300)


def test_equals_scikit_learn(data):
    (x, y), positions = data
    rows = {row["metric"]: row for row in Target(y, resamples(positions, samples=20)).rows({}, x)}
    assert rows["r2"]["value"] == pytest.approx(r2_score(y, x), rel=1e-6)
    assert rows["r2_weighted"]["value"] == pytest.approx(
        r2_score(y, x, multioutput="variance_weighted"), rel=1e-6
    )
    later = positions > 0
    assert rows["r2_no_first"]["value"] == pytest.approx(r2_score(y[later], x[later]), rel=1e-6)
    assert rows["r2_no_first"]["n"] == later.sum() < rows["r2"]["n"]
    assert all(row["low"] <= row["value"] <= row["high"] for row in rows.values())


def test_outlier_coordinates_are_left_out(data):
    (x, _), positions = data
    assert usual_coordinates(x).tolist() == [True] * 5 + [False]
    predicted = x.copy()
    predicted[:, 5] = 0
    rows = {
        row["metric"]: row["value"]
        for row in Target(x, resamples(positions, samples=2)).rows({}, predicted)
    }
    assert rows["r2_no_outliers"] == pytest.approx(1)
    assert rows["r2"] < 0.9


def test_constant_coordinates_as_scikit_learn(data):
    (x, _), positions = data
    y = x.copy()
    y[:, 0], y[:, 1] = 3, 4
    predicted = y.copy()
    predicted[:, 1] = 4.5
    rows = {
        row["metric"]: row["value"]
        for row in Target(y, resamples(positions, samples=2)).rows({}, predicted)
    }
    assert rows["r2"] == pytest.approx(r2_score(y, predicted))


def test_rows_for_every_pair(data):
    streams, positions = data
    identity = Linear(np.eye(6, dtype=np.float32))
    rows = r2_rows(streams, {(0, 1): identity}, resamples(positions, samples=2))
    by_map = {row["map"]: row["value"] for row in rows if row["metric"] == "r2"}
    assert by_map["mat"] == pytest.approx(by_map["id"])
    assert {(row["layer"], row["target"]) for row in rows} == {(0, 1)}
