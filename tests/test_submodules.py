"""Replacing sub-modules: exact where the part is linear, and no more programs for more
layers.
"""

import numpy as np
import pytest
from flax import nnx

import jmat
from jmat import forward, models
from jmat.capture.activations import capture
from jmat.data.examples import Examples, Split
from jmat.maps.types import Identity, Linear, Zero
from jmat.models import stack
from jmat.models.sites import SUBMODULES, stream_sites
from jmat.studies import submodules
from jmat.studies.evaluation import evaluate, metric_rows
from jmat.studies.r2 import resamples
from jmat.studies.submodules.ablation import ABLATIONS, ablate, fit_parts, part_r2_rows, part_sites
from jmat.studies.submodules.heads import ablate_heads
from jmat.studies.submodules.refit import refit_sequentially
from tests.inside import text
from tests.test_reference import REFERENCE

WIDTH = 8


def tiny(layers=2, activation="linear"):
    config = {
        "model_type": "gpt2",
        "n_embd": WIDTH,
        "n_head": 2,
        "n_layer": layers,
        "n_positions": 16,
    }
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
    return (
        model,
        Examples(fit=fit, eval=held_out),
        capture(model, fit, keep),
        capture(model, held_out, keep),
    )


def plan(name, maps, sources):
    return {
        name: {
            i: {(p, b): m for (p, b), m in maps.items() if p in ABLATIONS[name] and b >= i}
            for i in sources
        }
    }


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


@pytest.fixture(scope="module")
def curved():
    """A model whose feed-forward parts are not linear."""
    model, fit, held_out = tiny(activation="gelu_new"), sentences(150), sentences(30, seed=1)
    keep = (*stream_sites(2), *part_sites(SUBMODULES, range(2)))
    return model, Examples(fit=fit, eval=held_out), capture(model, fit, keep)


def least_squares(x, y, intercept):
    """W and b in float64."""
    X = np.hstack([x, np.ones((len(x), 1))]) if intercept else x
    solved = np.linalg.lstsq(X.astype(np.float64), y.astype(np.float64), rcond=1e-7)[0]
    return (solved[:-1], solved[-1]) if intercept else (solved, 0)


def check_map(linear, x, y, intercept):
    """The map predicts what least squares does, on the inputs that it was fitted on."""
    W, b = least_squares(x, y, intercept)
    assert (linear.bias is None) == (not intercept)
    want, got = x @ W + b, np.asarray(linear(x))
    assert np.linalg.norm(got - want) < 2e-3 * np.linalg.norm(want - want.mean(0))


@pytest.mark.parametrize(
    ("name", "source", "intercept"), [("mat_ln1_ln2", 0, True), ("mat_attn", 0, False)]
)
def test_each_refitted_map_reads_what_all_before_it_left(curved, name, source, intercept):
    """In the first block as in the others; the target is the unmodified model's."""
    model, examples, acts = curved
    parts = ABLATIONS[name]
    maps = refit_sequentially(model, examples.fit, acts, parts, source, intercept=intercept)
    assert list(maps) == [(part, i) for i in range(source, 2) for part in parts]
    before = {}
    for (part, i), linear in maps.items():
        site = f"block.{i}.{part}"
        x = capture(model, examples.fit, (f"{site}.in",), sites=before)[f"{site}.in"]
        check_map(linear, x, acts[site], intercept)
        before[site] = linear


@pytest.mark.parametrize("intercept", [False, True])
def test_maps_of_parts_are_least_squares(curved, intercept):
    _, _, acts = curved
    maps = fit_parts(acts, ("attn", "ffn"), blocks=range(2), intercept=intercept)
    for (part, i), linear in maps.items():
        check_map(linear, acts[f"block.{i}.{part}.in"], acts[f"block.{i}.{part}"], intercept)


def test_parts_are_replaced_from_the_source_layer_on(curved):
    model, examples, acts = curved
    maps = fit_parts(acts, blocks=range(2))
    plans = plan("mat_ln1_ln2", maps, range(3)) | plan("mat_ffn", maps, range(3))
    finals = ablate(model, examples.eval, plans)
    for (name, source), final in finals.items():
        stand_ins = {
            f"block.{i}.{part}": maps[part, i] for i in range(source, 2) for part in ABLATIONS[name]
        }
        want = capture(model, examples.eval, ("block.1",), sites=stand_ins)["block.1"]
        np.testing.assert_allclose(final, want, atol=1e-4)
    assert np.abs(finals["mat_ffn", 0] - finals["mat_ffn", 1]).max() > 0.01


