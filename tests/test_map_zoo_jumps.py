"""The zoo of maps between inner layers and of parts of blocks, by hand."""

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score

import jmat
from jmat.maps.kinds import parse_kinds
from jmat.metrics.bootstrap import bootstrap_counts
from jmat.studies import linearity, map_zoo
from jmat.studies.map_zoo.jumps import chosen_jumps, fitted_kinds
from tests.inside import call, text
from tests.test_map_zoo import one
from tests.test_streaming import few
from tests.test_then_run import predictions

L = 4
PAIRS, KINDS = ("1-4", "1-3", "0-3"), ("mat", "affine", "one_jump:8", "id", "rank_logit:8")
PART_KINDS = ("mat", "affine", "rank:8+int8")


@pytest.fixture(scope="module")
def examples(gpt2_examples):
    return type(gpt2_examples)(few(gpt2_examples.fit, 300), few(gpt2_examples.eval, 24))


@pytest.fixture(scope="module")
def pairs(gpt2, examples):
    said = []
    options = map_zoo.Options(kinds=KINDS, pairs=PAIRS, then_run=True, seed=3)
    return map_zoo.run(gpt2, examples, options, say=said.append), said


@pytest.fixture(scope="module")
def parts(gpt2, examples):
    options = map_zoo.Options(kinds=PART_KINDS, site="attn", layers=(1, 3), then_run=True)
    return map_zoo.run(gpt2, examples, options)


@pytest.fixture(scope="module")
def acts(gpt2, examples):
    sites = (*jmat.streams(gpt2), *(f"block.{i}.attn{end}" for i in (1, 3) for end in (".in", "")))
    return [jmat.capture(gpt2, split, sites) for split in (examples.fit, examples.eval)]


def scores(acts, source, target):
    """r2, and both linearities, of an affine map on held-out text."""
    (X, Y), (x, y) = ([part[site].astype(np.float64) for site in (source, target)] for part in acts)
    y_hat = LinearRegression().fit(X, Y).predict(x)
    error, change = np.square(y - y_hat).sum(), y - x
    return {
        "r2": r2_score(y, y_hat),
        "linearity_held_out": 1 - error / np.square(y - y.mean(0)).sum(),
        "linearity_without_residual_held_out": 1 - error / np.square(change - change.mean(0)).sum(),
    }


def divergence(full, short):
    return (np.exp(full) * (full - short)).sum(1)


def test_scores_of_pairs_by_hand(gpt2, pairs, acts):
    results, _ = pairs
    streams = jmat.streams(gpt2)
    by_pair = {(i, j): scores(acts, streams[i], streams[j]) for i, j in ((1, 4), (1, 3), (0, 3))}
    for (i, j), expected in by_pair.items():
        for metric, value in expected.items():
            row = one(results.rows, map="affine", layer=i, target=j, metric=metric)
            assert row["value"] == pytest.approx(value, abs=2e-4)
            assert row["low"] < row["value"] < row["high"]
    mean = one(results.rows, map="affine", layer=None, target=3, metric="linearity_held_out")
    both = [by_pair[i, 3]["linearity_held_out"] for i in (0, 1)]
    assert mean["value"] == pytest.approx(np.mean(both), abs=2e-4)


def test_predictions_of_pairs_by_hand(gpt2, examples, pairs):
    results, _ = pairs
    split = examples.eval
    full = predictions(gpt2, split, {})
    counts = bootstrap_counts(len(full), groups=split.rows, samples=1000, seed=3)
    kl = {}
    for name, i, j in (("mat", 0, 3), ("affine", 0, 3), ("affine", 1, 3), ("affine", 1, 4)):
        stand_in = results.maps[f"{name}.{i}.{j}"]
        short = predictions(gpt2, split, jmat.Shortcut(i, j, stand_in))
        kl[name, i, j] = divergence(full, short)
        label = {"map": name, "layer": i, "target": j}
        row = one(results.rows, metric="kl", **label)
        assert row["value"] == pytest.approx(kl[name, i, j].mean(), rel=1e-3, abs=1e-5)
        row = one(results.rows, metric="precision@1", **label)
        assert row["value"] == (short.argmax(1) == full.argmax(1)).mean()
    mean = (kl["affine", 0, 3] + kl["affine", 1, 3]) / 2
    row = one(results.rows, map="affine", layer=None, target=3, metric="kl")
    ends = np.percentile(counts @ mean / counts.sum(1), [2.5, 97.5])
    found = [row["value"], row["low"], row["high"]]
    np.testing.assert_allclose(found, [mean.mean(), *ends], rtol=2e-3)
    apart = kl["affine", 0, 3] - kl["mat", 0, 3]
    row = one(results.rows, map="affine", layer=0, target=3, metric="kl_minus_mat")
    assert row["value"] == pytest.approx(apart.mean(), rel=5e-3, abs=1e-5)


