"""What pruning saves, costs and trains on: parameters, FLOPs, times, choices and losses
worked out by hand.
"""

import json

import jax
import numpy as np
import pytest
from flax import nnx

import jmat
from jmat import checkpoint, models
from jmat.data.examples import Split
from jmat.data.text import whole_sentences
from jmat.maps.files import MapsInfo
from jmat.maps.types import Linear
from jmat.runtime.digests import model_hash
from jmat.studies import prune
from jmat.studies.prune import heal, measure, plans, surgery
from jmat.studies.prune import rows as study_rows
from jmat.studies.prune.heal import distil
from jmat.studies.prune.measure import Sums, cost, time_per_token
from jmat.studies.prune.stand_ins import stand_ins

D, F, V, T, L = 8, 32, 50, 16, 12


def tiny(seed=0, layers=L):
    hf = {
        "model_type": "gpt2",
        "n_embd": D,
        "n_head": 2,
        "n_layer": layers,
        "n_positions": T,
        "vocab_size": V,
    }
    return models.build(models.config_from_hf(hf | {"initializer_range": 0.3}), nnx.Rngs(seed))


@pytest.fixture(scope="module")
def model():
    return tiny()


def sentences(lengths, seed=0):
    lengths = np.asarray(lengths, np.int32)
    tokens = np.random.default_rng(seed).integers(0, V, lengths.sum()).astype(np.int32)
    return Split(tokens=tokens, lengths=lengths, positions=lengths - 1)


BLOCK = 4 * D + 4 * (D * D + D) + (D * F + F) + (F * D + D)
WHOLE = V * D + T * D + L * BLOCK + 2 * D


def flops_of_block(context):
    """A token's: four projections and two products with F, then scores and weighted
    sums over what it looks at.
    """
    return 2 * (4 * D * D + 2 * D * F) + 2 * 2 * D * context


def test_parameters_and_flops_as_numbers(model):
    W = Linear(np.zeros((D, D), np.float32), np.zeros(D, np.float32))
    head = 2 * D * V
    for method, removed, maps, parameters, extra in (
        ("delete", (), {}, WHOLE, 0),
        ("delete", (1,), {}, WHOLE - BLOCK, 0),  # not blocks 10 and 11
        (
            "map",
            (1, 2, 5),
            {(1, 3): W, (5, 6): W},
            WHOLE - 3 * BLOCK + 2 * (D * D + D),
            2 * 2 * D * D,
        ),
        ("merge", (1, 2), {(1, 3): Linear(np.zeros((F, D), np.float32))}, WHOLE - 2 * BLOCK, 0),
    ):
        found = cost(model, method, removed, maps, 7.5)
        assert found == {
            "parameters": parameters,
            "flops": (L - len(removed)) * flops_of_block(7.5) + head + extra,
        }, method


def test_rows_say_what_was_removed_and_what_it_costs(model, monkeypatch):
    text = whole_sentences(sentences([4, 6]))
    seconds = {("map", k): 1.5 + k for k in range(3)}
    monkeypatch.setattr(
        study_rows, "compare_on_text", lambda _, __, sites, **___: {key: SUMS for key in sites}
    )
    monkeypatch.setattr(
        study_rows, "time_per_token", lambda _, __, timed: {key: seconds[key] for key in timed}
    )
    W = Linear(np.zeros((D, D), np.float32))
    pruned = [plans.Pruned((5,), {(5, 6): W}), plans.Pruned((5, 4), {(4, 6): W})]
    rows = study_rows.pruned_rows(model, text, {"map": pruned})
    context = np.mean([1, 2, 3, 4, 1, 2, 3, 4, 5, 6])
    for k, (blocks, order, maps) in enumerate((("none", "", 0), ("5", "5", 1), ("4-5", "5,4", 1))):
        mine = {row["metric"]: row for row in rows if row["removed"] == k}
        assert set(mine) == set(study_rows.METRICS)
        assert {(row["method"], row["blocks"], row["order"]) for row in mine.values()} == {
            ("map", blocks, order)
        }
        assert mine["parameters"]["value"] == WHOLE - k * BLOCK + maps * D * D
        assert (
            mine["flops"]["value"]
            == (L - k) * flops_of_block(context) + 2 * D * V + maps * 2 * D * D
        )
        assert mine["microseconds_per_token"]["value"] == 1.5 + k
    assert study_rows._mean_context(text, causal=False) == pytest.approx((4 * 4 + 6 * 6) / 10)


SUMS = Sums(np.array([3.0, 5.0]), np.array([6.0, 1.0]), np.array([0.3, 0.1]), np.array([3.0, 4.0]))


def test_time_is_a_token_of_the_text_not_of_its_padding(monkeypatch):
    model, passes = tiny(layers=1), []

    def medians(works, repeats):
        passes.append((list(works), repeats))
        for work in works.values():
            work()
        return {"0": 0.002, "1": 0.001}

    monkeypatch.setattr(measure, "medians", medians)
    found = time_per_token(
        model, whole_sentences(sentences([5, 7, 11])), {0: (model, {}), 1: (model, {})}, repeats=3
    )
    assert found == {0: pytest.approx(0.002 * 1e6 / 23), 1: pytest.approx(0.001 * 1e6 / 23)}
    assert passes == [(["0", "1"], 3)]


