"""`jmat.tune_draft`: what a model would accept, counted without drafting; costs; the choice."""

import numpy as np
import pytest

import jmat
from jmat.decode import tuning
from jmat.decode.acceptance import Texts, counted, read_texts, right_copies, right_guesses
from jmat.decode.costs import Costs, DraftStep, measure_costs, speed_up, tokens_a_cycle
from tests.test_speculate import prompts

WORDS = np.arange(120)


@pytest.fixture(scope="module")
def written(gpt2):
    ids = prompts(gpt2.config.vocab_size, (3, 11, 1, 6))
    return ids, jmat.generate(gpt2, ids, max_new_tokens=24, stop_tokens=[17, 230])


@pytest.fixture(scope="module")
def maps(gpt2, gpt2_examples):
    return {
        "affine": jmat.fit_map(gpt2, gpt2_examples.fit, 2, 4, kind="affine").map,
        "carry": jmat.fit_carry(gpt2, gpt2_examples.fit, 2).map,
    }


@pytest.mark.parametrize(
    ("kind", "words", "tokens"),
    [
        ("affine", None, 3),
        ("carry", WORDS, 3),
        pytest.param("carry", None, 4, marks=pytest.mark.slow),
        pytest.param("affine", WORDS, 1, marks=pytest.mark.slow),
    ],
)
def test_counts_are_those_of_drafting(gpt2, written, maps, kind, words, tokens):
    ids, plain = written
    texts = read_texts(gpt2, ids, plain.tokens, [2, 4])
    right = right_guesses(gpt2, texts, 2, maps[kind], 4, [None, words])[-1]
    found = jmat.generate(
        gpt2,
        ids,
        max_new_tokens=24,
        stop_tokens=[17, 230],
        draft=jmat.Draft(2, maps[kind], tokens=tokens, words=words),
    )
    for one, other in zip(counted(texts, right, tokens).counts, found.drafts, strict=True):
        assert one.tolist() == other.tolist()
    assert found.drafts.accepted.sum() > 0


@pytest.mark.parametrize("tokens", [1, 4])
def test_counts_are_those_of_copies(gpt2, written, tokens):
    ids, plain = written
    texts = read_texts(gpt2, ids, plain.tokens, [4])
    lookup = jmat.Lookup(tokens=tokens, longest=2)
    found = jmat.generate(gpt2, ids, max_new_tokens=24, stop_tokens=[17, 230], draft=lookup)
    right, there = right_copies(texts, lookup)
    counts = counted(texts, right, tokens, there)
    for one, other in zip(counts.counts, found.drafts, strict=True):
        assert one.tolist() == other.tolist()
    assert 0 < counts.share <= 1
    assert found.drafts.accepted.sum() > 0


def test_the_share_of_cycles_with_a_draft():
    """Two texts of three new tokens; the first has a draft in its second cycle alone."""
    texts = Texts(np.zeros(10, np.int32), np.array([5, 5]), np.array([2, 2]), {})
    right, drafts = np.zeros((10, 1), bool), np.zeros(10, bool)
    drafts[3] = True  # behind the second new token of the first text
    found = counted(texts, right, 1, drafts)
    assert [part.tolist() for part in found.counts] == [[2, 2], [1, 0], [0, 0]]
    assert found.share == 0.5
    right[3, 0] = True  # then its last token is a draft, and nothing comes behind it
    assert counted(texts, right, 1, drafts).counts.accepted.tolist() == [1, 0]


def test_the_formula_of_the_speed_up():
    """(1 − α^(γ+1)) / (1 − α), over γ c + v."""
    for accepted, tokens in ((0.6, 3), (0.0, 2), (0.97, 8)):
        expected = (1 - accepted ** (tokens + 1)) / (1 - accepted)
        assert tokens_a_cycle(accepted, tokens) == pytest.approx(expected)
    assert tokens_a_cycle(1.0, 4) == 5
    assert speed_up(2.4, 3, 0.2, 1.0) == pytest.approx(1.5)


def test_costs_are_seconds_of_each_program(gpt2, maps):
    drafts = {
        "affine": DraftStep(2, maps["affine"], None),
        "carry": DraftStep(2, maps["carry"], WORDS),
    }
    costs = measure_costs(
        gpt2, drafts, [(0, 2), (2, 2), (2, 2)], rows=2, length=9, room=32, turns=1
    )
    assert costs.plain > 0
    assert set(costs.drafts) == {"affine", "carry"}
    assert set(costs.checks) == {(0, 2), (2, 2)}
    assert all(value > 0 for value in (*costs.drafts.values(), *costs.checks.values()))


