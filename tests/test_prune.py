"""Pruned models: the fold is exact, saved folders are what transformers computes,
scores are their formulas, maps and distillation lose less than deletion, and a sweep
compiles nothing new.
"""

import contextlib
import json
import os

import jax
import numpy as np
import pytest
import torch
import transformers

import jmat
from jmat.capture.activations import capture
from jmat.checkpoint import parameters, with_parameters
from jmat.data.examples import Split, mask_positions
from jmat.data.text import whole_sentences
from jmat.maps.files import MapsInfo, read_maps
from jmat.models import stack
from jmat.models.sites import stream_sites
from jmat.report.plots import save_figure
from jmat.runtime.digests import model_hash
from jmat.studies import prune
from jmat.studies.linearity.measure import stored_linearity
from jmat.studies.prune import merge, plans, scores, surgery
from jmat.studies.prune import rows as study_rows
from jmat.studies.prune.heal import distil
from jmat.studies.prune.measure import compare_on_text, quality_rows
from jmat.studies.prune.options import REFITS
from jmat.studies.prune.stand_ins import METHODS, label, stand_ins, stretches
from tests import families, hf
from tests.figures import legend
from tests.scripts import on, rows_of, run
from tests.test_reference import REFERENCE

# Four blocks each, or what the case says; removed are the last block and, of longer ones, the
# second.
SLIDING = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
MERGEABLE = [
    hf.gpt2("by-layer", n_layer=4, scale_attn_by_inverse_layer_idx=True),
    families.llama("plain", num_hidden_layers=4),
    families.opt("plain", num_hidden_layers=4),
    families.gpt_neox("parallel", num_hidden_layers=4),
    families.bloom("from-norm", n_layer=4, apply_residual_connection_post_layernorm=True),
]
DELETABLE = [
    families.llama("alternate", "Qwen3", num_hidden_layers=4, head_dim=8, use_sliding_window=True, sliding_window=3,
        layer_types=SLIDING),
    families.gpt_neo("plain"),
    hf.bert("plain", num_hidden_layers=4),
    families.distilbert("plain", n_layers=4),
]  # fmt: skip
REMOVED = (1, 3)
INFO = MapsInfo(
    model="m", model_hash="", protocol="din2023", corpus="c", n=1, seed=0, dtype="float32"
)


def name(case):
    return case.name


def tokens_for(case, length=9):
    return np.random.default_rng(0).integers(
        0, case.fields["vocab_size"], (2, length), dtype=np.int32
    )


def small(split, count):
    """The first sentences of a split."""
    size = int(split.lengths[:count].sum())
    return Split(split.tokens[:size], split.lengths[:count], split.positions[:count])


def side_by_side(split):
    """Tokens [S, T], zeros behind each sentence, which a causal model does not see; and
    which are real.
    """
    real = np.arange(split.lengths.max()) < split.lengths[:, None]
    tokens = np.zeros(real.shape, np.int32)
    tokens[real] = split.tokens
    return tokens, real


def by_transformers(case, folder, tokens):
    model = (
        getattr(transformers, case.model)
        .from_pretrained(folder, attn_implementation="eager")
        .eval()
    )
    with torch.no_grad():
        return model, model(torch.from_numpy(tokens).long()).logits.numpy()


def logits_of(model, tokens, sites=None):
    return np.asarray(jmat.run(model, tokens, sites=sites, keep=("logits",))[1]["logits"])


