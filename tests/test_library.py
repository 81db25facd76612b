"""The library as a researcher calls it: each call against what it stands for, computed
directly.
"""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure

import jmat
import jmat.data.reading
import jmat.maps.fit
import jmat.report.results
from jmat.data.examples import fingerprint, mask_positions
from jmat.data.reading import check_texts
from jmat.data.sampling import make_examples
from jmat.data.splitting import divide
from jmat.models.family import check_model
from jmat.report.results import read_results
from jmat.studies import layer_jump
from jmat.studies.settings import Settings, read_subject
from tests.inside import text
from tests.intervals import by_hand
from tests.test_reference import REFERENCE


@pytest.fixture(scope="module")
def loaded():
    return jmat.load(REFERENCE / "gpt2")


@pytest.fixture(scope="module")
def texts():
    return text().read_text("utf-8").splitlines()[:60]


def tokens_of(tokenizer, texts):
    return [np.array(tokenizer(each)["input_ids"], np.int32) for each in texts]


def test_texts_become_one_row_each(loaded, texts):
    batch = jmat.encode(loaded[1], texts)
    for row, (ids, real, positions) in zip(
        tokens_of(loaded[1], texts),
        zip(batch.tokens, batch.segments, batch.positions, strict=True),
        strict=True,
    ):
        n = len(row)
        np.testing.assert_array_equal(ids[:n], row)
        np.testing.assert_array_equal(real, [1] * n + [0] * (len(real) - n))
        np.testing.assert_array_equal(positions[:n], np.arange(n))
    cut = jmat.encode(loaded[1], texts, max_length=3)
    np.testing.assert_array_equal(cut.tokens, batch.tokens[:, :3])


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("one text", "got one text"),
        ([], "got no texts"),
        (["a", ""], r"text 1 has no tokens \(''\)"),
    ],
)
def test_what_is_no_list_of_texts_is_said(loaded, texts, message):
    with pytest.raises(ValueError, match=message):
        jmat.encode(loaded[1], texts)


@pytest.mark.parametrize(
    ("texts", "message"),
    [(["a", 3], "a list that holds an object of type int"), (7, "an object of type int")],
)
def test_what_is_no_text_is_said(loaded, texts, message):
    with pytest.raises(ValueError, match=f"expected a list of texts; got {message}"):
        check_texts(texts, loaded[1])