def test_a_pooled_kind_has_one_map_for_each_target(pairs):
    maps = pairs[0].maps
    assert maps["one_jump:8.0.3"] is maps["one_jump:8.1.3"]
    assert maps["one_jump:8.1.4"] is not maps["one_jump:8.1.3"]
    bytes_of_target = {
        j: one(pairs[0].rows, map="one_jump:8", target=j, metric="bytes")["value"] for j in (3, 4)
    }
    assert bytes_of_target[3] == bytes_of_target[4]


def test_kinds_that_read_the_head_lead_to_the_final_layer(pairs):
    results, said = pairs
    targets = {row["target"] for row in results.rows if row["map"] == "rank_logit:8"}
    assert targets == {L}
    assert said[0] == "maps to the final layer only, since they read the head: rank_logit:8"
    jumps = chosen_jumps(L, pairs=["0-2"])
    with pytest.raises(ValueError, match="kind 'tuned' leads to the final stream of a model"):
        fitted_kinds(parse_kinds(["tuned"]), jumps, L)


def test_jumps_to_the_final_layer_are_those_of_a_run_without_pairs(gpt2, examples, pairs):
    options = map_zoo.Options(kinds=KINDS, layers=(1,), seed=3)
    usual = map_zoo.run(gpt2, examples, options)
    for row in usual.rows:
        label = {key: row.get(key) for key in ("map", "layer", "target", "metric")}
        twin = one(pairs[0].rows, **label)
        assert twin["value"] == pytest.approx(row["value"], rel=1e-5, abs=1e-6)


def test_inner_maps_predict_nothing_unless_the_blocks_run(gpt2, examples):
    options = map_zoo.Options(kinds=("mat", "diag"), pairs=("0-2",))
    results = map_zoo.run(gpt2, examples, options)
    metrics = {row["metric"].removesuffix("_minus_mat") for row in results.rows}
    assert metrics == {*map_zoo.rows.R2, *map_zoo.rows.LINEARITY, *map_zoo.rows.COSTS}
    assert "means over the source layers of maps to 2" in results.table()
    assert set(results.figures) == {"map_zoo.png", "map_zoo_bytes.png", "map_zoo_pairs.png"}
    panel = results.plot("map_zoo", panel="r2").axes[0]
    assert len(panel.lines) == 2
    value = one(results.rows, map="mat", layer=0, metric="r2")["value"]
    grid = results.plot("map_zoo_pairs").axes[0].images[0].get_array()
    assert grid[0, 1] == pytest.approx(value)


def test_the_table_has_pairs(pairs):
    shown = pairs[0].table()
    value = one(pairs[0].rows, map="mat", layer=0, target=3, metric="kl")["value"]
    lines = shown[shown.index("kl of mat from layer i (down) to j (across)") :].splitlines()
    assert lines[3].split() == ["0", f"{value:.3f}"]


def test_scores_of_parts_by_hand(parts, acts, gpt2, examples):
    for i in (1, 3):
        for metric, value in scores(acts, f"block.{i}.attn.in", f"block.{i}.attn").items():
            label = {"map": "affine", "layer": i, "target": i, "site": "attn"}
            row = one(parts.rows, metric=metric, **label)
            assert row["value"] == pytest.approx(value, abs=3e-4)
    study = linearity.run(gpt2, examples, linearity.Options(tokens="sampled"))
    for metric in map_zoo.rows.LINEARITY:
        mine = one(parts.rows, map="affine", layer=3, metric=metric)["value"]
        assert one(study.rows, map="attn", layer=3, metric=metric)["value"] == pytest.approx(
            mine, abs=3e-4
        )