@pytest.mark.parametrize("case", MERGEABLE, ids=name)
def test_merged_folder_is_the_model_with_maps(case, tmp_path):
    model, tokens = hf.ours(case), tokens_for(case)
    rng = np.random.default_rng(1)
    F, D = model.config.ffn_width, model.config.width

    def random_map():
        bias = rng.normal(0, 0.3, D).astype(np.float32) if model.config.ffn_bias else None
        return jmat.Linear(rng.normal(0, 0.3 / np.sqrt(F), (F, D)).astype(np.float32), bias)

    maps = {stretch: random_map() for stretch in stretches(REMOVED)}
    inserted = logits_of(model, tokens, stand_ins(model, "merge", REMOVED, maps))
    surgery.save_pruned(tmp_path, model, "merge", REMOVED, maps, INFO)
    merged, _, sites = surgery.load_pruned(tmp_path)
    assert merged.config.layers == 2
    assert not sites
    if case.name.startswith("gpt2"):  # the others: by transformers alone
        np.testing.assert_allclose(
            logits_of(merged, tokens), inserted, atol=1e-5 * np.abs(inserted).max()
        )
    theirs, logits = by_transformers(case, tmp_path, tokens)
    assert theirs.config.num_hidden_layers == 2
    np.testing.assert_allclose(logits, inserted, atol=1e-5 * np.abs(inserted).max())


@pytest.mark.parametrize("case", DELETABLE, ids=name)
def test_deleted_folder_is_the_model_that_skips_blocks(case, tmp_path):
    model, tokens = hf.ours(case), tokens_for(case)
    skipped = logits_of(model, tokens, stand_ins(model, "delete", REMOVED, {}))
    surgery.save_pruned(tmp_path, model, "delete", REMOVED, {}, INFO)
    _, logits = by_transformers(case, tmp_path, tokens)
    np.testing.assert_allclose(logits, skipped, atol=3e-5 * np.abs(skipped).max())
    assert np.abs(logits_of(model, tokens) - skipped).max() > 1e-2


def test_a_model_with_maps_comes_back(gpt2, tmp_path):
    info = MapsInfo(**{**INFO.__dict__, "model_hash": model_hash(parameters(gpt2))})
    rng = np.random.default_rng(0)
    maps = {(1, 3): jmat.Linear(rng.normal(size=(64, 64)).astype(np.float32))}
    surgery.save_pruned(tmp_path, gpt2, "map", (2, 1), maps, info)
    model, _, sites = surgery.load_pruned(tmp_path)
    tokens = np.arange(12, dtype=np.int32)[None]
    expected = logits_of(gpt2, tokens, stand_ins(gpt2, "map", (1, 2), maps))
    np.testing.assert_array_equal(logits_of(model, tokens, sites), expected)
    about = json.loads((tmp_path / "pruned.json").read_text())
    (tmp_path / "pruned.json").write_text(json.dumps(about | {"removed": [1]}))
    with pytest.raises(ValueError, match="not those of blocks 1"):
        surgery.load_pruned(tmp_path)
    # leaves nothing of the maps behind
    surgery.save_pruned(tmp_path, gpt2, "delete", (1,), {}, info)
    assert not surgery.load_pruned(tmp_path)[2]


def test_a_model_with_maps_is_not_read_as_the_whole_model(gpt2, tmp_path):
    info = MapsInfo(**{**INFO.__dict__, "model_hash": model_hash(parameters(gpt2))})
    maps = {(1, 2): jmat.Linear(np.eye(64, dtype=np.float32))}
    surgery.save_pruned(tmp_path, gpt2, "map", (1,), maps, info)
    with pytest.raises(
        ValueError,
        match=r"holds a pruned model: .* Read it with experiments\.tasks or jmat\.studies\.prune",
    ):
        jmat.load(tmp_path)
    assert jmat.load(tmp_path, ignore_maps=True)[0].config.layers == 4


