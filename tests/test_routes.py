"""Maps come out the same from stored activations and from streaming statistics, on
sampled and on all tokens.
"""

import numpy as np
import pytest

from jmat.capture.activations import capture
from jmat.capture.stream import all_positions, packed_batches, sampled_positions, stream_moments
from jmat.data.examples import mask_positions
from jmat.maps.files import read_maps
from jmat.maps.jumps import fit_jumps, fit_jumps_to_moments, jump_pairs
from jmat.models.sites import stream_sites
from jmat.studies.routes import choose_route, memory_of_activations
from tests.scripts import on, rows_of, run
from tests.test_linearity import cut_examples
from tests.test_streaming import few, in_memory


@pytest.mark.parametrize(
    ("family", "tolerance"), [("gpt2", 1e-5), pytest.param("bert", 1e-3, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("targets", "intercept"), [("all", False), ("final", True)])
def test_maps_of_both_routes_predict_the_same(family, tolerance, targets, intercept, request):
    # A post-norm stream is all but dependent: the activations' own rounding shows in BERT's maps.
    model, split = (
        request.getfixturevalue(family),
        few(request.getfixturevalue(f"{family}_examples").fit, 700),
    )
    mask_token, L = {"gpt2": None, "bert": 4}[family], model.config.layers
    seen = mask_positions(split, mask_token)
    acts = list(capture(model, seen, stream_sites(L)).values())
    want, solutions = fit_jumps(acts, targets=targets, intercept=intercept)
    batches = packed_batches(seen, sampled_positions(seen), row_multiple=4)
    moments = stream_moments(model, batches, jump_pairs(L, targets=targets))
    got, streamed = fit_jumps_to_moments(moments, L, targets=targets, intercept=intercept)
    assert got.keys() == want.keys()
    assert len(want) == (L if targets == "final" else L * (L + 1) // 2)
    for i, j in want:
        y = np.asarray(want[i, j](acts[i]))
        assert np.linalg.norm(y - np.asarray(got[i, j](acts[i]))) < tolerance * np.linalg.norm(y), (
            i,
            j,
        )
    for i, solution in solutions.items():
        assert (streamed[i].n, int(streamed[i].rank)) == (700, int(solution.rank))
        assert streamed[i].weights.shape == solution.weights.shape


def test_activations_of_all_tokens_are_those_of_a_plain_forward_pass(gpt2, gpt2_examples):
    split = few(gpt2_examples.eval, 40)
    read = all_positions(split, skip_first=1)
    got = capture(gpt2, split.with_examples(read), ("embed", "block.2"), tokens_per_batch=512)
    for site, want in in_memory(gpt2, split, read, ("embed", "block.2")).items():
        np.testing.assert_allclose(got[site], want, atol=1e-5)


def test_the_smaller_route_is_chosen_and_why():
    gpt2_xl = {"width": 1600, "layers": 48}
    assert memory_of_activations(9000, **gpt2_xl) == 4 * 9000 * 1600 * (49 + 2 * 8 + 1)
    assert choose_route(10, 10)[0] == "memory"
    route, why = choose_route(4_100_000_000, 200_000_000)
    assert route == "streaming"
    assert "4.1 GB, their statistics 200 MB" in why
    assert choose_route(3_900_000_000, 200_000_000)[0] == "memory"
    assert choose_route(5_000_000_000, 25_000_000_000)[0] == "memory"


def agree(one, other, tolerance):
    """Rows of two runs: the same, with the same counts, and values alike; counted
    things may differ in one example.
    """
    assert len(one) == len(other) > 0
    for a, b in zip(one, other, strict=True):
        drop = {"value", "low", "high"}
        assert {k: v for k, v in a.items() if k not in drop} == {
            k: v for k, v in b.items() if k not in drop
        }
        counted = a["metric"].startswith(("precision", "recall"))
        assert abs(a["value"] - b["value"]) <= (1 / a["n"] if counted else tolerance) + 1e-9, (a, b)


@pytest.mark.slow
def test_results_of_both_routes_agree(tmp_path):
    arrays = cut_examples(tmp_path / "gpt2.npz", "gpt2", (500, 60))
    cut_examples(tmp_path / "bert.npz", "bert", (500, 60))
    every = {
        "fit_tokens": "all",
        "protocol": "jmat",
        "skip_first": 2,
        "targets": "final",
        "intercept": True,
    }
    said = [
        run(script, *on(family, tmp_path / f"{kind}-{route}", route=route, **flags))[1]
        for kind, script, family, flags in (
            ("sampled", "layer_jump", "gpt2", {"examples": tmp_path / "gpt2.npz"}),
            ("masked", "r2", "bert", {"examples": tmp_path / "bert.npz"}),
            ("all", "layer_jump", "gpt2", {"examples": tmp_path / "gpt2.npz", **every}),
        )
        for route in ("auto", "streaming")
    ]
    assert ["route memory: activations take" in each for each in said] == [True, False] * 3
    every_token = np.maximum(arrays["fit_lengths"] - 2, 0).sum()
    for kind, read in {"sampled": (500, 10), "masked": (500, 6), "all": (every_token, 4)}.items():
        rows = [rows_of(tmp_path / f"{kind}-{route}") for route in ("auto", "streaming")]
        # BERT's streams are all but dependent
        agree(*rows, tolerance=1e-3 if kind == "masked" else 1e-4)
        for route in ("auto", "streaming"):
            maps, info = read_maps(tmp_path / f"{kind}-{route}")
            assert (info.n, len(maps)) == read
            assert info.protocol == (
                "jmat, all tokens, skip_first=2" if kind == "all" else "din2023"
            )