def test_predictions_of_parts_by_hand(gpt2, examples, parts):
    full = predictions(gpt2, examples.eval, {})
    kl = {}
    for kind in ("affine", "rank:8+int8"):
        for i in (1, 3):
            site = {f"block.{i}.attn": parts.maps[f"{kind}.attn.{i}"]}
            kl[kind, i] = divergence(full, predictions(gpt2, examples.eval, site))
            row = one(parts.rows, map=kind, layer=i, target=i, site="attn", metric="kl")
            assert row["value"] == pytest.approx(kl[kind, i].mean(), rel=1e-3, abs=1e-5)
        row = one(parts.rows, map=kind, layer=None, site="attn", metric="kl")
        mean = (kl[kind, 1] + kl[kind, 3]).mean() / 2
        assert row["value"] == pytest.approx(mean, rel=1e-3, abs=1e-5)
    assert set(parts.maps) == {f"{kind}.attn.{i}" for kind in PART_KINDS for i in (1, 3)}
    assert "means over blocks" in parts.table()


@pytest.mark.slow
def test_parts_of_a_masked_model_stream_by(bert, bert_examples, tmp_path):
    few_of_them = type(bert_examples)(few(bert_examples.fit, 300), few(bert_examples.eval, 24))
    _, tokenizer = jmat.load("tests/data/reference/bert")
    found = [
        map_zoo.run(
            bert,
            few_of_them,
            map_zoo.Options(kinds=("affine", "rank:4"), site="ffn", route=route),
            tokenizer=tokenizer,
        )
        for route in ("memory", "streaming")
    ]
    for row in found[0].rows:
        if row["metric"] == "r2":
            label = {key: row.get(key) for key in ("map", "layer", "target", "metric")}
            assert one(found[1].rows, **label)["value"] == pytest.approx(row["value"], abs=1e-4)
    found[0].save(tmp_path)
    assert set(jmat.load_maps(tmp_path)) == set(found[0].maps)
    assert "map_zoo_bytes.png" not in {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"site": "attention"}, "site='attention'"),
        ({"then_run": True}, "every map ends at the final stream, behind which no block runs"),
        ({"site": "ffn", "kinds": ["jacobian"]}, "kind 'jacobian' leads from stream to stream"),
    ],
)
def test_settings_are_checked(given, message):
    with pytest.raises(ValueError, match=message):
        map_zoo.Options(**{"kinds": ["mat"], **given})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pairs": ["2-1"]}, "pairs has '2-1'; expected two layers of 0 .. 4"),
        ({"pairs": ["0-5"]}, "pairs has '0-5'; expected two layers of 0 .. 4"),
        ({"pairs": ["all", "0-1"]}, "pairs has 'all'; .* or all alone"),
        ({"pairs": ["0-1"], "sources": [0]}, "leave out layers, or give pairs=all"),
        ({"pairs": ["all"], "site": "attn"}, "stay inside a block: leave out one of the two"),
        ({"sources": [4], "site": "attn"}, "layers has '4'; choose from 0, 1, 2, 3"),
    ],
)
def test_jumps_are_checked(given, message):
    with pytest.raises(ValueError, match=message):
        chosen_jumps(L, **given)


def test_jumps_are_in_the_order_of_their_targets():
    everywhere = [(jump.layer, jump.end) for jump in chosen_jumps(3, pairs=["all"])]
    assert everywhere == [(0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3)]
    some = chosen_jumps(3, pairs=["all"], sources=["1"])
    assert [(jump.layer, jump.end) for jump in some] == [(1, 2), (1, 3)]
    named = chosen_jumps(3, pairs=["1-3", "0-2", "1-3"])
    assert [(jump.layer, jump.end) for jump in named] == [(0, 2), (1, 3)]


@pytest.mark.slow
def test_the_script_takes_pairs_and_sites():
    given = {"kinds": "mat,diag", "corpus": text(), "num_fit": 120, "num_eval": 30}
    outcome = call("map_zoo", pairs="0-2,1-4", **given)
    assert set(outcome.maps[0]) == {f"{k}.{at}" for k in ("mat", "diag") for at in ("0.2", "1.4")}
    outcome = call("map_zoo", "--then_run", site="ffn", layers="2", **given)
    assert set(outcome.maps[0]) == {"mat.ffn.2", "diag.ffn.2"}
    with pytest.raises(ValueError, match="--pairs has '4-0'; expected two layers"):
        call("map_zoo", pairs="4-0", **given)