@pytest.mark.parametrize("method", ["map", "delete"])
def test_a_folder_that_is_half_saved_is_no_model(gpt2, tmp_path, method, monkeypatch):
    """The process is killed where a file moves to its place; a model with as many
    blocks was there before.
    """
    info = MapsInfo(**{**INFO.__dict__, "model_hash": model_hash(parameters(gpt2))})
    maps = {(1, 2): jmat.Linear(np.eye(64, dtype=np.float32))}
    replace, left = os.replace, []

    def killed(*paths):
        if not left:
            raise KeyboardInterrupt
        left.pop()
        replace(*paths)

    for moved in range(3 if method == "delete" else 6):
        surgery.save_pruned(tmp_path, gpt2, "delete", (2,), {}, info)
        if not moved and method == "map":
            surgery.save_pruned(tmp_path, gpt2, "map", (2,), {(2, 3): maps[1, 2]}, info)
        left[:] = [True] * moved
        with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
            patched.setattr(os, "replace", killed)
            surgery.save_pruned(tmp_path, gpt2, method, (1,), maps if method == "map" else {}, info)
            assert moved == (2 if method == "delete" else 5)
            assert surgery.load_pruned(tmp_path)[0].config.layers == (
                3 if method == "delete" else 4
            )
            return
        unfinished = r"holds no config\.json; .* killed while it saved the model"
        with pytest.raises(FileNotFoundError, match=unfinished):
            surgery.load_pruned(tmp_path)
        with pytest.raises(
            (FileNotFoundError, ValueError), match=f"{unfinished}|holds a pruned model"
        ):
            jmat.load(tmp_path)
    pytest.fail("the model was never saved whole")


def test_what_cannot_be_merged_is_refused(bert, gpt2):
    for config in (
        bert.config,
        families.config_of(families.opt("350m", do_layer_norm_before=False)),
    ):
        with pytest.raises(ValueError, match=f"{config.family} model: it is post-norm"):
            merge.check_mergeable(config)
    with pytest.raises(ValueError, match="leave --intercept out"):
        merge.check_mergeable(families.config_of(families.llama("plain")), intercept=True)
    with pytest.raises(ValueError, match="block 0 cannot be merged"):
        merge.fold(gpt2, {(0, 1): jmat.Linear(np.zeros((256, 64), np.float32))})
    with pytest.raises(ValueError, match="at least one must be left"):
        surgery.remove_blocks(gpt2, range(4))
    with pytest.raises(ValueError, match="block 4 cannot be removed"):
        surgery.remove_blocks(gpt2, [4])
    wrong = (
        {"method": "cut"},
        {"score": "size"},
        {"rescore": True, "spans": True},
        {"ridge": -1.0},
        {"save": True},
        {"remove": 0},
    )
    for settings in wrong:
        with pytest.raises(ValueError, match=next(iter(settings))):
            prune.Options(**settings)
    with pytest.raises(ValueError, match=r"remove=4: expected 1 \.\. 3"):
        prune.Options(remove=4).check(gpt2.config)


def test_stretches_and_labels():
    assert stretches({5, 2, 6}) == [(2, 3), (5, 7)]
    assert label((6, 2, 5)) == "2,5-6"
    assert label(()) == "none"


def test_scores_are_their_formulas():
    rng = np.random.default_rng(0)
    h = rng.normal(size=(3, 200, 5)).astype(np.float32)
    h[1] = h[0] @ rng.normal(size=(5, 5)).astype(np.float32) + 0.3 * h[1]
    streams, pairs = list(h), [(0, 1), (0, 2), (1, 2)]

    def by_hand(score, X, Y):
        X, Y = X.astype(np.float64), Y.astype(np.float64)
        cosine = (X * Y).sum(1) / np.linalg.norm(X, axis=1) / np.linalg.norm(Y, axis=1)
        if score in ("block_influence", "angular"):
            return (
                1 - cosine.mean()
                if score == "block_influence"
                else np.arccos(cosine).mean() / np.pi
            )
        Y = Y - X if score == "linearity_without_residual" else Y
        X, Y = ((v - v.mean(0)) / np.linalg.norm(v - v.mean(0)) for v in (X, Y))
        return 1 - np.square(Y - X @ np.linalg.lstsq(X, Y, rcond=None)[0]).sum()

    for score in scores.STREAM_SCORES:
        found = scores.stretch_scores(score, streams, pairs)
        for i, j in pairs:
            assert found[i, j] == pytest.approx(by_hand(score, streams[i], streams[j]), abs=1e-5), (
                score
            )
    assert scores.in_order("linearity", {(0, 1): 0.2, (1, 2): 0.9}) == [(1, 2), (0, 1)]
    assert scores.in_order("kl", {(0, 1): 0.2, (1, 2): 0.9}) == [(0, 1), (1, 2)]


