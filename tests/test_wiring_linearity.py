"""linearity as users call it on a text: scores by hand, other checkpoints and models
under their own names.
"""

import functools
import re

import numpy as np
import pytest

import jmat
from jmat.checkpoint import parameters
from jmat.data import make_examples
from jmat.data.pieces import draw_pieces
from jmat.metrics.bootstrap import bootstrap_counts
from jmat.models.sites import SUBMODULES, stream_sites
from jmat.report.names import short_path
from jmat.runtime.digests import model_hash
from jmat.studies import linearity
from jmat.studies.linearity import study
from jmat.studies.linearity.intrinsic import log_ratios, maximum_likelihood
from tests.by_hand import Lab, affine, same
from tests.inside import call, changed_model, text
from tests.test_reference import REFERENCE

GIVEN = {"num_fit": 60, "num_eval": 40, "seed": 3, "protocol": "jmat", "skip_first": 2}
SITES = [f"block.{i}.{part}{end}" for i in range(4) for part in SUBMODULES for end in (".in", "")]


@functools.cache
def acts(family="gpt2"):
    """Streams and parts at every token of both texts but the first two of a sentence,
    and the sentence of each.
    """
    lab = Lab(family, **GIVEN)
    splits = [lab.every(split) for split in (lab.examples.fit, lab.examples.eval)]
    sites = tuple(dict.fromkeys([*stream_sites(4), *SITES]))
    return *(lab.read(split, sites) for split in splits), splits[1].rows


# Of the session: a run is made once in a process, whichever tests come between.
@pytest.fixture(scope="session")
def passes():
    """The model and the snapshots of every pass."""
    return []


@pytest.fixture(scope="session")
def outcome(passes):
    def measure(model, *given, snapshots, progress, run):
        passes.append((model, snapshots))
        return run(model, *given, snapshots=snapshots, progress=progress)

    more = {"revisions": [changed_model()], "against": changed_model()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "measure", functools.partial(measure, run=study.measure))
        return call(
            "linearity", "--all_pairs", "--intrinsic_dimension", corpus=text(), **more, **GIVEN
        )


def test_every_pass_has_snapshots_of_its_own_model(outcome, passes):
    assert [snapshots.folder for _, snapshots in passes] == [
        outcome.out / "checkpoints" / name for name in ("fit", "revision-0", "against")
    ]
    hashes = [model_hash(parameters(model)) for model, _ in passes]
    assert [list(snapshots.owner.values()) for _, snapshots in passes] == [
        [each] for each in hashes
    ]
    assert hashes[0] != hashes[1] == hashes[2]
    assert not (outcome.out / "checkpoints").exists()  # all is done


def energy(values):
    wide = np.asarray(values, np.float64)
    return np.square(wide - wide.mean(0)).sum()


def scores(x, y, x_new, y_new):
    """In sample, adjusted and held out, with and without the residual."""
    solve, n, D = affine(x, y, intercept=True, rcond=1e-7), len(x), x.shape[1]
    found = {}
    for name, less, less_new in (("linearity", 0, 0), ("linearity_without_residual", x, x_new)):
        score = 1 - np.square(y - solve(x)).sum() / energy(y - less)
        found[name] = score
        found[f"{name}_adjusted"] = 1 - (1 - score) * (n - 1) / (n - D - 1)
        found[f"{name}_held_out"] = 1 - np.square(y_new - solve(x_new)).sum() / energy(
            y_new - less_new
        )
    return found


def held_out_draws(x, y, x_new, y_new, sentences):
    """Held-out linearity in 200 resamples of whole sentences."""
    _, sentence = np.unique(sentences, return_inverse=True)
    counts = bootstrap_counts(int(sentence.max()) + 1, samples=200, seed=3)[:, sentence]
    error = np.square(y_new - affine(x, y, intercept=True)(x_new)).sum(1)
    spread = np.square(y_new.astype(np.float64) - y_new.mean(0, dtype=np.float64)).sum(1)
    return 1 - (counts @ error) / (counts @ spread)