def test_capture_reads_every_token_in_order(loaded, texts):
    model, tokenizer = loaded
    keep = ("block.2", "block.*.ffn.hidden")
    acts = jmat.capture(model, texts, keep, tokenizer=tokenizer)
    assert list(acts) == ["block.2", *(f"block.{i}.ffn.hidden" for i in range(4))]
    rows = tokens_of(tokenizer, texts)
    np.testing.assert_array_equal(
        acts.sentence, np.repeat(np.arange(len(rows)), list(map(len, rows)))
    )
    np.testing.assert_array_equal(
        acts.position, np.concatenate([np.arange(len(row)) for row in rows])
    )
    for k in (0, 7, 59):
        _, kept = jmat.run(model, rows[k][None], keep=keep)
        for site, values in kept.items():
            np.testing.assert_allclose(
                acts[site][acts.sentence == k], values[0], rtol=1e-4, atol=1e-4
            )
    padded = jmat.capture(model, jmat.encode(tokenizer, texts), "block.2")
    np.testing.assert_allclose(padded["block.2"], acts["block.2"], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(padded.sentence, acts.sentence)


def test_capture_says_what_it_does_not_read(loaded, texts):
    with pytest.raises(ValueError, match="texts need a tokenizer"):
        jmat.capture(loaded[0], texts, "block.2")
    with pytest.raises(
        ValueError, match=r"'block\.0\.attn\.pattern' has a value for every pair of tokens"
    ):
        jmat.capture(loaded[0], texts, "block.0.attn.pattern", tokenizer=loaded[1])
    with pytest.raises(ValueError, match=r"unknown site 'block\.9'"):
        jmat.capture(loaded[0], texts, "block.9", tokenizer=loaded[1])


def test_run_reads_texts(loaded, texts):
    model, tokenizer = loaded
    x, kept = jmat.run(model, texts[:3], tokenizer=tokenizer, keep="block.1")
    batch = jmat.encode(tokenizer, texts[:3])
    expected, kept_of_batch = jmat.run(model, batch.tokens, segments=batch.segments, keep="block.1")
    real = batch.segments > 0
    np.testing.assert_array_equal(x[real], expected[real])
    np.testing.assert_array_equal(kept["block.1"][real], kept_of_batch["block.1"][real])
    with pytest.raises(ValueError, match="texts need a tokenizer"):
        jmat.run(model, texts[:3])
    with pytest.raises(ValueError, match="expected a list of texts; got one text"):
        jmat.run(model, texts[0], tokenizer=tokenizer)


def test_what_is_no_model_is_said(loaded):
    with pytest.raises(ValueError, match="model is of type tuple; expected a Transformer"):
        check_model(loaded)


def test_every_public_call_checks_its_model(loaded, texts, monkeypatch):
    model, tokenizer = loaded
    batch = jmat.encode(tokenizer, texts[:2])
    calls = {
        "jmat.forward": lambda: jmat.run(model, batch),
        "jmat.capture.activations": lambda: jmat.capture(model, batch, "block.1"),
        "jmat.maps.fit": lambda: jmat.fit_map(model, batch, 1, 2),
        "jmat.studies.shortcuts": lambda: jmat.evaluate(
            model, batch, {"id": jmat.Shortcut(1, 2, jmat.Identity())}
        ),
        "jmat.studies.settings": lambda: layer_jump.run(model, texts, tokenizer=tokenizer),
    }

    def refuse(model):
        raise ZeroDivisionError

    for name, call in calls.items():
        with monkeypatch.context() as patched:
            patched.setattr(importlib.import_module(name), "check_model", refuse)
            with pytest.raises(ZeroDivisionError):
                call()


def test_streams_and_sites_are_named_by_layer(loaded):
    assert jmat.streams(loaded[0]) == ("embed", "block.0", "block.1", "block.2", "block.3")
    assert {*jmat.streams(loaded[0]), "block.3.attn.pattern", "logits"} < set(jmat.sites(loaded[0]))


@pytest.mark.parametrize("intercept", [False, True])
def test_a_fit_is_least_squares_of_every_token(loaded, texts, intercept):
    model, tokenizer = loaded
    fit = jmat.fit_map(model, texts, 1, "block.2.attn", tokenizer=tokenizer, intercept=intercept)
    acts = jmat.capture(model, texts, ("block.0", "block.2.attn"), tokenizer=tokenizer)
    X, Y = (acts[site].astype(np.float64) for site in ("block.0", "block.2.attn"))
    ones = np.ones((len(X), int(intercept)))
    expected = (
        np.concatenate([X, ones], 1)
        @ np.linalg.lstsq(np.concatenate([X, ones], 1), Y, rcond=None)[0]
    )
    np.testing.assert_allclose(
        fit.map(acts["block.0"]), expected, rtol=1e-3, atol=1e-3 * np.abs(Y).max()
    )
    assert str(fit).startswith(
        f"Linear map from block.0 to block.2.attn: full rank 64 from {len(X)} examples"
    )
    with pytest.raises(ValueError, match=r"layer 5 is not one of 0 \.\. 4"):
        jmat.fit_map(model, texts, 1, 5, tokenizer=tokenizer)


def test_a_masked_model_is_fitted_under_its_mask_or_on_every_token(texts):
    model, tokenizer = jmat.load(REFERENCE / "bert")
    size = {"max_length": model.config.num_positions, "masked": True, "seed": 3}
    split = make_examples(texts, texts, tokenizer, protocol="jmat", **size).eval
    masked = mask_positions(split, tokenizer.mask_token_id)
    fit = jmat.fit_map(model, texts, 1, 3, tokenizer=tokenizer, seed=3)
    every = jmat.fit_map(model, texts, 1, 3, tokenizer=tokenizer, tokens="all")
    for found, inputs in ((fit, masked), (every, jmat.encode(tokenizer, texts))):
        acts = jmat.capture(model, inputs, ("block.0", "block.2"))
        X, Y = (acts[site].astype(np.float64) for site in ("block.0", "block.2"))
        expected = X @ np.linalg.lstsq(X, Y, rcond=1e-6)[0]
        np.testing.assert_allclose(
            found.map(acts["block.0"]), expected, atol=1e-3 * np.abs(Y).max()
        )
    assert (fit.solution.n, every.solution.n) == (
        len(texts),
        sum(map(len, tokens_of(tokenizer, texts))),
    )
    with pytest.raises(ValueError, match="tokens='some': expected one of predicted, all"):
        jmat.fit_map(model, texts, 1, 3, tokenizer=tokenizer, tokens="some")
    with pytest.raises(
        ValueError, match="a masked model predicts under a mask: give texts, or a Split"
    ):
        jmat.fit_map(model, jmat.encode(tokenizer, texts), 1, 3, tokenizer=tokenizer)


def test_a_fit_needs_a_vector_at_each_token(loaded, texts):
    for site in ("block.1.attn.q", "block.1.attn.pattern"):
        with pytest.raises(
            ValueError,
            match=rf"site '{site}' has more than a vector at each token; .*attn\.head\.0'",
        ):
            jmat.fit_map(loaded[0], texts, site, 2, tokenizer=loaded[1])
    with pytest.raises(
        ValueError, match=r"unknown site 'block\.1\.fn'. Did you mean 'block\.1\.ffn'"
    ):
        jmat.fit_map(loaded[0], texts, 1, "block.1.fn", tokenizer=loaded[1])


def test_a_shortcut_stands_for_its_blocks(loaded, texts):
    model, batch = loaded[0], jmat.encode(loaded[1], texts[:3])
    linear = jmat.Linear(
        jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)), jnp.float32) / 8
    )
    stream, _ = jmat.run(model, batch, stop=1)
    x, _ = jmat.run(model, batch, sites=jmat.Shortcut(1, 4, linear))
    np.testing.assert_allclose(x, linear(stream), rtol=1e-5, atol=1e-5)
    where = {"segments": batch.segments, "positions": batch.positions}
    rest, _ = jmat.run(model, linear(stream), start=3, **where)
    x, _ = jmat.run(model, batch, sites=jmat.Shortcut(1, 3, linear))
    np.testing.assert_allclose(x, rest, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="from a layer to a later one; got 3 to 3"):
        jmat.Shortcut(3, 3, linear)


