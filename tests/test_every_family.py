"""What the experiments are made of works on every architecture: maps, sub-modules,
early exit, other corpora.
"""

import numpy as np
import pytest

import jmat
from jmat.capture.activations import capture
from jmat.data.examples import Examples, Split, mask_positions
from jmat.forward import logits
from jmat.maps.jumps import fit_jumps
from jmat.maps.types import Identity
from jmat.metrics.r2 import r2_score
from jmat.models.sites import SUBMODULES, stream_sites
from jmat.studies.cross_corpus.rows import cross_rows, fit_sizes
from jmat.studies.early_exit.curves import curve_rows, padded, saved_rows
from jmat.studies.early_exit.stopping import ExitRule, run_until_sure
from jmat.studies.early_exit.thresholds import LAMBDAS, exit_layers
from jmat.studies.evaluation import evaluate, metric_rows
from jmat.studies.r2 import r2_rows, resamples
from jmat.studies.submodules.ablation import ABLATIONS, ablate, fit_parts, part_r2_rows, part_sites
from tests import hf
from tests.families import BY_NAME

CASES = [
    BY_NAME[name]
    for name in (
        "llama-plain", "opt-350m", "gpt_neox-parallel", "bloom-plain", "roberta-plain", "gpt_neo-plain",
    )
]  # fmt: skip
MASK_TOKEN = 5
ALL = ("ln_1", "attn", "ln_2", "ffn")


def sentences(count, seed):
    rng = np.random.default_rng(seed)
    lengths = np.full(count, 8, np.int32)  # one shape: compiling is what takes the time
    tokens = rng.integers(6, 37, size=lengths.sum()).astype(np.int32)
    return Split(tokens=tokens, lengths=lengths, positions=rng.integers(lengths).astype(np.int32))


def figures(rows):
    return {(row["map"], row["layer"], row["metric"]): row["value"] for row in rows}


def pair_figures(rows):
    return {
        (row["map"], row["layer"], row["target"]): row["value"]
        for row in rows
        if row["metric"] == "r2"
    }


# The fast tests take a pre-norm model with parallel blocks, and a masked one.
FAST = ("gpt_neox-parallel", "roberta-plain")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] * (case.name not in FAST)) for case in CASES],
    ids=lambda case: case.name,
)
def test_shortcuts_sub_modules_and_exits(case):
    model = hf.ours(case)
    L, D = model.config.layers, model.config.width
    examples = Examples(fit=sentences(80, 0), eval=sentences(24, 1))
    mask_token = None if model.config.causal else MASK_TOKEN
    streams = stream_sites(L)
    keep = tuple(dict.fromkeys((*streams, *part_sites(SUBMODULES, range(L)))))
    fit, held_out = (
        capture(model, mask_positions(split, mask_token), keep)
        for split in (examples.fit, examples.eval)
    )
    final = held_out[streams[L]]

    jumps, _ = fit_jumps([fit[site] for site in streams])
    maps = {l: jumps[l, L] for l in range(L)} | {L: Identity()}
    shortcuts = {("mat", l): (maps[l], held_out[streams[l]]) for l in maps}
    shortcuts |= {("id", l): (Identity(), held_out[streams[l]]) for l in maps}
    values = evaluate(model, final, shortcuts, words=np.arange(10))
    found = figures(metric_rows(values, L))
    assert found["mat", L, "precision@1"] == found["id", L, "precision@1"] == 1
    top = np.asarray(logits(model, final).argmax(-1))
    for (name, l), (shortcut, stream) in shortcuts.items():
        agree = np.asarray(logits(model, shortcut(stream)).argmax(-1)) == top
        assert found[name, l, "precision@1"] == pytest.approx(agree.mean()), (name, l)
    drawn = resamples(examples.eval.positions, samples=3)
    scores = pair_figures(r2_rows([held_out[site] for site in streams], jumps, drawn))
    assert len(scores) == 2 * len(jumps)
    for (name, i, j), score in scores.items():
        x, y = held_out[streams[i]], held_out[streams[j]]
        predicted = np.asarray(jumps[i, j](x)) if name == "mat" else x
        assert score == pytest.approx(r2_score(y, predicted), rel=1e-4, abs=1e-4), (name, i, j)

    check_parts(model, examples, fit, held_out, mask_token)
    check_exits(model, examples.eval, values, maps, mask_token)
    fits = fit_sizes("text", {l: fit[streams[l]] for l in range(L + 1)}, [D, 80])
    rows = cross_rows(model, fits, "other", {l: held_out[streams[l]] for l in range(L + 1)})
    assert {row["n_fit"] for row in rows} == {0, D, 80}


def check_parts(model, examples, fit, held_out, mask_token):
    """Replaced parts, at the sampled position alone where that is enough, equal the
    same surgery on whole sentences.
    """
    L = model.config.layers
    parts = fit_parts(fit, blocks=range(L))
    drawn = resamples(examples.eval.positions, samples=3)
    scores = pair_figures(part_r2_rows(held_out, parts, drawn))
    assert len(scores) == 4 * L
    for (part, i, _), score in scores.items():
        x, y = (held_out[f"block.{i}.{part}{end}"] for end in (".in", ""))
        assert score == pytest.approx(
            r2_score(y, np.asarray(parts[part, i](x))), rel=1e-4, abs=1e-4
        ), (part, i)
    plans = {
        name: {0: {at: linear for at, linear in parts.items() if at[0] in replaced}}
        for name, replaced in {**ABLATIONS, "all": ALL}.items()
    }
    finals = ablate(model, mask_positions(examples.eval, mask_token), plans)
    split = mask_positions(examples.eval, mask_token)
    tokens, lengths, positions = padded(split, split.num_sentences, causal=False)
    mask = np.arange(tokens.shape[1]) < lengths[:, None]
    for name, of in plans.items():
        stand_ins = {f"block.{i}.{part}": linear for (part, i), linear in of[0].items()}
        x, _ = jmat.run(model, tokens, sites=stand_ins, mask=mask)
        want = np.asarray(x)[np.arange(len(x)), positions]
        scale = max(1, np.abs(want).max())
        np.testing.assert_allclose(finals[name, 0] / scale, want / scale, atol=2e-4, err_msg=name)


def check_exits(model, split, values, maps, mask_token):
    """The pass that truly stops leaves where the curve says."""
    L = model.config.layers
    rows, outcomes = curve_rows(
        model.config, values, split, "jmat", {"check_every": 1, "words": 10}
    )
    for name in ("mat", "id"):
        hits = values[name, 1]["precision@1"]  # the lowest threshold always leaves at layer 1
        mine = {row["metric"]: row["value"] for row in rows
                if (row["map"], row["confidence"], row.get("lambda")) == (name, "gap", LAMBDAS[0])}  # fmt: skip
        assert (mine["layers"], mine["precision@1"]) == (1, pytest.approx(hits.mean()))
    assert {row["map"] for row in saved_rows(outcomes, L, split.rows)} == {"mat", "id", "mat - id"}
    gap = np.stack([values["mat", l]["gap"] for l in range(L)], axis=1)
    thresholds = np.full(split.num_examples, np.median(gap[:, 1]))
    masked = mask_positions(split, mask_token)
    tokens, lengths, positions = padded(masked, split.num_examples, causal=model.config.causal)
    rule = ExitRule({l: maps[l] for l in range(1, L)})
    layers, _ = run_until_sure(model, tokens, lengths, positions, thresholds, rule)
    want = exit_layers(gap, thresholds[None])[0]
    # The median itself may fall on either side of its own threshold.
    assert (layers != want).sum() <= 1