@pytest.mark.parametrize("intercept", [False, True])
def test_heads_are_replaced_one_at_a_time_by_maps_of_the_fit_examples(curved, intercept):
    model, examples, _ = curved
    finals = ablate_heads(model, examples, intercept=intercept)
    assert sorted(finals) == [
        (f"{kind}_head.{h}", block)
        for kind in ("mat", "no")
        for h in range(2)
        for block in range(2)
    ]
    for block in range(2):
        heads = tuple(f"block.{block}.attn.head.{h}" for h in range(2))
        fit = capture(model, examples.fit, (f"block.{block}.attn.in", *heads))
        for h, head in enumerate(heads):
            W, b = least_squares(fit[f"block.{block}.attn.in"], fit[head], intercept)
            linear = Linear(W.astype(np.float32), np.full(WIDTH // 2, b, np.float32))
            want = capture(model, examples.eval, ("block.1",), sites={head: linear})["block.1"]
            np.testing.assert_allclose(finals[f"mat_head.{h}", block], want, atol=2e-3)
            want = capture(model, examples.eval, ("block.1",), sites={head: Zero(WIDTH // 2)})[
                "block.1"
            ]
            np.testing.assert_allclose(finals[f"no_head.{h}", block], want, atol=1e-5)


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

    monkeypatch.setattr("jmat.studies.submodules.ablation.run", spy)
    again = ablate(model, examples.eval, plans)
    assert set(lengths) == {1}
    np.testing.assert_array_equal(again["mat_attn", 0], whole["mat_attn", 0])


def test_programs_do_not_grow_with_depth():
    counts = []
    for layers in (2, 5):
        model, split = tiny(layers), sentences(30)
        acts = capture(
            model, split, (*stream_sites(layers), *part_sites(SUBMODULES, range(layers)))
        )
        maps = fit_parts(acts, blocks=range(layers))
        stack._block.clear_cache()
        plans = {}
        for name in ABLATIONS:
            plans |= plan(name, maps, range(layers + 1))
        ablate(model, split, plans)
        counts.append(stack._block._cache_size())
    assert counts[0] == counts[1] > 0


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
    rows = metric_rows(
        evaluate(gpt2, final, {("a", 0): (Identity(), final), ("b", 0): (Identity(), broken)}), 4
    )
    for row in rows:
        assert (row["value"] is None) == (row["map"] == "b")
        assert (
            row.get("note")
            == {"a": None, "b": "the logits are not finite at 1 of 5 examples"}[row["map"]]
        )


def test_the_study_is_called_from_python(tmp_path):
    model, tokenizer = jmat.load(REFERENCE / "gpt2")
    texts = text().read_text("utf-8").splitlines()[:200]
    options = submodules.Options(
        maps=("mat", "mat_ffn"), layers=(1, 4), heads=True, refit="sequential", seed=5
    )
    results = submodules.run(model, texts, options, tokenizer=tokenizer)
    at = {(row["map"], row["layer"]) for row in results.rows if row["metric"] == "precision@1"}
    heads = {
        (f"{kind}_head.{h}", i)
        for kind in ("mat", "no")
        for h in range(model.config.heads)
        for i in range(4)
    }
    assert at == heads | {(name, layer) for name in ("mat", "mat_ffn") for layer in (1, 4)}
    assert (results.config["maps"], results.config["refit"]) == (("mat", "mat_ffn"), "sequential")
    assert set(results.save(tmp_path)) == {
        "results.json",
        submodules.FIGURE,
        "maps.safetensors",
        "maps.json",
    }
    assert set(jmat.load_maps(tmp_path, model=model)) == {
        *(f"{part}.{i}" for part in SUBMODULES for i in range(4)),
        *(f"mat.{i}.4" for i in range(4)),
    }
    for wrong, message in (
        (
            {"maps": ["mat_atn"]},
            "maps has 'mat_atn'; choose from mat, mat_attn, mat_ffn, mat_ln1_ln2",
        ),
        ({"refit": "twice"}, "refit='twice': expected one of none, sequential"),
    ):
        with pytest.raises(ValueError, match=message):
            submodules.Options(**wrong)
    with pytest.raises(ValueError, match=r"layers has '9'; choose from 0, 1, 2, 3, 4\."):
        submodules.run(model, texts, submodules.Options(layers=(9,)), tokenizer=tokenizer)