# --- maps and choices -----------------------------------------------------------------------------


def teacher(layers=4, n=60):
    """Streams without a model: each layer adds something of its own."""
    rng = np.random.default_rng(0)
    streams = [rng.normal(size=(n, D)).astype(np.float32) + 3]
    for _ in range(layers):
        turned = streams[-1] @ rng.normal(size=(D, D)).astype(np.float32)
        streams.append((turned + rng.normal(size=(n, D)) - 2).astype(np.float32))
    config = models.config_from_hf(
        {"model_type": "gpt2", "n_embd": D, "n_head": 2, "n_layer": layers}
    )
    shell = models.build(config, nnx.Rngs(0))
    return plans.Teacher(shell, sentences([2] * n), streams)


@pytest.mark.parametrize(
    ("ridge", "intercept"), [(0.0, False), (0.0, True), (7.0, False), (7.0, True)]
)
def test_a_stretch_of_two_blocks_is_one_map_to_its_end(ridge, intercept):
    whole = teacher()
    maps = plans.fit_maps(whole, "map", prune.Options(ridge=ridge, intercept=intercept), (2, 1))
    assert list(maps) == [(1, 3)]
    X, Y = (whole.streams[l].astype(np.float64) for l in (1, 3))
    x, y = (X.mean(0), Y.mean(0)) if intercept else (0, 0)
    W = np.linalg.solve((X - x).T @ (X - x) + ridge * np.eye(D), (X - x).T @ (Y - y))
    np.testing.assert_allclose(maps[1, 3].W, W, rtol=1e-3, atol=1e-3)
    if intercept:
        np.testing.assert_allclose(maps[1, 3].bias, y - x @ W, rtol=1e-3, atol=1e-2)
    else:
        assert maps[1, 3].bias is None


def test_every_span_is_a_candidate(monkeypatch):
    asked, spans = [], prune.Options(spans=True, remove=3)

    def scores(_, method, options, candidates, current):
        asked.append(list(candidates))
        assert current.removed == ()
        return {stretch: -float(stretch[0]) for stretch in candidates}  # the last one is best

    monkeypatch.setattr(plans, "score_stretches", scores)
    chosen = [pruned.removed for pruned, _ in plans.prune(teacher(), "delete", spans)]
    assert chosen == [(3,), (2, 3), (1, 2, 3)]
    assert asked == [[(i, i + k) for i in range(5 - k)] for k in (1, 2, 3)]
    merged = plans.prune(teacher(), "merge", spans)
    monkeypatch.setattr(plans, "fit_maps", lambda *_, **__: {})
    assert [pruned.removed for pruned, _ in merged] == [(3,), (2, 3), (1, 2, 3)]
    assert asked[3] == [(1, 2), (2, 3), (3, 4)]  # block 0 stays


@pytest.mark.parametrize("rescore", [False, True])
def test_scores_are_computed_anew_only_on_demand(monkeypatch, rescore):
    after = []

    def scores(_, method, options, candidates, current):
        after.append(current.removed)
        best = 3 if not current.removed else 0
        return {(i, j): float(abs(i - best)) for i, j in candidates}

    monkeypatch.setattr(plans, "score_stretches", scores)
    options = prune.Options(rescore=rescore, remove=3)
    chosen = [pruned.removed for pruned, _ in plans.prune(teacher(), "delete", options)]
    assert chosen[-1] == ((3, 0, 1) if rescore else (3, 2, 1))
    assert after == ([(), (3,), (3, 0)] if rescore else [()])


@pytest.mark.parametrize("mask_token", [None, 7])
def test_the_first_sentences_are_taken_where_only_some_are_wanted(mask_token):
    tokens, lengths = np.arange(20, 29, dtype=np.int32), np.array([2, 3, 4], np.int32)
    text = whole_sentences(
        Split(tokens, lengths, np.array([1, 2, 3], np.int32)), mask_token, most=2
    )
    assert text.split.lengths.tolist() == [2, 3]
    wanted = [20, 21, 22, 23, 24] if mask_token is None else [20, 7, 22, 23, 7]
    assert text.split.tokens.tolist() == wanted
    assert (text.targets is None) if mask_token is None else (text.targets.tolist() == [21, 24])


def test_kl_is_measured_on_as_many_sentences_as_asked_for(monkeypatch):
    read = []

    def compare(model, text, pruned, **_):
        read.append(text.split.num_sentences)
        return {key: Sums(*np.ones((4, text.split.num_sentences))) for key in pruned}

    monkeypatch.setattr(plans, "compare_on_text", compare)
    for settings in ({}, {"score_sentences": 7}, {"score_sentences": 60}):
        plans.block_scores(teacher(), prune.Options(**settings))
    assert read == [60, 7, 60]


