"""Kinds of maps that travel: fits, means over layers, and differences from the map of
the evaluation corpus, by hand.
"""

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score

from jmat.maps.kinds import parse_kinds
from jmat.metrics.bootstrap import bootstrap_counts
from jmat.studies import cross_corpus
from jmat.studies.cross_corpus import kinds as of_kinds
from jmat.studies.cross_corpus import rows as travel
from tests.inside import call, text
from tests.test_cross_corpus import world
from tests.test_map_zoo import divergence, one

KINDS = ("affine", "rank:8", "diag+int8")
SENTENCES = np.repeat(np.arange(50), 4).astype(np.int32)


def noisy(seed, n=150):
    """A corpus of `world` whose last stream has noise, so that fits depend on examples."""
    streams, noise = world(seed, n), np.random.default_rng([seed, n, 1])
    streams[4] = (streams[4] + noise.normal(size=streams[4].shape)).astype(np.float32)
    return streams


@pytest.fixture(scope="module")
def fits(gpt2):
    kinds = parse_kinds(KINDS)
    corpora = {"a": noisy(0), "b": noisy(1)}
    return [
        fit
        for name, streams in corpora.items()
        for fit in of_kinds.fit_kinds(gpt2, name, streams, kinds, [80, 120], seed=3)
    ]


@pytest.fixture(scope="module")
def held_out():
    return noisy(1, 200)


@pytest.fixture(scope="module")
def rows(gpt2, fits, held_out):
    return travel.cross_rows(gpt2, fits, "b", held_out, groups=SENTENCES, seed=5, several=True)


def test_all_kinds_are_fitted_on_the_examples_of_mat(fits, held_out):
    order = np.random.default_rng(3).permutation(150)
    assert [(fit.corpus, fit.n, fit.kind) for fit in fits[:6]] == [
        ("a", n, kind) for n in (80, 120) for kind in KINDS
    ]
    streams = noisy(0)
    for fit in (fit for fit in fits if fit.kind == "affine" and fit.corpus == "a"):
        for layer in (0, 2):
            chosen = order[: fit.n]
            plain = LinearRegression().fit(
                streams[layer][chosen].astype(np.float64), streams[4][chosen].astype(np.float64)
            )
            expected = plain.predict(held_out[layer])
            np.testing.assert_allclose(fit.maps[layer](held_out[layer]), expected, atol=2e-3)


def test_means_and_differences_by_hand(gpt2, fits, held_out, rows):
    kl, r2 = {}, {}
    for fit in fits:
        if (fit.kind, fit.n) == ("rank:8", 80):
            outputs = {layer: np.asarray(fit.maps[layer](held_out[layer])) for layer in (0, 2)}
            each = [divergence(gpt2, held_out[4], output)[0] for output in outputs.values()]
            kl[fit.corpus] = np.mean(each, axis=0)
            r2[fit.corpus] = np.mean([r2_score(held_out[4], o) for o in outputs.values()])
    counts = bootstrap_counts(200, groups=SENTENCES, samples=1000, seed=5)
    wanted = {"kl": kl["a"], "kl_minus_own": kl["a"] - kl["b"]}
    label = {"map": "rank:8", "fit_corpus": "a", "eval_corpus": "b", "n_fit": 80, "layer": None}
    for metric, values in wanted.items():
        row = one(rows, metric=metric, **label)
        ends = np.percentile(counts @ values / counts.sum(1), [2.5, 97.5])
        found = [row["value"], row["low"], row["high"]]
        np.testing.assert_allclose(found, [values.mean(), *ends], rtol=5e-3)
        assert row["n"] == 200
    found = one(rows, metric="r2", **label)
    assert found["value"] == pytest.approx(r2["a"], abs=1e-4)
    assert found["low"] < found["value"] < found["high"]
    row = one(rows, metric="r2_minus_own", **label)
    assert row["value"] == pytest.approx(r2["a"] - r2["b"], abs=1e-4)
    assert row["low"] < row["value"] < row["high"] < 0
    at_home = [row for row in rows if row["fit_corpus"] == "b"]
    assert not [row for row in at_home if row["metric"].endswith("_minus_own")]


def test_rows_by_layer_are_those_of_a_run_of_mat(gpt2, held_out):
    given = {"groups": SENTENCES, "seed": 5}
    fits = travel.fit_sizes("a", noisy(0), [80], seed=3)
    plain = travel.cross_rows(gpt2, fits, "b", held_out, **given)
    more = travel.cross_rows(gpt2, fits, "b", held_out, several=True, **given)
    assert [row for row in more if "layer" in row and row["metric"] != "kl"] == plain
    means = travel.over_layers(more)
    for row in travel.over_layers(plain):
        label = {key: row[key] for key in ("map", "fit_corpus", "n_fit", "metric")}
        assert one(means, **label)["value"] == pytest.approx(row["value"], rel=1e-5)


@pytest.mark.slow
def test_the_script_compares_kinds_on_two_texts():
    corpora = [text(), text(seed=1)]
    given = {"num_fit": 120, "num_eval": 30, "layers": "1,3", "sizes": "70,100"}
    outcome = call("cross_corpus", corpora=corpora, maps="affine,mat,rank:4", **given)
    means = [row for row in outcome.rows if "layer" not in row]
    assert {row["map"] for row in means} == {"id", "affine", "mat", "rank:4"}
    home, other = map(str, corpora)
    label = {"map": "rank:4", "n_fit": 100, "fit_corpus": other, "eval_corpus": home}
    for metric in ("kl", "kl_minus_own"):
        row = one(means, metric=metric, **label)
        shown = f"{row['value']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
        assert shown in outcome.printed
    pairs, curves = outcome.figures
    assert [panel.get_title() for panel in pairs.axes[:3]] == [
        "linear map",
        "affine map",
        "low-rank map 4",
    ]
    assert len(curves.axes) == 2 * 3
    kl = curves.axes[0]
    assert (kl.get_xscale(), kl.get_yscale(), kl.get_xlabel()) == (
        "log",
        "log",
        "",
    )
    drawn = {len(line.get_xdata()): line for line in kl.lines}
    assert set(drawn) == {2}
    values = {tuple(np.round(line.get_ydata(), 6)) for line in kl.lines}
    own = [
        one(means, map="rank:4", n_fit=n, fit_corpus=home, eval_corpus=home, metric="kl")["value"]
        for n in (70, 100)
    ]
    assert tuple(np.round(own, 6)) in values


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"maps": ["rigde"]}, "'rigde' is no kind of map; did you mean 'ridge'"),
        ({"maps": ["id"]}, "maps=id: nothing is fitted for id; name other kinds"),
        ({"maps": ["jacobian"]}, "kind 'jacobian' is derived from gradients, and cross_corpus"),
        ({"maps": ["mat", "diag"], "intercept": True}, "intercept=True makes affine of mat"),
    ],
)
def test_settings_are_checked(given, message):
    with pytest.raises(ValueError, match=message):
        cross_corpus.Options(**given)


def test_a_rank_above_the_width_is_refused(gpt2):
    with pytest.raises(ValueError, match="rank 65, above the width 64"):
        cross_corpus.Options(maps=["rank:65"]).check(gpt2.config)