@pytest.mark.parametrize("of", ["gpt2", "checkpoint"])
def test_angles_of_steps_by_hand(outcome, of):
    new = acts("gpt2" if of == "gpt2" else changed_model())[1]
    streams = [new[site].astype(np.float64) for site in stream_sites(4)]
    for i in range(4):
        x, y = streams[i : i + 2]
        cosine = (x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)
        angle = np.degrees(np.arccos(cosine))
        label = {"checkpoint": None if of == "gpt2" else str(changed_model()), "against": None}
        row = outcome.one(map="mat", layer=i, target=i + 1, metric="angle", **label)
        assert row["value"] == pytest.approx(angle.mean(), rel=1e-3)
        assert row["low"] < row["value"] < row["high"]
        assert f"{row['value']:.3f}" in outcome.printed


@pytest.mark.parametrize("of", ["gpt2", "checkpoint", "against"])
def test_steps_are_those_of_the_model_that_a_row_names(outcome, of):
    fit, new, _ = acts("gpt2" if of == "gpt2" else changed_model())
    label = {"checkpoint": None, "against": None} | (
        {} if of == "gpt2" else {of: str(changed_model())}
    )
    for i, j in ((0, 1), (2, 3), (3, 4), (1, 4)):
        pair = [of_text[stream_sites(4)[layer]] for of_text in (fit, new) for layer in (i, j)]
        for metric, wanted in scores(*pair).items():
            n = len(pair[2] if metric.endswith("held_out") else pair[0])
            same(outcome.one(map="mat", layer=i, target=j, metric=metric, **label), [wanted], n)
    x, y = (new[stream_sites(4)[layer]].astype(np.float64) for layer in (1, 2))
    norms = np.linalg.norm(y - x, axis=1) / np.linalg.norm(x, axis=1)
    cosine = (x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)
    for metric, values in (("contribution_norm", norms), ("cosine", cosine)):
        same(outcome.one(map="mat", layer=1, target=2, metric=metric, **label), [values.mean()])
    variances = (
        np.linalg.svd(fit["block.1"] - fit["block.1"].mean(0, dtype=np.float64), compute_uv=False)
        ** 2
    )
    wanted = variances[0] / variances.sum()
    same(outcome.one(map="stream", layer=2, metric="anisotropy", **label), [wanted])


def test_parts_are_from_their_input_to_their_output(outcome):
    fit, new, _ = acts()
    for part in ("attn", "ffn"):
        pair = [of_text[f"block.2.{part}{end}"] for of_text in (fit, new) for end in (".in", "")]
        for metric, wanted in scores(*pair).items():
            row = outcome.one(map=part, layer=2, metric=metric, checkpoint=None, against=None)
            same(row, [wanted], tolerance=1e-2)


def test_intervals_are_over_sentences_and_differences_are_paired(outcome):
    draws = []
    for family, label in (
        ("gpt2", {"against": None}),
        (changed_model(), {"against": str(changed_model())}),
    ):
        fit, new, sentences = acts(family)
        pair = [of_text[f"block.{i}"] for of_text in (fit, new) for i in (1, 2)]
        draws.append(held_out_draws(*pair, sentences))
        row = outcome.one(
            map="mat", layer=2, target=3, metric="linearity_held_out", checkpoint=None, **label
        )
        low, high = np.percentile(draws[-1], [2.5, 97.5])
        assert [row["low"], row["high"]] == pytest.approx([low, high], abs=0.1 * (high - low))
    row = outcome.one(map="mat", layer=2, target=3, metric="linearity_held_out_difference")
    low, high = np.percentile(draws[0] - draws[1], [2.5, 97.5])
    assert [row["low"], row["high"]] == pytest.approx([low, high], abs=0.1 * (high - low))
    mine, other = (outcome.one(map="mat", layer=2, target=3, metric="linearity_held_out", checkpoint=None, against=a)
                   for a in (None, str(changed_model())))  # fmt: skip
    assert row["value"] == pytest.approx(mine["value"] - other["value"])
    assert abs(row["value"]) > 0.002


def test_dimensions_are_of_the_sampled_evaluation_positions(outcome):
    lab = Lab(**GIVEN)
    for layer in (0, 4):
        row = outcome.one(map="stream", layer=layer, metric="intrinsic_dimension")
        same(row, maximum_likelihood(log_ratios(lab.held_out[layer])), len(lab.held_out[layer]))