def teacher(model, split, mask_token=None):
    """Returns what pruned models are fitted to, read by a pass of its own."""
    acts = capture(model, mask_positions(split, mask_token), stream_sites(model.config.layers))
    return plans.Teacher(model, split, list(acts.values()), mask_token)


@pytest.fixture(scope="module")
def whole(gpt2, gpt2_examples):
    return teacher(gpt2, small(gpt2_examples.fit, 600))


@pytest.fixture(scope="module")
def text(gpt2_examples):
    return whole_sentences(small(gpt2_examples.eval, 64))


def test_a_block_that_does_nothing_goes_first(gpt2, gpt2_examples, text):
    arrays = dict(parameters(gpt2))
    for part in ("attn.o", "ffn.down"):
        for param in ("kernel", "bias"):
            arrays[f"blocks.2.{part}.{param}"] = jax.numpy.zeros_like(
                arrays[f"blocks.2.{part}.{param}"]
            )
    idle = teacher(with_parameters(gpt2, arrays), small(gpt2_examples.fit, 200))
    for score in scores.SCORES:
        [(pruned, scored)] = plans.prune(
            idle, "delete", prune.Options(score=score, score_sentences=32)
        )
        assert pruned.removed == (2,), score
        assert len(scored.scores) == 4
    sums = compare_on_text(
        idle.model, text, {"without": pruned.sites(idle.model, "delete"), "whole": {}}
    )
    np.testing.assert_allclose(sums["without"].nats, sums["whole"].nats, rtol=1e-4)
    assert np.abs(sums["without"].kl).max() < 1e-4
    assert (sums["without"].agree == sums["without"].predictions).all()


def test_sums_are_those_of_the_text(gpt2, text):
    sums = compare_on_text(
        gpt2, text, {0: stand_ins(gpt2, "delete", (1,), {}), 1: {}}, tokens_per_batch=512
    )
    split = text.split
    for row in (0, 5):
        tokens = split.tokens[split.starts[row] :][: split.lengths[row]][None]
        both = (None, stand_ins(gpt2, "delete", (1,), {}))
        log_p, log_q = (
            np.asarray(jax.nn.log_softmax(logits_of(gpt2, tokens, s)[0, :-1])) for s in both
        )
        p, targets = np.exp(log_p), tokens[0, 1:]
        assert sums[0].predictions[row] == len(targets)
        assert sums[1].nats[row] == pytest.approx(
            -log_p[np.arange(len(targets)), targets].sum(), rel=1e-4
        )
        assert sums[0].nats[row] == pytest.approx(
            -log_q[np.arange(len(targets)), targets].sum(), rel=1e-4
        )
        assert sums[0].kl[row] == pytest.approx((p * (log_p - log_q)).sum(), rel=1e-3)
        assert sums[0].agree[row] == (p.argmax(-1) == log_q.argmax(-1)).sum()
    rows = quality_rows(sums, {0: {"removed": 1}, 1: {"removed": 0}})
    assert all(row["low"] <= row["value"] <= row["high"] for row in rows)
    perplexity = next(row for row in rows if row["metric"] == "perplexity" and row["removed"] == 1)
    assert perplexity["value"] == pytest.approx(
        np.exp(sums[0].nats.sum() / sums[0].predictions.sum())
    )
    broken = {0: sums[0]._replace(kl=sums[0].kl * np.nan)}
    assert [row["value"] is None for row in quality_rows(broken, {0: {}})] == [False, True, False]


def test_masked_models_predict_what_is_masked(bert, bert_examples):
    split = small(bert_examples.eval, 40)
    text = whole_sentences(split, mask_token=4, most=24)
    assert (text.split.tokens[text.split.starts + text.split.positions] == 4).all()
    assert (text.targets == split.tokens[split.starts + split.positions][:24]).all()
    sums = compare_on_text(bert, text, {"whole": {}, "cut": stand_ins(bert, "delete", (1,), {})})
    assert (sums["whole"].predictions == 1).all()
    assert sums["cut"].kl.mean() > 0.01


