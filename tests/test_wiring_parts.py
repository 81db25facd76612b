"""submodule_ablation as users call it on a text: parts replaced from a layer on, one
pass over padded sentences.
"""

import functools

import numpy as np
import pytest

import jmat
from jmat.maps.types import Zero
from jmat.models.sites import SUBMODULES
from jmat.report.names import readable
from tests.by_hand import Lab, affine, log_p, r2, same
from tests.figures import legend
from tests.inside import call, text

FLAGS = {"num_fit": 100, "num_eval": 40, "seed": 3, "intercept": True}
FLAGS |= {"protocol": "jmat", "positions_per_sentence": 2}
PARTS = {"mat_attn": ("attn",), "mat_ffn": ("ffn",), "mat_ln1_ln2": ("ln_1", "ln_2")}


@pytest.fixture(scope="module")
def lab():
    return Lab(**FLAGS)


def padded(split):
    """Tokens of a split's sentences, and which are real."""
    mask = np.arange(split.lengths.max()) < split.lengths[:, None]
    tokens = np.zeros(mask.shape, np.int32)
    tokens[mask] = split.tokens
    return tokens, mask


def read(lab, split, sites, keep):
    """Sites of a model whose parts are replaced, at the examples."""
    tokens, mask = padded(split)
    kept = jmat.run(lab.model, tokens, mask=mask, sites=sites, keep=tuple(keep))[1]
    return {site: np.asarray(values)[split.rows, split.positions] for site, values in kept.items()}


def linear(x, y):
    """The least-squares map with intercept that stands in for a part; a norm's output
    varies in one dimension less.
    """
    solve = affine(x, y, intercept=True, rcond=3e-6)
    bias = solve(np.zeros((1, x.shape[1])))[0]
    return jmat.Linear(
        (solve(np.eye(x.shape[1])) - bias).astype(np.float32), bias.astype(np.float32)
    )


@functools.cache
def whole(lab):
    """Inputs and outputs of all parts at the fit examples, in the model as it is."""
    sites = [
        f"block.{i}.{part}{end}"
        for i in range(lab.layers)
        for part in SUBMODULES
        for end in (".in", "")
    ]
    return lab.read(lab.examples.fit, tuple(sites))


def part_map(lab, site):
    return linear(whole(lab)[f"{site}.in"], whole(lab)[site])


def check(outcome, lab, name, layer, sites):
    stand_in = read(lab, lab.examples.eval, sites, [f"block.{lab.layers - 1}"])[
        f"block.{lab.layers - 1}"
    ]
    for metric, values in lab.metrics(stand_in).items():
        same(
            outcome.one(map=name, layer=layer, metric=metric), lab.interval(values), tolerance=5e-3
        )
    split = lab.examples.eval
    # the last token of a sentence predicts nothing
    follows = split.positions + 1 < split.lengths[split.rows]
    token = split.tokens[(split.starts[split.rows] + split.positions)[follows] + 1]
    nats = -log_p(lab.model, stand_in)[follows][np.arange(len(token)), token]
    wanted = np.exp(lab.interval(nats, lab.drawn(groups=lab.groups[follows])))
    same(
        outcome.one(map=name, layer=layer, metric="perplexity"), wanted, len(token), tolerance=2e-2
    )
    assert 0 < len(token) < split.num_examples


def test_every_map_and_layer(lab):
    outcome = call("submodule_ablation", corpus=text(), heads=True, layers="1,3", **FLAGS)
    for name, parts in PARTS.items():
        for l in (1, 3):
            sites = {
                f"block.{i}.{part}": part_map(lab, f"block.{i}.{part}")
                for i in range(l, 4)
                for part in parts
            }
            check(outcome, lab, name, l, sites)
    for l in (1, 3):
        for metric, values in lab.metrics(lab.jump(lab.held_out[l], l)).items():
            same(outcome.one(map="mat", layer=l, metric=metric), lab.interval(values))
    assert {row["layer"] for row in outcome.rows if row["map"] in ("mat", *PARTS)} == {1, 3}
    acts = lab.read(lab.examples.eval, ("block.2.ffn.in", "block.2.ffn"))
    predicted = np.asarray(part_map(lab, "block.2.ffn")(acts["block.2.ffn.in"]))
    row = outcome.one(map="ffn", layer=2, metric="r2")
    same(row, [r2(acts["block.2.ffn"], predicted)], len(predicted), tolerance=5e-3)
    draws = [r2(acts["block.2.ffn"], predicted, weights) for weights in lab.drawn(200)]
    width = row["high"] - row["low"]
    assert (
        np.abs(np.percentile(draws, [2.5, 97.5]) - [row["low"], row["high"]]).max() < 0.02 * width
    )
    maps, info = outcome.maps
    acts = whole(lab)["block.2.ln_2.in"]
    np.testing.assert_allclose(
        maps["ln_2.2"](acts), part_map(lab, "block.2.ln_2")(acts), rtol=1e-2, atol=1e-3
    )
    assert (info.n, info.seed, "mat.1.4" in maps) == (lab.examples.fit.num_examples, 3, True)


@pytest.mark.parametrize(("head", "block"), [(0, 0), (2, 1)])
def test_heads_are_fitted_with_the_intercept(lab, head, block):
    outcome = call("submodule_ablation", corpus=text(), heads=True, layers="1,3", **FLAGS)
    site = f"block.{block}.attn.head.{head}"
    fit = lab.read(lab.examples.fit, (f"block.{block}.attn.in", site))
    stand_in = linear(fit[f"block.{block}.attn.in"], fit[site])
    check(outcome, lab, f"mat_head.{head}", block, {site: stand_in})
    check(outcome, lab, f"no_head.{head}", block, {site: Zero(fit[site].shape[1])})
    assert {row["map"] for row in outcome.rows if "_head" in row["map"]} == {
        f"{kind}_head.{h}" for kind in ("mat", "no") for h in range(4)
    }


def test_sequential_refits_read_what_the_maps_before_left_and_have_the_intercept(lab):
    outcome = call(
        "submodule_ablation",
        corpus=text(),
        refit="sequential",
        layers="2",
        maps="mat_ffn,mat_ln1_ln2",
        **FLAGS,
    )
    for name in ("mat_ffn", "mat_ln1_ln2"):
        sites = {}
        for site in (f"block.{i}.{part}" for i in (2, 3) for part in PARTS[name]):
            seen = read(lab, lab.examples.fit, sites, [f"{site}.in"])[f"{site}.in"]
            sites[site] = linear(seen, whole(lab)[site])
        check(outcome, lab, name, 2, sites)
    assert {row["map"] for row in outcome.rows} == {"mat_ffn", "mat_ln1_ln2", *SUBMODULES}


def test_the_figure_and_the_table_hold_what_was_asked_for(lab):
    outcome = call("submodule_ablation", corpus=text(), heads=True, layers="1,3", **FLAGS)
    (figure,) = outcome.figures
    metrics = ("precision@1", "precision@5", "precision@10", "surprisal")
    assert tuple(panel.get_title() for panel in figure.axes) == metrics
    assert figure.get_suptitle().endswith("reference/gpt2: sub-modules replaced from layer l on")
    assert set(legend(figure)) == {readable(name) for name in ("mat", *PARTS)}
    assert "precision@1" in outcome.printed