def test_settings_reach_the_distillation(monkeypatch):
    given = {}
    monkeypatch.setattr(
        plans, "distil", lambda model, split, maps, **how: given.update(how, split=split) or {}
    )
    settings = {"distil_steps": 7, "learning_rate": 0.5, "kl_weight": 0.25, "distil_loss": "plain"}
    options = prune.Options(score="angular", seed=11, **settings)
    list(plans.prune(teacher()._replace(mask_token=4), "distil", options))
    given.pop("log")
    masked = given.pop("split")  # as the model reads it
    assert (masked.tokens[masked.starts + masked.positions] == 4).all()
    expected = {"steps": 7, "learning_rate": 0.5, "kl_weight": 0.25, "loss": "plain", "seed": 11}
    assert given == expected


# --- distillation ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    return tiny(layers=5)


def loss_by_hand(model, split, removed, maps, *, relative=True, kl_weight=0.0):
    """Mean over tokens and over the layers that both models have."""
    sites = stand_ins(model, "map", removed, maps)
    compared = [
        l
        for l in range(min(removed) + 1, 6)
        if l - 1 not in removed or any(l == stop for _, stop in maps)
    ]
    keep = tuple(f"block.{l - 1}" for l in compared)
    errors, kl = [], []
    for start, length in zip(split.starts, split.lengths, strict=True):
        tokens = split.tokens[None, start : start + length]
        whole, pruned = (
            jmat.run(model, tokens, sites=s, keep=(*keep, "logits"))[1] for s in (None, sites)
        )
        for name in keep:
            h, other = (np.asarray(acts[name][0], np.float64) for acts in (whole, pruned))
            square = ((other - h) ** 2).sum(-1)
            errors.append(square / (h**2).sum(-1) if relative else square / D)
        log_p, log_q = (
            np.asarray(jax.nn.log_softmax(acts["logits"][0]), np.float64)
            for acts in (whole, pruned)
        )
        kl.append((np.exp(log_p) * (log_p - log_q)).sum(-1))
    return np.concatenate(errors).mean() + kl_weight * np.concatenate(kl).mean()


def random_maps(*stretches):
    rng = np.random.default_rng(1)
    return {stretch: Linear(rng.normal(0, 0.4, (D, D)).astype(np.float32)) for stretch in stretches}


@pytest.mark.parametrize(
    ("loss", "kl_weight"), [("relative", 0.0), ("relative", 0.3), ("plain", 0.0)]
)
def test_the_first_loss_is_the_formula(small, loss, kl_weight):
    split, losses = sentences([6] * 8), []
    maps = random_maps((1, 3))  # layers 3, 4 and 5 are compared
    how = {"steps": 1, "loss": loss, "kl_weight": kl_weight}
    distil(small, split, maps, log=lambda step, value: losses.append((step, value)), **how)
    expected = loss_by_hand(
        small, split, (1, 2), maps, relative=loss == "relative", kl_weight=kl_weight
    )
    assert losses == [(1, pytest.approx(expected, rel=1e-3))]


def test_layers_between_the_stretches_are_compared(small):
    split, losses, maps = sentences([6] * 8), [], random_maps((0, 1), (3, 4))
    distil(small, split, maps, steps=1, log=lambda step, value: losses.append(value))
    assert losses == [pytest.approx(loss_by_hand(small, split, (0, 3), maps), rel=1e-3)]


def test_each_epoch_and_seed_has_another_order_and_the_rate_falls(small, monkeypatch):
    split, maps, rates = sentences([6] * 24), random_maps((1, 2)), []
    step = heal._step
    monkeypatch.setattr(heal, "_step", lambda *given: rates.append(float(given[2])) or step(*given))
    orders = []
    batches = 6
    in_each = 4 * 8  # tokens of four sentences, padded
    for seed in (0, 1):
        losses = []
        how = {
            "steps": 12,
            "learning_rate": 1e-12,
            "tokens_per_batch": in_each,
            "log_every": 1,
            "seed": seed,
        }
        distil(small, split, maps, log=lambda step, value, to=losses: to.append(value), **how)
        numbers = np.unique(np.round(losses, 6), return_inverse=True)[1]
        orders.append(numbers.tolist())
        assert sorted(numbers[:batches]) == sorted(numbers[batches:]) == list(range(batches))
    first, second = orders
    assert first != second
    assert first[:batches] != first[batches:]
    expected = 1e-12 * 0.5 * (1 + np.cos(np.pi * np.arange(12) / 12))
    np.testing.assert_allclose(rates, [*expected, *expected], rtol=1e-5)


# --- files ----------------------------------------------------------------------------------------


def test_maps_beside_other_weights_are_refused(small, tmp_path):
    fingerprint = model_hash(checkpoint.parameters(small))
    info = MapsInfo("m", fingerprint, protocol="jmat", corpus="c", n=1, seed=0, dtype="float32")
    surgery.save_pruned(tmp_path, small, "map", (1, 2), random_maps((1, 3)), info)
    assert surgery.load_pruned(tmp_path)[2]
    about = json.loads((tmp_path / "pruned.json").read_text())
    assert about["removed"] == [1, 2]
    checkpoint.save_model(tmp_path, tiny(seed=1, layers=5), dtype="float32")
    with pytest.raises(ValueError, match="were fitted on other weights than those beside them"):
        surgery.load_pruned(tmp_path)