def test_evaluate_compares_with_the_whole_model(loaded, texts):
    model, tokenizer = loaded
    linear = jmat.fit_map(model, texts, 1, 4, tokenizer=tokenizer).map
    shortcuts = {"mat": jmat.Shortcut(1, 4, linear), "id": jmat.Shortcut(2, 3, jmat.Identity())}
    results = jmat.evaluate(model, texts[:4], shortcuts, tokenizer=tokenizer)
    hits, nats, next_nats = ({name: [] for name in shortcuts} for _ in range(3))
    for row in tokens_of(tokenizer, texts[:4]):
        full = jax.nn.log_softmax(jmat.logits(model, jmat.run(model, row[None])[0][0]))
        for name, shortcut in shortcuts.items():
            short = jax.nn.log_softmax(
                jmat.logits(model, jmat.run(model, row[None], sites=shortcut)[0][0])
            )
            hits[name] += (full.argmax(-1) == short.argmax(-1)).tolist()
            nats[name] += (-full[jnp.arange(len(row)), short.argmax(-1)]).tolist()
            next_nats[name] += (-short[jnp.arange(len(row) - 1), row[1:]]).tolist()
    found = {(row["map"], row["metric"]): row for row in results.rows}
    for name, shortcut in shortcuts.items():
        row = found[name, "precision@1"]
        assert (row["layer"], row["target"], row["n"]) == (
            shortcut.source,
            shortcut.target,
            len(hits[name]),
        )
        assert row["value"] == pytest.approx(np.mean(hits[name]), abs=1.5 / len(hits[name]))
        assert row["low"] < row["value"] < row["high"]
        assert found[name, "surprisal"]["value"] == pytest.approx(np.mean(nats[name]), rel=1e-3)
        for metric, each, of_row in (("surprisal", nats, 0), ("perplexity", next_nats, 1)):
            groups = np.repeat(
                np.arange(4), [len(row) - of_row for row in tokens_of(tokenizer, texts[:4])]
            )
            values = np.array(each[name])
            ends = np.array(
                by_hand(lambda drawn, values=values: values[drawn].mean(), groups, seed=0)
            )
            ends = np.exp(ends) if metric == "perplexity" else ends  # over whole texts
            row = found[name, metric]
            assert [row["low"], row["high"]] == pytest.approx(ends.tolist(), rel=2e-3)
        assert found[name, "perplexity"]["value"] == pytest.approx(
            np.exp(np.mean(next_nats[name])), rel=1e-3
        )
        assert found[name, "perplexity"]["n"] == len(next_nats[name])
    assert "precision@1" in results.table()
    with pytest.raises(ValueError, match="shortcut 'far' leads to layer 9; the last one is 4"):
        jmat.evaluate(model, texts, {"far": jmat.Shortcut(1, 9, linear)}, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="for each name; there are none"):
        jmat.evaluate(model, texts, {}, tokenizer=tokenizer)
    with pytest.raises(
        ValueError, match=r"unknown site 'block\.4': the model has the blocks 0 \.\. 3"
    ):
        jmat.run(model, texts, tokenizer=tokenizer, sites=jmat.Shortcut(1, 9, linear))


