"""The exit rule on cases worked out by hand, and properties of what is built on it."""

import numpy as np
import pytest

from jmat.models import config_from_hf
from jmat.models.flops import block_flops, exit_flops, head_flops, map_flops, token_exit_flops
from jmat.studies.early_exit.curves import calibration_rows
from jmat.studies.early_exit.rows import Reading, exit_rows
from jmat.studies.early_exit.thresholds import (
    LAMBDAS,
    Outcome,
    calibrate,
    exit_layers,
    fixed_exit,
    layers_at,
    layers_saved,
    outcome,
    paper_thresholds,
    patience,
)
from tests.splits import make_split


def test_threshold_formula():
    [[value]] = paper_thresholds([0.5], np.array([3]), 20.0)
    assert value == pytest.approx(0.9 * 0.5 + 0.1 * np.exp(-4 * 3 / 20))


def test_exits_at_the_first_layer_strictly_above():
    confidence = np.array([[0.9, 0.2, 0.5, 0.8], [0.9, 0.1, 0.1, 0.1]])
    thresholds = np.array([[0.5, 0.5], [0.2, 0.2], [-1.0, -1.0], [2.0, 2.0]])
    # Layer 0 never exits, however sure; 0.5 > 0.5 is false.
    assert exit_layers(confidence, thresholds).tolist() == [[3, 4], [2, 4], [1, 1], [4, 4]]


def test_a_level_that_is_reached_on_a_plateau_is_reached_where_that_begins():
    """Two of three examples are right from block 1 to block 3: the level 2/3 takes one
    block.
    """
    exits = np.array([[0, 0, 0], [1, 1, 1], [2, 2, 2], [3, 3, 3], [4, 4, 4]])
    hits = np.array([[0, 0, 0], [1, 1, 0], [1, 1, 0], [1, 1, 0], [1, 1, 1]], float)
    assert layers_at(Outcome(exits, hits), 2 / 3, np.ones((1, 3))) == pytest.approx([1.0])


def test_nothing_saved_is_zero():
    exits = np.full((1, 5), 3)  # five times a fifth of three is not three
    saved = layers_saved({"mat": Outcome(exits, np.ones((1, 5)))}, 3, 0.9)["mat"]
    assert [str(value) for value in saved] == ["0.0", "0.0", "0.0"]


def test_check_every_looks_at_multiples_only():
    confidence = np.array([[1.0, 1.0, 0.0, 1.0, 1.0, 1.0]])
    assert exit_layers(confidence, np.array([[0.5]]), check_every=2).tolist() == [[4]]


def test_ends_of_the_grid():
    confidence = np.random.default_rng(0).uniform(size=(50, 6))
    exits = exit_layers(confidence, paper_thresholds(LAMBDAS, np.arange(50), 25.5))
    assert (exits[0] == 1).all()
    assert (exits[-1] == 6).all()


def test_outcome_and_fixed_exit_look_up_the_layer():
    hits = np.array([[0.0, 0, 1], [0, 1, 1]])
    assert outcome(np.array([[0, 1], [2, 2]]), hits).hits.tolist() == [[0, 1], [1, 1]]
    assert fixed_exit(hits).hits.mean(1).tolist() == [0, 0.5, 1]


def test_patience_counts_agreeing_layers():
    assert patience(np.array([[7, 7, 7, 3, 3, 4]])).tolist() == [[0, 1, 2, 0, 1, 0]]


def test_layers_at_interpolates():
    # Mean blocks 2, 4, 6 with precision 0.5, 0.75, 1: 0.9 is reached at 4 + 2 * 0.6.
    result = Outcome(
        np.array([[2] * 4, [4] * 4, [6] * 4]),
        np.array([[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1.0]]),
    )
    assert layers_at(result, 0.9, np.ones((1, 4)))[0] == pytest.approx(5.2)
    assert layers_at(result, 0.4, np.ones((1, 4)))[0] == pytest.approx(2)


def test_calibration_counts_one_example_a_sentence():
    sentences = np.repeat(np.arange(60), 3)
    # only first examples agree with the full model
    hits = np.tile(np.arange(180) % 3 == 0, (2, 1)).astype(float)
    outcomes = {
        (name, "gap"): ((0.5, 1.0), Outcome(np.ones((2, 180)), hits)) for name in ("mat", "id")
    }
    rows = calibration_rows(outcomes, sentences, delta=0.3, epsilon=0.05)
    assert [row["value"] for row in rows if row["metric"] == "disagreement"] == [0, 0]
    assert {row["n"] for row in rows} == {30}