@pytest.mark.slow
def test_maps_lose_less_than_deletion_and_distilled_ones_still_less(whole, text):
    kl, said, losses = {}, [], []
    for method in METHODS:
        options = prune.Options(
            score="block_influence", refit="sequential", distil_steps=25, rescore=True, remove=2
        )
        *_, (pruned, _) = plans.prune(whole, method, options, log=said.append)
        sums = compare_on_text(whole.model, text, {0: pruned.sites(whole.model, method)})[0]
        kl[method] = sums.kl.sum() / sums.predictions.sum()
    assert kl["map"] < kl["delete"]
    assert kl["merge"] < kl["delete"]
    assert kl["distil"] < kl["map"]
    assert any(line.startswith("distil step 25/25: loss") for line in said)
    one_batch = small(whole.split, 24)  # so that the steps' losses can be compared
    maps = plans.fit_maps(whole, "map", prune.Options(), (1, 2))
    distil(
        whole.model,
        one_batch,
        maps,
        steps=20,
        log=lambda step, loss: losses.append(loss),
        log_every=5,
    )
    assert losses[-1] < 0.98 * losses[0]


def test_a_sequential_map_reads_the_stream_that_the_maps_before_left(whole):
    split = small(whole.split, 150)
    few = teacher(whole.model, split)
    original, sequential = (
        plans.fit_maps(few, "map", prune.Options(refit=refit), (1, 3)) for refit in REFITS
    )
    np.testing.assert_array_equal(original[1, 2].W, sequential[1, 2].W)
    tokens, _ = side_by_side(split)
    at = np.arange(split.num_sentences), split.positions
    read, wanted = (
        np.asarray(jmat.run(whole.model, tokens, stop=stop, sites=sites)[0])[at]
        for stop, sites in ((3, {"block.1": original[1, 2]}), (4, None))
    )
    W = np.linalg.lstsq(read.astype(np.float64), wanted.astype(np.float64))[0]
    expected = read @ W
    for maps, alike in ((sequential, True), (original, False)):
        error = np.linalg.norm(read @ np.asarray(maps[3, 4].W) - expected) / np.linalg.norm(
            expected
        )
        assert (error < 1e-4) == alike, error


def test_distilling_that_diverges_is_told(whole):
    maps = plans.fit_maps(whole, "map", prune.Options(), (1, 2))
    with pytest.raises(
        ValueError,
        match=r"the loss was 0\.\d+ at step 1 and is .* at step 2; lower the learning rate",
    ):
        distil(whole.model, small(whole.split, 24), maps, steps=4, learning_rate=1e9)


def test_distillation_losses_are_their_formulas(whole):
    """Before the first step, over every layer after the removed block, by hand."""
    split = small(whole.split, 6)
    maps = plans.fit_maps(whole, "map", prune.Options(), (1,))
    tokens, real = side_by_side(split)
    assert split.lengths.min() > 1
    keep = ("block.1", "block.2", "block.3")  # h_2, h_3 and h_4
    target, mapped = (
        jmat.run(whole.model, tokens, keep=keep, sites=s)[1]
        for s in (None, {"block.1": maps[1, 2]})
    )
    error = [np.square(np.asarray(mapped[k] - target[k], np.float64))[real] for k in keep]
    size = [np.square(np.asarray(target[k], np.float64)).sum(-1)[real] for k in keep]
    plain = np.mean([e.mean(-1) for e in error])
    relative = np.mean([e.sum(-1) / s for e, s in zip(error, size, strict=True)])
    for loss, expected in (("plain", plain), ("relative", relative)):
        said = []
        distil(
            whole.model,
            split,
            maps,
            steps=1,
            loss=loss,
            log=lambda step, value, said=said: said.append(value),
        )
        assert said == [pytest.approx(expected, rel=1e-4)], loss
    with pytest.raises(ValueError, match="loss='squared' is unknown; choose from relative, plain"):
        distil(whole.model, split, maps, loss="squared")
    few, said = plans.Teacher(whole.model, split, whole.streams), []  # the setting arrives
    options = prune.Options(distil_loss="plain", distil_steps=1)
    block_1_first = {(i, i + 1): abs(i - 1.0) for i in range(4)}
    [(pruned, _)] = plans.prune(few, "distil", options, known=block_1_first, log=said.append)
    assert pruned.removed == (1,)
    assert float(said[-1].split("loss ")[1].split(",")[0]) == pytest.approx(plain, rel=1e-3)