def test_the_tables_and_figures_are_of_the_model(outcome):
    names = "linearity geometry errors checkpoints jump_strength difference pairs".split()
    assert sorted(path.stem for path in outcome.out.glob("*.png")) == sorted(names)
    titles = [figure.get_suptitle() for figure in outcome.figures]
    model, other = (short_path(str(path)) for path in (REFERENCE / "gpt2", changed_model()))
    assert titles[:5] == [model] * 5
    assert titles[5:] == [f"{model} − {other}", f"{model}: linearity of all pairs"]
    table = outcome.printed.partition("linearity of the step from layer l to l + 1")[2].partition(
        "\nheld out, of"
    )[0]
    outer, heads = (re.split(r" {2,}", line.strip()) for line in table.strip("\n").splitlines()[:2])
    assert outer == ["with the residual", "without"]
    assert heads[1:] == ["in sample", "adjusted", "held out"] * 2
    lines = {
        line.split()[0]: line.split()[1:]
        for line in table.splitlines()
        if line.strip()[:1].isdigit()
    }
    metrics = [
        f"{score}{kind}"
        for score in ("linearity", "linearity_without_residual")
        for kind in ("", "_adjusted", "_held_out")
    ]
    own = {"checkpoint": None, "against": None}
    for layer in range(4):
        rows = [
            outcome.one(map="mat", layer=layer, target=layer + 1, metric=metric, **own)
            for metric in metrics
        ]
        assert lines[str(layer)] == [f"{row['value']:.3f}" for row in rows]
    pairs = outcome.figures[6].axes[0].images[0].get_array()
    row = outcome.one(map="mat", layer=1, target=3, metric="linearity_held_out", **own)
    assert pairs[1, 2] == row["value"]


def test_sampled_tokens_are_the_examples():
    given = {
        "num_fit": 40,
        "num_eval": 30,
        "seed": 1,
        "protocol": "jmat",
        "positions_per_sentence": 3,
    }
    outcome, lab = (
        call("linearity", "--noparts", corpus=text(), tokens="sampled", **given),
        Lab(**given),
    )
    pair = [streams[layer] for streams in (lab.fit, lab.held_out) for layer in (1, 2)]
    for metric, wanted in scores(*pair).items():
        same(outcome.one(map="mat", layer=1, target=2, metric=metric), [wanted])
    steps = {
        (row["layer"], row["target"])
        for row in outcome.rows
        if row["map"] == "mat" and "layer" in row
    }
    assert steps == {(i, i + 1) for i in range(4)}
    assert {row["map"] for row in outcome.rows} == {"mat", "stream"}


def test_linearity_is_a_call_that_gives_what_the_script_gives(tmp_path, capsys):
    outcome = call(
        "linearity", "--noparts", corpus=text(), num_fit=25, num_eval=10, seed=1, piece_length=90
    )
    model, tokenizer = jmat.load(REFERENCE / "gpt2")
    fit, held_out = draw_pieces(str(text()), 90, num_fit=25, num_eval=10, seed=1)
    examples = make_examples(
        fit,
        held_out,
        tokenizer,
        protocol="din2023",
        max_length=model.config.num_positions,
        seed=1,
        masked=False,
    )
    options = linearity.Options(parts=False, seed=1)
    results = linearity.run(model, examples, options, tokenizer=tokenizer)
    assert results.rows == outcome.rows
    assert outcome.printed.startswith(results.table())
    assert sorted(results.save(tmp_path)) == [
        "errors.png",
        "geometry.png",
        "linearity.png",
        "results.json",
    ]
    assert capsys.readouterr() == ("", "")
    both = linearity.run(
        model, examples, options, tokenizer=tokenizer, against=model, revisions={"early": model}
    )
    assert {row["value"] for row in both.rows if row["metric"].endswith("_difference")} == {0.0}
    assert {row["checkpoint"] for row in both.rows if "checkpoint" in row} == {"early"}
    assert [*both.figures][3:] == ["checkpoints.png", "jump_strength.png", "difference.png"]
    with pytest.raises(ValueError, match="expected one of sampled, all"):
        linearity.Options(tokens="few")
    with pytest.raises(ValueError, match="masked model"):
        linearity.run(model, examples, options, against=jmat.load(REFERENCE / "bert")[0])
