"""Calibrated thresholds: the statistics by hand, and on texts of a tiny model."""

import numpy as np
import pytest
from scipy import stats

import jmat
from jmat.studies.decoding import calibration
from jmat.studies.decoding.calibration import calibrate_exits, exact_interval
from jmat.studies.early_exit.thresholds import fixed_sequence


def test_a_fixed_sequence_ends_at_the_first_that_is_not_rejected():
    asked = []

    def p_value(k):
        asked.append(k)
        return [0.0, 0.2, 0.01, 0.03][k]

    assert fixed_sequence([0.1, 0.2, 0.3, 0.4], p_value, 0.05) == 0.3
    assert asked == [3, 2, 1]
    assert fixed_sequence([0.1, 0.2], lambda k: 0.5, 0.05) is None


def test_an_unsafe_threshold_is_seldom_chosen():
    """Of three thresholds, texts fail too often with the lower two: over 600 calibrations
    one of these is chosen at most as often as α says.
    """
    rng = np.random.default_rng(0)
    n, epsilon, alpha = 60, 0.1, 0.2
    failures = [0.3, 0.11, 0.04]
    chosen = []
    for _ in range(600):
        failed = rng.binomial(n, failures)
        p_values = stats.binom.cdf(failed, n, epsilon)
        chosen.append(fixed_sequence([0.1, 0.2, 0.3], p_values.__getitem__, alpha))
    assert np.mean([each in (0.1, 0.2) for each in chosen]) < alpha + 0.03
    assert np.mean([each is not None for each in chosen]) > 0.5


def test_exact_intervals():
    assert exact_interval(0, 30)[0] == 0
    assert exact_interval(0, 30)[1] == pytest.approx(1 - 0.025 ** (1 / 30))
    low, high = exact_interval(7, 30)
    assert stats.binom.sf(6, 30, low) == pytest.approx(0.025)
    assert stats.binom.cdf(7, 30, high) == pytest.approx(0.025)


@pytest.mark.slow
@pytest.mark.parametrize("against", ["prefix", "text"])
def test_a_threshold_is_chosen_and_verified(gpt2, gpt2_examples, against):
    exits = jmat.fit_exits(gpt2, gpt2_examples.fit, [1, 2, 3], 0.5)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, gpt2.config.vocab_size, size=4) for _ in range(40)]
    grid = [0.01, 0.05, 0.2, 0.5, 1.0]
    settings = {"delta": 0.2, "epsilon": 0.2, "alpha": 0.1, "max_new_tokens": 10}
    found = calibrate_exits(gpt2, prompts, exits, grid, against=against, **settings)
    assert found.exits.threshold in grid
    tested = [row for row in found.rows if row["metric"] == "failed"]
    assert [row["threshold"] for row in tested[:-1]] == grid[::-1][: len(tested) - 1]
    for row in tested[:-1]:
        assert row["part"] == "calibration"
        p_value = stats.binom.cdf(round(row["value"] * 20), 20, 0.2)
        assert (p_value <= 0.1) == (row["threshold"] >= found.exits.threshold)
    last = tested[-1]
    assert (last["part"], last["threshold"], last["n"]) == (
        "other prompts",
        found.exits.threshold,
        20,
    )
    plain, mine = (
        jmat.generate(gpt2, prompts[1::2], max_new_tokens=10, stop_tokens=[], exits=each)
        for each in (None, found.exits)
    )
    if against == "text":
        differ = [np.mean(a != b) for a, b in zip(mine.tokens, plain.tokens, strict=True)]
        assert last["value"] == pytest.approx(np.mean(np.array(differ) > 0.2))
    assert f"threshold {found.exits.threshold:g}; on other prompts" in repr(found)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"delta": 1.0}, "delta=1.0: expected a share from 0 to below 1"),
        ({"epsilon": 0}, "epsilon=0, alpha=0.05: expected shares above 0"),
        ({"against": "rouge"}, "against='rouge': expected one of text, prefix"),
        ({"thresholds": []}, "thresholds: expected one at least"),
        ({"thresholds": [0.5, 1.5]}, "threshold=1.5: expected a number from 0 to 1"),
        ({}, "4 prompts, every second of which calibrates: .* takes 57 at least"),
        (
            {"exits": jmat.Exits({1: jmat.Identity()}, confidence="fixed")},
            "expected jmat.Exits with a confidence",
        ),
    ],
)
def test_bad_settings(gpt2, settings, message, unchecked, monkeypatch):
    monkeypatch.setattr(calibration, "generate", lambda *_, **__: pytest.fail("texts were written"))
    given = {"exits": jmat.Exits({1: jmat.Identity()}, 0.5), "thresholds": [0.5], **settings}
    with pytest.raises(ValueError, match=message):
        calibrate_exits(gpt2, [[5], [6], [7], [8]], **given)
