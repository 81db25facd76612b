"""The clock that timings are read from, faked: medians, turns, budgets and rates."""

import pytest

from jmat.runtime import timing


class Clock:
    """Time passes only while something works."""

    def __init__(self):
        self.now = 100.0
        self.calls = []

    def work(self, name, *seconds):
        """Takes each of these times in turn, the last one ever after."""
        left = list(seconds)

        def run():
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.now)
    return clock


def test_seconds_are_those_of_one_call(clock):
    assert timing.seconds(clock.work("a", 2.5)) == 2.5


def test_contenders_run_in_turn(clock):
    works = {"a": clock.work("a", 1.0, 2.0, 3.0), "b": clock.work("b", 4.0)}
    assert timing.in_turn(works, 3) == {"a": [1.0, 2.0, 3.0], "b": [4.0, 4.0, 4.0]}
    assert clock.calls == ["a", "b"] * 3


@pytest.mark.parametrize(
    ("budget", "rounds"), [(-1.0, 1), (0.0, 1), (4.0, 1), (5.0, 2), (9.9, 2), (10.0, 3), (1e9, 4)]
)
def test_no_round_begins_once_the_budget_is_used_up(clock, budget, rounds):
    """A round takes five seconds; a budget that is just used up allows one more."""
    taken = timing.in_turn({"a": clock.work("a", 2.0), "b": clock.work("b", 3.0)}, 4, budget=budget)
    assert {name: len(values) for name, values in taken.items()} == {"a": rounds, "b": rounds}


def test_medians_leave_the_first_call_out(clock):
    works = {"a": clock.work("a", 99.0, 1.0, 7.0, 2.0), "b": clock.work("b", 99.0, 5.0, 3.0, 9.0)}
    assert timing.medians(works, repeats=3) == {"a": 2.0, "b": 5.0}
    assert clock.calls == ["a", "b"] * 4