def test_a_masked_model_is_evaluated_under_its_mask(texts):
    model, tokenizer = jmat.load(REFERENCE / "bert")
    L, size = (
        model.config.layers,
        {"max_length": model.config.num_positions, "masked": True, "seed": 3},
    )
    results = jmat.evaluate(
        model, texts, {"id": jmat.Shortcut(1, L, jmat.Identity())}, tokenizer=tokenizer, seed=3
    )
    split = make_examples(texts, texts, tokenizer, protocol="jmat", **size).eval
    acts = jmat.capture(model, mask_positions(split, tokenizer.mask_token_id), jmat.streams(model))
    full, short = (jmat.logits(model, acts[f"block.{i}"]).argmax(-1) for i in (L - 1, 0))
    row = next(row for row in results.rows if row["metric"] == "precision@1")
    assert (row["value"], row["n"]) == (
        pytest.approx(float((full == short).mean()), abs=0.02),
        split.num_examples,
    )
    with pytest.raises(ValueError, match="needs a tokenizer"):
        jmat.evaluate(model, split, {"id": jmat.Shortcut(1, L, jmat.Identity())})


def test_maps_are_kept_for_their_model(loaded, tmp_path):
    model, linear = (
        loaded[0],
        jmat.Linear(np.eye(64, dtype=np.float32) * 3, np.ones(64, np.float32)),
    )
    jmat.save_maps(tmp_path / "new", {"mat.1.4": linear}, model=model, n=7, corpus="mine")
    maps = jmat.load_maps(tmp_path / "new", model=model)
    np.testing.assert_array_equal(maps["mat.1.4"].weights, linear.W)
    np.testing.assert_array_equal(maps["mat.1.4"].bias, linear.bias)
    assert (maps.info.model, maps.info.n, maps.info.corpus) == (model.name, 7, "mine")
    with pytest.raises(ValueError, match="were fitted on"):
        jmat.load_maps(tmp_path / "new", model=jmat.load(REFERENCE / "bert")[0])
    with pytest.raises(ValueError, match="give model="):
        jmat.save_maps(tmp_path / "other", {"mat.1.4": linear})


def test_a_study_is_a_call(loaded, texts, tmp_path):
    model, tokenizer = loaded
    results = jmat.studies.layer_jump.run(
        model, texts, layer_jump.Options(seed=2, targets="final"), tokenizer=tokenizer
    )
    assert {row["metric"] for row in results.rows} >= {"precision@1", "surprisal", "kl"}
    assert {row["n"] for row in results.rows} == {15}  # a quarter of the texts
    assert sorted(results.maps) == [f"mat.{l}.4" for l in range(4)]
    assert isinstance(results.plot(), Figure)
    assert (results.config["seed"], results.config["targets"]) == (2, "final")
    written = results.save(tmp_path)
    assert sorted(written) == sorted(path.name for path in tmp_path.iterdir())
    assert read_results(tmp_path)["rows"] == results.rows
    assert set(jmat.load_maps(tmp_path, model=model)) == set(results.maps)
    assert "precision@1" in results._repr_html_()
    with pytest.raises(ValueError, match=r"not 'x\.png'"):
        results.plot("x.png")


def test_a_study_divides_texts_as_a_corpus_file_is_divided(loaded, texts):
    model, tokenizer = loaded
    examples = read_subject(model, [*texts, texts[0]], tokenizer, Settings(seed=4)).examples
    size = {"max_length": model.config.num_positions, "masked": False}
    expected = make_examples(*divide(texts, 3, 1), tokenizer, protocol="din2023", seed=4, **size)
    assert fingerprint(examples) == fingerprint(expected)
    with pytest.raises(ValueError, match="1 different texts are too few"):
        read_subject(model, texts[:1] * 2, tokenizer)
    assert (
        read_subject(model, [f"text {i}" for i in range(8)], tokenizer).examples.eval.num_sentences
        == 2
    )


def test_a_model_describes_itself(loaded):
    lines = repr(loaded[0]).splitlines()
    size = sum(leaf.size for leaf in jax.tree.leaves(loaded[0]))
    assert len(lines) <= 10
    assert str(loaded[0]) == repr(loaded[0])
    assert f"{size:,} parameters" in repr(loaded[0])
    assert "4 blocks, width 64" in repr(loaded[0])


def test_names_are_public():
    for name in jmat.__all__:
        assert getattr(jmat, name) is not None
    assert jmat.__version__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        jmat.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seed": -1}, "seed=-1: expected a whole number from 0 to 4294967295"),
        ({"seed": 2**32}, "seed=4294967296: expected"),
        ({"tokens_per_batch": 0}, "tokens_per_batch=0: expected a whole number of at least 1"),
        ({"route": "disk"}, "route='disk': expected one of auto, memory, streaming"),
        ({"fit_tokens": "some"}, "fit_tokens='some': expected one of sampled, all"),
        ({"protocol": "mine"}, "protocol='mine': expected one of din2023, jmat"),
        ({"skip_first": -1}, "skip_first=-1: expected"),
        ({"targets": "last"}, "targets='last': expected one of final, all"),
    ],
)
def test_a_setting_that_is_not_valid_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        layer_jump.Options(**wrong)