def test_by_default_the_block_goes_whose_removal_costs_least(whole):
    """KL of every single removal, from log-probabilities by hand."""
    few = teacher(whole.model, small(whole.split, 12))
    tokens, real = side_by_side(few.split)
    predicted = real[:, 1:]  # the last token of a sentence predicts nothing
    without = [{f"block.{i}": jmat.Identity()} for i in range(4)]
    each = (logits_of(whole.model, tokens, sites)[:, :-1][predicted] for sites in (None, *without))
    log_p, *log_q = (np.asarray(jax.nn.log_softmax(values)).astype(np.float64) for values in each)
    cost = [(np.exp(log_p) * (log_p - q)).sum(-1).mean() for q in log_q]
    [(pruned, scored)] = plans.prune(few, "delete", prune.Options())
    assert pruned.removed == (np.argmin(cost),)
    assert [scored.scores[i, i + 1] for i in range(4)] == pytest.approx(cost, rel=1e-3)
    assert np.argmax(cost) == 0  # which linearity without the residual removes first
    paper = prune.Options(score="linearity_without_residual")
    assert next(plans.prune(whole, "delete", paper))[0].removed == (0,)
    table = plans.block_scores(few, prune.Options())
    assert table["kl"] == scored.scores
    rows = study_rows.block_score_rows(table)
    assert {row["score"] for row in rows} == set(scores.SCORES)
    by_layer = {row["layer"]: row["value"] for row in rows if row["score"] == "linearity"}
    exact = stored_linearity(few.streams)
    assert by_layer == pytest.approx({i: exact[i, i + 1] for i in range(4)}, abs=1e-4)
    assert set(plans.block_scores(few, prune.Options(score="angular"))) == set(scores.STREAM_SCORES)


@pytest.mark.slow
def test_blocks_chosen_by_kl_again_after_each_merge(whole, text):
    options = prune.Options(score="kl", rescore=True, score_sentences=24, remove=2)
    (first, scored), (second, again) = plans.prune(whole, "merge", options)
    assert scored.after == ()
    assert again.after == first.removed
    assert first.removed == min(scored.scores, key=scored.scores.get)[:1] != (0,)
    assert second.removed[:1] == first.removed
    assert set(scored.scores) - set(again.scores) == {(first.removed[0], first.removed[0] + 1)}
    sums = compare_on_text(
        whole.model, text, {k: p.sites(whole.model, "merge") for k, p in enumerate((first, second))}
    )
    assert 0 < sums[0].kl.mean() < sums[1].kl.mean()


@pytest.mark.slow
def test_masked_models_and_half_precision_are_pruned_and_healed(bert_examples):
    split, text = (
        small(bert_examples.fit, 200),
        whole_sentences(small(bert_examples.eval, 40), mask_token=4),
    )
    kl = {}
    for dtype, method in (("float32", "map"), ("float32", "distil"), ("bfloat16", "map")):
        masked = teacher(jmat.load(REFERENCE / "bert", dtype=dtype)[0], split, mask_token=4)
        options = prune.Options(score="block_influence", distil_steps=15, kl_weight=0.1)
        [(pruned, _)] = plans.prune(masked, method, options)
        sums = compare_on_text(masked.model, text, {0: pruned.sites(masked.model, method)})[0]
        kl[dtype, method] = sums.kl.sum() / sums.predictions.sum()
    assert kl["float32", "distil"] < kl["float32", "map"]
    assert kl["bfloat16", "map"] == pytest.approx(kl["float32", "map"], rel=0.3)