def test_calibration_holds_and_is_monotone():
    rng = np.random.default_rng(1)
    n, grid = 400, np.linspace(0, 1, 11)
    correct = rng.uniform(size=n)
    hits = (correct < 0.6 + 0.4 * grid[:, None]).astype(float)
    result = Outcome(np.ones_like(hits, dtype=int), hits)
    loose = calibrate(result, list(grid), delta=0.3, epsilon=0.05)
    tight = calibrate(result, list(grid), delta=0.1, epsilon=0.05)
    assert loose is not None
    assert tight is not None
    assert loose < tight
    k = list(grid).index(tight)
    assert np.exp(-2 * n * (0.1 - (1 - hits[k].mean())) ** 2) <= 0.05
    assert calibrate(result, list(grid), delta=0.001, epsilon=0.05) is None


def test_flops_count_checks_and_heads(gpt2):
    config = gpt2.config
    tokens = np.array([5])
    block = block_flops(config, 5, 3.0)
    head, jump = head_flops(config), map_flops(config)
    exits = np.array([[1], [config.layers]])
    [[early], [late]] = exit_flops(config, exits, tokens)
    assert early == pytest.approx(block + head + jump)
    assert late == pytest.approx(config.layers * block + (config.layers - 1) * (head + jump) + head)
    [[cheap]] = exit_flops(config, np.array([[2]]), tokens, check_every=2, words=10)
    assert cheap == pytest.approx(2 * block + jump + head_flops(config, 10) + head)


def test_a_fixed_exit_pays_for_its_prediction(gpt2):
    """No check was made on the way, so the map and the head come at the end."""
    config, tokens = gpt2.config, np.array([5])
    L, head, jump = config.layers, head_flops(config), map_flops(config)
    fixed = exit_flops(config, np.arange(L + 1)[:, None], tokens, check_every=L)[:, 0]
    blocks = [layer * block_flops(config, 5, 3.0) for layer in range(L + 1)]
    assert fixed == pytest.approx(
        [*(work + jump + head for work in blocks[:-1]), blocks[-1] + head]
    )
    # a check at 2, none at 3
    [[between]] = exit_flops(config, np.array([[3]]), tokens, check_every=2)
    assert between == pytest.approx(blocks[3] + 2 * (jump + head))


def test_a_generated_token_by_hand():
    """gpt2-docs has 8 blocks x 192 and 4,096 words; the 15th token looks at 15."""
    config = config_from_hf(
        {"model_type": "gpt2", "n_layer": 8, "n_embd": 192, "n_head": 6, "vocab_size": 4096}
    )
    projections, feed_forward, attention = 2 * 192 * 4 * 192, 2 * 2 * 192 * 768, 4 * 192 * 15
    block, head, jump = projections + feed_forward + attention, 2 * 192 * 4096, 2 * 192 * 192
    tokens = np.array([15])
    exits = np.array([[1], [3], [8]])
    found = token_exit_flops(config, exits, tokens)[:, 0]
    check = jump + head
    assert found.tolist() == [block + check, 3 * (block + check), 8 * block + 7 * check + head]
    assert found[0] / (8 * block + head) == pytest.approx(0.29, abs=0.005)
    [[cheap]] = token_exit_flops(config, np.array([[4]]), tokens, check_every=2, words=512)
    assert cheap == 4 * block + 2 * (jump + 2 * 192 * 512) + head


def test_rows_have_the_cost_of_a_generated_token(gpt2, bert):
    split = make_split(lengths=[9, 4, 6])
    n = split.num_examples
    for config in (gpt2.config, bert.config):
        L = config.layers
        exits = np.stack([np.arange(n) % L + 1, np.full(n, L)])
        read = Reading(
            dict.fromkeys(
                ("precision@1", "precision@5", "precision@10", "surprisal"), np.ones((n, L + 1))
            ),
            {},
        )
        rows = exit_rows(config, "mat", read, exits, [{"lambda": 0.1}, {"lambda": 1.0}], split)
        ratios = [row["value"] for row in rows if row["metric"] == "flops_ratio_token"]
        if not config.causal:
            assert not ratios
            continue
        seen = split.positions + 1
        full = np.mean([L * block_flops(config, 1, t) + head_flops(config) for t in seen])
        assert ratios == pytest.approx(token_exit_flops(config, exits, seen).mean(1) / full)
        assert ratios[1] > 1  # all checks, and all blocks
