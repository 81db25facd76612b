"""The zoo of maps: figures by hand, paired intervals, costs, and the same rows twice."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score

import jmat
from jmat.data.examples import target_tokens
from jmat.maps.files import read_maps
from jmat.models.flops import block_flops
from jmat.report.results import read_results
from jmat.studies import layer_jump, map_zoo
from jmat.studies.map_zoo import plots, rows
from tests.inside import call, text
from tests.test_reference import REFERENCE

KINDS = ("id", "mat", "affine", "rank:8", "rank_logit:8", "one_jump:8", "mat+int8", "diag")
LAYERS = (1, 3)
L, D, N_FIT = 4, 64, 1500
_logits = jax.jit(jmat.logits)


@pytest.fixture(scope="module")
def results(gpt2, gpt2_examples):
    options = map_zoo.Options(kinds=KINDS, layers=LAYERS, seed=3)
    return map_zoo.run(gpt2, gpt2_examples, options)


@pytest.fixture(scope="module")
def streams(gpt2, gpt2_examples):
    acts = [
        jmat.capture(gpt2, split, jmat.streams(gpt2))
        for split in (gpt2_examples.fit, gpt2_examples.eval)
    ]
    return [list(each.values()) for each in acts]


@pytest.fixture(scope="module")
def predicted(streams):
    """What each kind makes of the held-out streams, float64, by kind and layer."""
    fit, held_out = ([h.astype(np.float64) for h in part] for part in streams)
    found = {}
    for layer in LAYERS:
        X, Y, new = fit[layer], fit[L], held_out[layer]
        found["id", layer] = new
        found["mat", layer] = new @ np.linalg.lstsq(X, Y, rcond=None)[0]
        model = LinearRegression().fit(X, Y)
        found["affine", layer] = model.predict(new)
        found["rank:8", layer] = _reduced(model, X, Y, new)
    X, Y = np.concatenate([fit[layer] for layer in LAYERS]), np.concatenate([fit[L]] * len(LAYERS))
    for layer in LAYERS:
        found["one_jump:8", layer] = _reduced(LinearRegression().fit(X, Y), X, Y, held_out[layer])
    return found


def _reduced(model, X, Y, new):
    centre = Y.mean(0)
    V = np.linalg.svd(model.predict(X) - centre)[2][:8].T
    return (model.predict(new) - centre) @ V @ V.T + centre


def one(found, **wanted):
    """The only row with these fields; a field that should not be there is None."""
    (row,) = [row for row in found if all(row.get(key) == value for key, value in wanted.items())]
    return row


def divergence(model, full, short):
    log_p, log_q = (
        np.asarray(jax.nn.log_softmax(_logits(model, h.astype(np.float32))), np.float64)
        for h in (full, short)
    )
    return (np.exp(log_p) * (log_p - log_q)).sum(-1), log_p, log_q


def drawn_means(values, groups, seed):
    """Percentiles of the mean under resamples of whole sentences."""
    from jmat.metrics.bootstrap import bootstrap_counts

    counts = bootstrap_counts(len(values), groups=groups, samples=1000, seed=seed)
    return np.percentile(counts @ values / counts.sum(1), [2.5, 97.5])


def test_figures_by_hand(gpt2, gpt2_examples, results, streams, predicted):
    held_out = gpt2_examples.eval
    final = streams[1][L]
    now = target_tokens(held_out, masked=False)
    by_kind = {}
    for (kind, layer), h in predicted.items():
        kl, log_p, log_q = divergence(gpt2, final, h)
        by_kind[kind, layer] = kl
        label = {"map": kind, "layer": layer, "target": L}
        assert one(results.rows, metric="kl", **label)["value"] == pytest.approx(
            kl.mean(), rel=2e-3
        )
        top = log_p.argmax(-1) == log_q.argmax(-1)
        assert one(results.rows, metric="precision@1", **label)["value"] == pytest.approx(
            top.mean(), abs=0.006
        )
        nats = -log_q[np.arange(len(now)), now][now >= 0]
        found = one(results.rows, metric="perplexity", **label)
        assert found["value"] == pytest.approx(np.exp(nats.mean()), rel=2e-3)
        assert found["n"] == len(nats)
        assert one(results.rows, metric="r2", **label)["value"] == pytest.approx(
            r2_score(final, h), abs=2e-4
        )
        weighted = r2_score(final, h, multioutput="variance_weighted")
        assert one(results.rows, metric="r2_weighted", **label)["value"] == pytest.approx(
            weighted, abs=2e-4
        )
    for kind in {kind for kind, _ in predicted} - {"mat"}:
        for layer in (*LAYERS, None):
            these = [
                by_kind[kind, each] - by_kind["mat", each]
                for each in LAYERS
                if layer in (each, None)
            ]
            values = np.mean(these, axis=0)
            row = one(results.rows, map=kind, layer=layer, metric="kl_minus_mat")
            expected = [values.mean(), *drawn_means(values, held_out.rows, 3)]
            np.testing.assert_allclose(
                [row["value"], row["low"], row["high"]], expected, rtol=0.02, atol=2e-4
            )
            assert row["n"] == held_out.num_examples
        mean = np.mean([by_kind[kind, each] for each in LAYERS], axis=0)
        row = one(results.rows, map=kind, layer=None, metric="kl")
        ends = drawn_means(mean, held_out.rows, 3)
        np.testing.assert_allclose(
            [row["value"], row["low"], row["high"]], [mean.mean(), *ends], rtol=0.01
        )
    assert not [
        row for row in results.rows if row["map"] == "mat" and row["metric"].endswith("_minus_mat")
    ]


def test_r2_of_a_kind_is_a_mean_over_layers_and_paired(results):
    by_layer = [one(results.rows, map="rank:8", layer=layer, metric="r2") for layer in LAYERS]
    mean = one(results.rows, map="rank:8", layer=None, metric="r2")
    assert mean["value"] == pytest.approx(np.mean([row["value"] for row in by_layer]))
    against = [
        one(results.rows, map=kind, layer=3, metric="r2")["value"] for kind in ("rank:8", "mat")
    ]
    row = one(results.rows, map="rank:8", layer=3, metric="r2_minus_mat")
    assert row["value"] == pytest.approx(against[0] - against[1])
    assert row["low"] < row["value"] < row["high"]
    whole = [one(results.rows, map=kind, layer=3, metric="r2") for kind in ("rank:8", "mat")]
    assert row["high"] - row["low"] < sum(each["high"] - each["low"] for each in whole)


def test_costs_by_hand(gpt2, gpt2_examples, results):
    block = block_flops(gpt2.config, 1, (gpt2_examples.eval.positions + 1).mean())
    square, low = D * D, 2 * 8 * D + D
    expected = {
        "id": (0, 0, 0),
        "mat": (2 * square, 8 * square, 2 * square),
        "mat+int8": (2 * square, 2 * square + 8 * D, 2 * square),
        "rank:8": (2 * low, 8 * low, 4 * 8 * D + D),
        "one_jump:8": (low, 4 * low, 4 * 8 * D + D),  # one for both layers
    }
    for kind, (parameters, held, flops) in expected.items():
        found = {
            row["metric"]: row
            for row in results.rows
            if row["map"] == kind and row["metric"] in rows.COSTS
        }
        assert {row["n"] for row in found.values()} == {N_FIT}
        assert (found["parameters"]["value"], found["bytes"]["value"]) == (parameters, held)
        assert found["flops_ratio"]["value"] == pytest.approx(flops / block)


def test_mat_and_id_are_those_of_layer_jump(gpt2, gpt2_examples, results):
    other = layer_jump.run(gpt2, gpt2_examples, layer_jump.Options(seed=3, targets="final"))
    for kind in ("mat", "id"):
        for metric in ("kl", "surprisal", "recall@5"):
            label = {"map": kind, "layer": 3, "metric": metric}
            mine, theirs = one(results.rows, **label), one(other.rows, **label)
            for key in ("value", "low", "high"):
                assert mine[key] == pytest.approx(theirs[key], rel=5e-3, abs=5e-3)


@pytest.mark.slow
def test_the_streaming_route_gives_the_same_figures(gpt2, gpt2_examples, results):
    options = map_zoo.Options(
        kinds=("mat", "rank_logit:8", "one_jump:8"), layers=LAYERS, seed=3, route="streaming"
    )
    other = map_zoo.run(gpt2, gpt2_examples, options)
    for kind in options.kinds:
        for metric in ("kl", "kl_minus_mat", "r2"):
            if kind != "mat" or metric != "kl_minus_mat":
                label = {"map": kind, "layer": None, "metric": metric}
                values = [one(found.rows, **label)["value"] for found in (results, other)]
                assert values[0] == pytest.approx(values[1], rel=1e-3, abs=1e-5)


def test_twice_gives_the_same_rows_and_maps(gpt2, gpt2_examples, results, tmp_path):
    again = map_zoo.run(gpt2, gpt2_examples, map_zoo.Options(kinds=KINDS, layers=LAYERS, seed=3))
    for name, found in (("first", results), ("second", again)):
        found.save(tmp_path / name)
    contents = [
        json.loads((tmp_path / name / "results.json").read_text()) for name in ("first", "second")
    ]
    assert contents[0]["rows_sha256"] == contents[1]["rows_sha256"]
    files = [(tmp_path / name / "maps.safetensors").read_bytes() for name in ("first", "second")]
    assert files[0] == files[1]
    maps, info = read_maps(tmp_path / "first", width=D)
    assert list(maps) == [f"{kind}.{layer}.{L}" for layer in LAYERS for kind in KINDS] or set(
        maps
    ) == {f"{kind}.{layer}.{L}" for layer in LAYERS for kind in KINDS}
    assert info.n == N_FIT
    drawn_again = read_results(tmp_path / "first")
    assert plots.plot_bytes(drawn_again).axes


def test_figures_show_what_the_rows_say(results):
    figure = results.plot("map_zoo_bytes")
    (panel,) = figure.axes
    assert (panel.get_xscale(), panel.get_yscale()) == ("log", "log")
    points = {
        tuple(line.get_data()[0]) + tuple(line.get_data()[1])
        for line in panel.lines
        if len(line.get_xdata()) == 1
    }
    wanted = {
        (
            one(results.rows, map=kind, metric="bytes")["value"],
            one(results.rows, map=kind, layer=None, metric="kl")["value"],
        )
        for kind in KINDS
        if kind != "id"
    }
    assert points == wanted
    best = [kind for kind in rows.front(results.rows) if kind != "id"]
    joined = panel.lines[0].get_xdata()
    assert [one(results.rows, map=kind, metric="bytes")["value"] for kind in best] == [*joined]
    words = {each.get_text() for each in figure.legends[0].get_texts()}
    assert {
        "low-rank map 8",
        "linear map, int8",
        "one low-rank map for all layers 8",
        "logit lens",
    } <= words
    by_layer = results.plot("map_zoo", panel="kl").axes[0]
    assert {len(line.get_xdata()) for line in by_layer.lines} == {len(LAYERS)}


def test_the_front_is_of_kinds_that_none_beats():
    def row(kind, held, kl):
        return [
            {"map": kind, "metric": "bytes", "value": held},
            {"map": kind, "metric": "kl", "value": kl},
        ]

    found = [
        *row("a", 10, 1.0),
        *row("b", 10, 0.5),
        *row("c", 20, 0.5),
        *row("d", 30, 0.1),
        *row("e", 0, 2.0),
    ]
    found += [*row("f", 5, None), {"map": "d", "metric": "kl", "layer": 1, "value": 9.0}]
    assert rows.front(found) == ["e", "b", "d"]


def test_the_table_has_means_costs_and_layers(results):
    table = results.table()
    assert "kl_minus_mat" in table
    assert "No kind is both smaller and better than one of these: id, " in table
    shown = one(results.rows, map="rank:8", layer=None, metric="kl")
    assert f"rank:8  {shown['value']:.3f} [{shown['low']:.3f}, {shown['high']:.3f}]" in " ".join(
        table.split(" ")
    ) or (f"{shown['value']:.3f} [{shown['low']:.3f}, {shown['high']:.3f}]" in table)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kinds": ["rigde"]}, "'rigde' is no kind of map; did you mean 'ridge'"),
        ({"kinds": []}, "no kind of map is named"),
        ({"intercept": True}, "each kind has an intercept or none"),
        ({"route": "disk"}, "route='disk'"),
        ({"solver": "lstsq"}, "solver='lstsq': all kinds are fitted from one set of moments"),
        (
            {"route": "streaming"},
            "route='streaming' stores no activations, which kind 'tuned' needs",
        ),
    ],
)
def test_settings_are_checked_before_anything_is_read(given, message):
    with pytest.raises(ValueError, match=message):
        map_zoo.Options(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kinds": ["rank:65"]}, "rank 65, above the width 64"),
        ({"layers": [4]}, "layers has '4'; choose from 0, 1, 2, 3"),
    ],
)
def test_settings_are_checked_against_the_model(gpt2, gpt2_examples, given, message):
    with pytest.raises(ValueError, match=message):
        map_zoo.run(gpt2, gpt2_examples, map_zoo.Options(**{"kinds": ["mat"], **given}))


@pytest.mark.slow
def test_a_masked_model_and_the_clock(bert, bert_examples):
    tokenizer = jmat.load(REFERENCE / "bert")[1]
    options = map_zoo.Options(
        kinds=("mat", "rank_logit:8", "hadamard", "tuned"), layers=(1,), clock=True
    )
    found = map_zoo.run(bert, bert_examples, options, tokenizer=tokenizer)
    logit, mat = (
        one(found.rows, map=kind, layer=1, metric="kl")["value"] for kind in ("rank_logit:8", "mat")
    )
    assert 0 < one(found.rows, map="tuned", layer=1, metric="kl")["value"] < mat < logit
    seconds = {row["map"]: row["value"] for row in found.rows if row["metric"] == "fit_seconds"}
    assert seconds.keys() == {"mat", "rank_logit:8", "hadamard", "tuned"}
    assert all(value > 0 for value in seconds.values())
    assert "fit_seconds" in found.table()


def test_the_script_is_the_study(gpt2):
    given = {
        "kinds": "mat,diag,rank:4+int8",
        "layers": "2",
        "corpus": text(),
        "num_fit": 120,
        "num_eval": 30,
    }
    outcome = call("map_zoo", **given)
    assert {row["map"] for row in outcome.rows} == {"mat", "diag", "rank:4+int8"}
    assert set(outcome.maps[0]) == {"mat.2.4", "diag.2.4", "rank:4+int8.2.4"}
    assert outcome.results["config"]["kinds"] == ["mat", "diag", "rank:4+int8"]
    assert isinstance(jnp.asarray(outcome.maps[0]["rank:4+int8.2.4"].A.values), jax.Array)
    with pytest.raises(ValueError, match="'matt' is no kind of map; did you mean 'mat'"):
        call("map_zoo", **{**given, "kinds": "matt"})
    with pytest.raises(ValueError, match="rank 65, above the width 64"):
        call("map_zoo", **{**given, "kinds": "rank:65"})