def test_merge_fits_the_contribution(whole):
    """With as many features as the stream holds, the fit is that of numpy in float64."""
    for features in merge.FEATURES:
        options = prune.Options(merge_from=features, ridge=1e-2, intercept=True)
        linear = plans.fit_maps(whole, "merge", options, [2])[2, 3]
        site = merge.features_site(2, "hidden")
        [x] = whole.read((site,), {})
        ffn = whole.model.blocks[1].ffn
        x = jax.numpy.asarray(x)
        hidden = np.asarray(ffn.hidden(x), np.float64)
        contribution = (whole.streams[3] - whole.streams[2]).astype(np.float64)
        X = hidden if features == "hidden" else np.asarray(ffn(x), np.float64)
        centred, Y = X - X.mean(0), contribution - contribution.mean(0)
        W = np.linalg.solve(centred.T @ centred + 1e-2 * np.eye(X.shape[1]), centred.T @ Y)
        expected = centred @ W + contribution.mean(0)
        error = np.linalg.norm(np.asarray(linear(hidden.astype(np.float32))) - expected)
        assert error < 1e-3 * np.linalg.norm(expected), features


def test_a_sweep_compiles_nothing_new(whole, text):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled.append(event) if "backend_compile" in event else None
    )
    split = small(whole.split, 40)
    linear = jmat.Linear(np.eye(64, dtype=np.float32))
    # The gradient of a map behind the embedding is one program, behind another block a second one.
    for stretch in ((0, 2), (1, 2), (2, 4), (3, 4)):
        if stretch == (2, 4):
            compiled.clear()
            programs = stack._block._cache_size()
        distil(whole.model, split, {stretch: linear}, steps=2, kl_weight=0.1)
        compare_on_text(
            whole.model,
            text,
            {0: stand_ins(whole.model, "map", range(*stretch), {stretch: linear})},
        )
    assert stack._block._cache_size() == programs
    assert not compiled


def test_figure_has_a_tick_for_every_set_of_blocks(tmp_path):
    """Read off the artists: a tick is shared only by methods that removed the same
    blocks.
    """
    removed = {
        "delete": ("none", "0", "0,2-3"),
        "map": ("none", "0", "0,2-3"),
        "merge": ("none", "2", "2-3"),
    }
    rows = [
        {
            "method": method,
            "removed": k + (k == 2 and "0" in blocks),
            "blocks": blocks,
            "metric": metric,
        }
        | {"value": 1.0 + k + 10 * m}
        for m, (method, sets) in enumerate(removed.items())
        for k, blocks in enumerate(sets)
        for metric in ("perplexity", "kl", "precision@1")
    ]
    figure = study_rows.plot_prune({"rows": rows})
    save_figure(figure, tmp_path / "figure.png")  # which settles the ticks
    for panel in figure.axes:
        ticks = [text.get_text() for text in panel.get_xticklabels()]
        assert ticks == ["none", "0", "2", "2–3", "0, 2–3"]
        assert list(legend(figure)) == ["deleted", "linear map", "merged"]
        for m, (name, line) in enumerate(zip(removed, panel.lines, strict=True)):
            drawn = [ticks[int(x)].replace("–", "-").replace(", ", ",") for x in line.get_xdata()]
            assert drawn == list(removed[name])
            assert list(line.get_ydata()) == [1 + 10 * m, 2 + 10 * m, 3 + 10 * m]
    with pytest.raises(ValueError, match="nothing to draw"):
        study_rows.plot_prune({"rows": rows[:0]})


@pytest.mark.slow
def test_script(tmp_path):
    out = tmp_path / "out"
    printed, said = run(
        "prune", *on("gpt2", out, method="merge", remove=2, score="block_influence", save="true")
    )
    rows = [row for row in rows_of(out) if row.get("removed") == 2]
    assert {row["metric"] for row in rows} == set(study_rows.METRICS)
    blocks = rows[0]["blocks"]
    assert f"without blocks {blocks}" in said
    assert blocks in printed
    assert (out / "prune.png").exists()
    maps, _ = read_maps(out)
    assert all(key.startswith("merge.") for key in maps)
    model, tokenizer = jmat.load(out / "model")
    assert model.config.layers == 2
    assert tokenizer is not None
