"""Replacing sub-modules: exact where the part is linear, and no more programs for more layers."""

import numpy as np
import pytest
from flax import nnx

from jmat import forward, models
from jmat.capture import capture, stream_sites
from jmat.data.examples import Examples, Split
from jmat.jumps import evaluate, metric_rows
from jmat.maps import Identity, Zero
from jmat.r2 import resamples
from jmat.sites import SUBMODULES
from jmat.submodules import ABLATIONS, ablate, ablate_heads, fit_parts, part_r2_rows, part_sites, refit_sequentially

WIDTH = 8


def tiny(layers=2, activation="linear"):
    config = {"model_type": "gpt2", "n_embd": WIDTH, "n_head": 2, "n_layer": layers, "n_positions": 16}
    config |= {"vocab_size": 50, "activation_function": activation, "initializer_range": 0.3}
    return models.build(models.config_from_hf(config), nnx.Rngs(0))


def sentences(count=200, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 12, size=count).astype(np.int32)
    tokens = rng.integers(50, size=lengths.sum()).astype(np.int32)
    return Split(tokens=tokens, lengths=lengths, positions=rng.integers(lengths).astype(np.int32))


@pytest.fixture(scope="module")
def setting():
    model, fit, held_out = tiny(), sentences(), sentences(40, seed=1)
    keep = tuple(dict.fromkeys((*stream_sites(2), *part_sites(SUBMODULES, range(2)))))
    return model, Examples(fit=fit, eval=held_out), capture(model, fit, keep), capture(model, held_out, keep)


def plan(name, maps, sources):
    return {name: {i: {(p, b): m for (p, b), m in maps.items() if p in ABLATIONS[name] and b >= i} for i in sources}}


def test_an_affine_feed_forward_is_replaced_exactly(setting):
    model, examples, fit, held_out = setting
    maps = fit_parts(fit, blocks=range(2), intercept=True)
    finals = ablate(model, examples.eval, plan("mat_ffn", maps, range(3)))
    for source in range(3):
        np.testing.assert_allclose(finals["mat_ffn", source], held_out["block.1"], atol=2e-4)


def test_refit_recovers_it_too(setting):
    model, examples, fit, _ = setting
    maps = fit_parts(fit, ("ffn",), blocks=range(2), intercept=True)
    again = refit_sequentially(model, examples.fit, fit, ("ffn",), 0, intercept=True)
    assert sorted(again) == sorted(maps)
    for at, linear in maps.items():
        np.testing.assert_allclose(again[at].W, linear.W, atol=1e-3)


def test_refit_loses_less_where_the_part_is_not_linear():
    model, fit, held_out = tiny(activation="gelu_new"), sentences(600), sentences(200, seed=1)
    keep = (*stream_sites(2), *part_sites(SUBMODULES, range(2)))
    acts, want = capture(model, fit, keep), capture(model, held_out, ("block.1",))["block.1"]
    maps = fit_parts(acts, blocks=range(2))
    for name in ("mat_attn", "mat_ln1_ln2"):
        refit = {name: {0: refit_sequentially(model, fit, acts, ABLATIONS[name], 0)}}
        errors = [
            np.square(ablate(model, held_out, plans)[name, 0] - want).sum() for plans in (plan(name, maps, [0]), refit)
        ]
        assert errors[1] < errors[0]


def test_attention_runs_on_the_position_alone(setting, monkeypatch):
    model, examples, fit, _ = setting
    maps = fit_parts(fit, blocks=range(2))
    plans = plan("mat_attn", maps, range(3))
    whole = ablate(model, examples.eval, plans)
    lengths = []
    original = forward.run

    def spy(model, inputs, **options):
        if options.get("start", 0) == 0 and inputs.ndim == 3:
            lengths.append(inputs.shape[1])
        return original(model, inputs, **options)

    monkeypatch.setattr("jmat.submodules.run", spy)
    again = ablate(model, examples.eval, plans)
    assert set(lengths) == {1}
    np.testing.assert_array_equal(again["mat_attn", 0], whole["mat_attn", 0])


def test_programs_do_not_grow_with_depth():
    counts = []
    for layers in (2, 5):
        model, split = tiny(layers), sentences(30)
        acts = capture(model, split, (*stream_sites(layers), *part_sites(SUBMODULES, range(layers))))
        maps = fit_parts(acts, blocks=range(layers))
        forward._block.clear_cache()
        plans = {}
        for name in ABLATIONS:
            plans |= plan(name, maps, range(layers + 1))
        ablate(model, split, plans)
        counts.append(forward._block._cache_size())
    assert counts[0] == counts[1] > 0


def test_heads_replaced_one_at_a_time(setting):
    model, examples, _, held_out = setting
    finals = ablate_heads(model, examples)
    assert {name for name, _ in finals} == {"mat_head.0", "mat_head.1", "no_head.0", "no_head.1"}
    for name, block in finals:
        changed = np.abs(finals[name, block] - held_out["block.1"]).max()
        assert changed > 1e-3, name
    split, K = examples.eval, WIDTH // 2
    for h, block in ((0, 0), (1, 1)):  # one sentence at a time, with the head's own site replaced
        for row in (0, 7, 23):
            tokens = split.tokens[split.starts[row] :][: split.positions[row] + 1]
            x = forward.run(model, tokens[None], sites={f"block.{block}.attn.head.{h}": Zero(K)})[0][0, -1]
            np.testing.assert_allclose(finals[f"no_head.{h}", block][row], x, atol=1e-5)
    mapped = sum(np.square(finals[f"mat_head.{h}", 0] - held_out["block.1"]).sum() for h in range(2))
    removed = sum(np.square(finals[f"no_head.{h}", 0] - held_out["block.1"]).sum() for h in range(2))
    assert mapped < removed


def test_r2_of_parts(setting):
    _, examples, fit, held_out = setting
    maps = fit_parts(fit, blocks=range(2), intercept=True)
    rows = part_r2_rows(held_out, maps, resamples(examples.eval.positions, samples=10))
    scores = {(row["map"], row["layer"]): row["value"] for row in rows if row["metric"] == "r2"}
    assert scores["ffn", 1] == pytest.approx(1, abs=1e-3)  # affine
    assert 0 < scores["ln_1", 0] < 1
    assert len(scores) == 8


def test_a_shortcut_that_overflows_has_no_figures_and_a_note(gpt2):
    final = np.random.default_rng(0).standard_normal((5, gpt2.config.width)).astype(np.float32)
    broken = final.copy()
    broken[3] = np.inf
    rows = metric_rows(evaluate(gpt2, final, {("a", 0): (Identity(), final), ("b", 0): (Identity(), broken)}), 4)
    for row in rows:
        assert (row["value"] is None) == (row["map"] == "b")
        assert row.get("note") == {"a": None, "b": "the logits are not finite at 1 of 5 examples"}[row["map"]]