@pytest.fixture
def clock(monkeypatch):
    """Costs that are the same on every machine: a draft takes its share of the blocks."""

    def measured(model, drafts, checks, **given):
        L = model.config.layers
        steps = {name: (step.layer / L + (step.words is None)) / 8 for name, step in drafts.items()}
        return Costs(1.0, steps, {pair: clock_of[0] for pair in checks})

    clock_of = [1.0]
    monkeypatch.setattr(tuning, "measure_costs", measured)
    return clock_of


def tuned(gpt2, gpt2_examples, **given):
    ids = prompts(gpt2.config.vocab_size)
    given = {"max_new_tokens": 24, "race": 0, "words": [100], **given}
    return jmat.tune_draft(gpt2, ids, gpt2_examples.fit, **given)


def test_the_fastest_draft_comes_first(gpt2, gpt2_examples, clock):
    found = tuned(gpt2, gpt2_examples, layers=[1, 3], tokens=(1, 2))
    assert len(found.rows) == 2 * 2 * 2 * 2 + 2  # tokens, layers, kinds, lists; and copies
    factors = [row["speed_up"] for row in found.rows]
    assert factors == sorted(factors, reverse=True)
    best = found.rows[0]
    assert best["speed_up"] == pytest.approx(
        best["tokens_a_check"] / (best["tokens"] * best["draft_cost"] + best["check_cost"])
    )
    assert found.draft.tokens == best["tokens"]
    assert found.verdict.startswith(f"Best: {best['kind']}")
    assert repr(found).count("\n") == 14  # the verdict, a head, 12 rows, the rest
    lines = repr(found).splitlines()
    assert len({len(line) for line in lines[1:-1]}) == 1
    assert lines[-1] == "… and 6 more"
    # what comes back can be used
    ids = prompts(gpt2.config.vocab_size)
    again = jmat.generate(gpt2, ids, max_new_tokens=24, draft=found.draft)
    slowest = int(again.drafts.cycles.argmax())
    assert best["tokens_a_check"] == pytest.approx(
        1 + again.drafts.accepted[slowest] / again.drafts.cycles[slowest]
    )


def test_what_does_not_pay_is_said_so(gpt2, gpt2_examples, clock):
    clock[0] = 50.0
    found = tuned(gpt2, gpt2_examples, layers=[2], tokens=[2], kinds=["ridge:0.01"], lookup=False)
    assert found.draft is None
    assert found.race is None
    assert found.verdict.startswith("Drafting does not pay here: the best draft (ridge:0.01 from")


@pytest.mark.parametrize("factor", [0.3, 2.0])
def test_the_best_draft_runs_against_plain_decoding(
    gpt2, gpt2_examples, clock, monkeypatch, factor
):
    taken = {"plain": [factor, 3 * factor], "draft": [1.0, 1.0]}
    monkeypatch.setattr(tuning, "in_turn", lambda works, turns: taken)
    found = tuned(gpt2, gpt2_examples, layers=[1], tokens=[2], kinds=["carry"], words=[], race=2)
    assert found.race == (2 * factor, factor, 3 * factor)
    assert (found.draft is None) == (factor < 1)
    assert found.verdict.endswith(
        f"; the clock says {2 * factor:.2f} ({factor:.2f} to {3 * factor:.2f})."
    )
    assert found.verdict.startswith("Best: " if factor > 1 else "Drafting does not pay here: ")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layers": [4]}, "layers: a draft from layer 4: expected 1 to 3"),
        ({"layers": []}, "layers: no layer drafts"),
        ({"layers": [1.5]}, "layer=1.5: expected a whole number"),
        ({"tokens": [65]}, "tokens=65: expected 1 to 64"),
        ({"tokens": []}, "no length of drafts"),
        ({"kinds": ["tuned"]}, "kind 'tuned' is no closed form of one layer"),
        ({"kinds": ["rank:100"]}, "rank 100, above the width 64"),
        ({"kinds": "carry"}, "kinds"),
        ({"words": [0]}, "words=0"),
        ({"turns": 0}, "turns=0"),
        ({"race": -1}, "race=-1"),
        ({"max_new_tokens": 1}, "max_new_tokens=1"),
    ],
)
def test_bad_arguments(gpt2, gpt2_examples, given, message, unchecked):
    with pytest.raises(ValueError, match=message):
        tuned(gpt2, gpt2_examples, **given)
