"""bundled_quality, tasks, pretrain and the study as users call them: every figure by
hand.
"""

import itertools
import json

import jax
import numpy as np
import pytest
from flax import nnx

import jmat
from experiments.pretraining import ngram
from jmat import models
from jmat.checkpoint import parameters
from jmat.data import corpus, packing, splitting
from jmat.metrics.bootstrap import bootstrap_counts
from jmat.studies.tasks.questions import read_task
from jmat.training import train as training
from jmat.training.penalties import Regularizer
from tests.by_hand import Lab, log_p
from tests.figures import legend
from tests.inside import call, changed_model, loaded, text
from tests.test_reference import REFERENCE

# Raw likelihood prefers what is short, likelihood per character what is long and likely.
QUESTIONS = [
    {
        "context": "Returns the name of the",
        "choices": ["a", "file or the name of the object"],
        "answer": 0,
    },
    {
        "context": "Returns the value of the",
        "choices": ["a", "array or the value of the key"],
        "answer": 0,
    },
    {
        "question": "What is given?",
        "choices": ["of the value", "zq", "of the list of values"],
        "answer": 2,
    },
    {"context": "This function returns", "choices": ["the value", "qqqq zzzz"], "answer": 0},
]


def scores(model, ids):
    """Log-probabilities of the token after each token, for token ids of several
    lengths.
    """
    width = -(-max(map(len, ids)) // 64) * 64  # few programs
    mask = np.arange(width) < np.asarray([len(each) for each in ids])[:, None]
    tokens = np.zeros(mask.shape, np.int32)
    tokens[mask] = np.concatenate(ids)
    x = np.asarray(jmat.run(model, tokens, mask=mask)[0])
    return [log_p(model, row[: len(each)]) for row, each in zip(x, ids, strict=True)]


def read_of(parts):
    """Where a text comes from, and fingerprints of it and of its parts, as results.json
    has them.
    """
    known = {
        "corpus": corpus.text_sentences(text(600)),
        "train": parts["train"],
        "eval": parts["eval"],
    }
    return {"source": str(text(600))} | {
        name: corpus.sentences_fingerprint(part) for name, part in known.items()
    }


# --- bundled_quality ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quality():
    with loaded("bundled_quality") as script, pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "_PROMPTS", ("Returns the",))
        yield call(
            "bundled_quality",
            model=None,
            gpt2=changed_model(),
            bert=REFERENCE / "bert",
            corpus=text(600),
            order=3,
            seed=5,
        )


def test_fingerprints_are_of_the_whole_text_and_of_its_parts(quality):
    sentences = corpus.text_sentences(text(600))
    parts = splitting.split(sentences) | {"corpus": sentences}
    prints = {
        name: corpus.sentences_fingerprint(parts[name]) for name in ("corpus", "train", "eval")
    }
    assert quality.results["text"] == {"source": str(text(600)), **prints}


def test_the_model_and_the_n_gram_read_the_same_tokens(quality):
    parts = splitting.split(corpus.text_sentences(text(600)))
    lab = Lab(changed_model())
    end = lab.loaded[1].eos_token_id
    ids = {name: lab.loaded[1](parts[name])["input_ids"] for name in ("train", "eval")}
    counts = np.asarray([len(each) for each in ids["eval"]])
    drawn = bootstrap_counts(len(counts), seed=5)

    def interval(nats):
        resampled = np.percentile((drawn @ nats) / (drawn @ counts), [2.5, 97.5])
        return pytest.approx(np.exp([nats.sum() / counts.sum(), *resampled]).tolist(), rel=1e-3)

    nats = []
    for each, found in zip(ids["eval"], scores(lab.model, ids["eval"]), strict=True):
        wanted = np.asarray([*each[1:], end])
        nats.append(-found[np.arange(len(wanted)), wanted].sum())
    row = quality.one(model="gpt2", metric="perplexity")
    assert [row["value"], row["low"], row["high"]] == interval(np.asarray(nats))
    assert row["n"] == counts.sum()
    assert quality.results["text"] == read_of(parts)
    baseline = ngram.fit(
        [[*each, end] for each in ids["train"]], vocab_size=lab.model.config.vocab_size, order=3
    )
    other = [
        -found[1:].sum()
        for found in ngram.log_prob(baseline, [[*each, end] for each in ids["eval"]])
    ]
    row = quality.one(model="kneser_ney_3")
    assert [row["value"], row["low"], row["high"]] == interval(np.asarray(other))
    assert row["n"] == counts.sum()


@pytest.mark.parametrize(("name", "family"), [("gpt2", None), ("bert", "bert")])
def test_accuracy_is_that_of_the_token_drawn(quality, name, family):
    sentences = splitting.split(corpus.text_sentences(text(600)))["eval"]
    lab, random = Lab(family or changed_model()), np.random.default_rng(5)
    ids = [np.asarray(each) for each in lab.loaded[1](sentences)["input_ids"]]
    masked = family == "bert"
    places = [random.integers(1, len(each) - masked) for each in ids]
    targets = [each[at] for each, at in zip(ids, places, strict=True)]
    if masked:
        for each, at in zip(ids, places, strict=True):
            each[at] = lab.loaded[1].mask_token_id
    read = [at if masked else at - 1 for at in places]
    hits = [
        found[at].argmax() == t
        for found, at, t in zip(scores(lab.model, ids), read, targets, strict=True)
    ]
    row = quality.one(model=name, metric="accuracy")
    low, high = np.percentile(
        bootstrap_counts(len(ids), seed=5) @ np.asarray(hits, float) / len(ids), [2.5, 97.5]
    )
    assert [row["value"], row["low"], row["high"], row["n"]] == pytest.approx(
        [np.mean(hits), low, high, len(ids)]
    )
    assert 0.05 < np.mean(hits) < 0.95


def test_continuations_are_the_models_own(quality):
    lab = Lab(changed_model())
    ids = lab.loaded[1]("Returns the")["input_ids"]
    for _ in range(30):
        best = int(scores(lab.model, [np.asarray(ids)])[0][-1].argmax())
        if best == lab.loaded[1].eos_token_id:
            break
        ids.append(best)
    lines = [line for line in quality.printed.splitlines() if line.startswith("[")]
    assert [line[:5] for line in lines] == ["[0.0]", "[0.8]"]
    assert quality.printed.count(f"[0.0] {lab.loaded[1].decode(ids)}") == 1
    assert quality.results["config"]["seed"] == 5


# --- tasks ----------------------------------------------------------------------------------------


def test_perplexity_and_answers(tmp_path):
    lines = text().read_text("utf-8").split("\n")[:30]
    (tmp_path / "lines.txt").write_text("\n".join(lines), "utf-8")
    (tmp_path / "asked.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)), "utf-8")
    given = {"text": tmp_path / "lines.txt", "tasks": tmp_path / "asked.jsonl"}
    outcome, lab = call("tasks", **given, seed=4), Lab()
    ids = lab.loaded[1](lines)["input_ids"]
    found = scores(lab.model, ids)
    sums = np.asarray(
        [-p[np.arange(len(each) - 1), each[1:]].sum() for each, p in zip(ids, found, strict=True)]
    )
    counts = np.asarray([len(each) - 1 for each in ids])
    drawn = bootstrap_counts(30, seed=4)
    row = outcome.one(metric="perplexity")
    wanted = np.exp(
        [sums.sum() / counts.sum(), *np.percentile((drawn @ sums) / (drawn @ counts), [2.5, 97.5])]
    )
    assert [row["value"], row["low"], row["high"]] == pytest.approx(wanted.tolist(), rel=1e-3)
    assert (row["n"], row["lines"], row["text"]) == (counts.sum(), 30, str(tmp_path / "lines.txt"))

    right = {"accuracy": [], "accuracy_norm": []}
    for asked in QUESTIONS:
        prompt = asked.get("context") or f"Question: {asked['question']}\nAnswer:"
        first = len(lab.loaded[1](prompt)["input_ids"])
        sums = []
        for choice in asked["choices"]:
            each = lab.loaded[1](f"{prompt} {choice}")["input_ids"]
            p = scores(lab.model, [each])[0]
            sums.append(sum(p[at - 1, each[at]] for at in range(first, len(each))))
        per_character = [
            total / len(choice) for total, choice in zip(sums, asked["choices"], strict=True)
        ]
        for metric, values in (("accuracy", sums), ("accuracy_norm", per_character)):
            right[metric].append(float(np.argmax(values) == asked["answer"]))
    assert right["accuracy"] != right["accuracy_norm"]
    drawn = bootstrap_counts(4, seed=4)
    for metric, hits in right.items():
        row = outcome.one(metric=metric)
        low, high = np.percentile(drawn @ hits / 4, [2.5, 97.5])
        assert [row["value"], row["low"], row["high"]] == pytest.approx(
            [np.mean(hits), low, high]
        ), metric
        assert row["n"] == 4
    assert outcome.one(metric="chance")["value"] == pytest.approx((3 / 2 + 1 / 3) / 4)
    questions = map(repr, read_task(tmp_path / "asked.jsonl"))
    read = {
        "lines.txt": corpus.sentences_fingerprint(lines),
        "asked.jsonl": corpus.sentences_fingerprint(questions),
    }
    assert outcome.results["text"] == {
        str(tmp_path / name): fingerprint for name, fingerprint in read.items()
    }


# --- pretrain -------------------------------------------------------------------------------------

TRAINING = {
    "vocab_size": 300,
    "layers": 2,
    "width": 8,
    "heads": 2,
    "length": 32,
    "batch_size": 4,
    "steps": 3,
}
TRAINING |= {
    "optimizer": "adamw",
    "learning_rate": 0.02,
    "warmup_steps": 1,
    "log_every": 1,
    "eval_every": 3,
    "eval_sentences": 20,
}
TRAINING |= {
    "regularizer": "cosine",
    "reg_weight": 100.0,
    "seed": 2,
    "keep_every": 1,
    "checkpoint_every": 1,
}


@pytest.fixture(scope="module")
def measured():
    """The rows that losses are measured on: while the model is trained, and at the end."""
    return []


@pytest.fixture(scope="module")
def trained(measured):
    def make_evaluate(loss, batch, *given, make=training.make_evaluate):
        measured.append(batch)
        return make(loss, batch, *given)

    jax.config.update("jax_numpy_dtype_promotion", "standard")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(training, "make_evaluate", make_evaluate)
            yield call("pretrain", model=None, corpus=text(600), average_checkpoints=2, **TRAINING)
    finally:
        jax.config.update("jax_numpy_dtype_promotion", "strict")


def test_pretraining_begins_and_ends_where_its_flags_say(trained, measured):
    tokenizer = jmat.load(trained.out / "model")[1]
    parts = splitting.split(corpus.text_sentences(text(600)))
    pairs = {
        name: packing.next_tokens(tokenizer(parts[name])["input_ids"], end=tokenizer.eos_token_id)
        for name in parts
    }
    assert trained.results["text"] == read_of(parts)
    model, _ = jmat.load(trained.out / "model")
    assert (model.config.layers, model.config.width, model.config.num_positions) == (2, 8, 32)
    start = models.build(model.config, nnx.Rngs(2))
    data = training.batches(lambda epoch: packing.pack(pairs["train"], 32, (2, epoch)), 4, 0, 1)
    batch, key = next(data)[1], jax.random.key(0)

    def loss(model, batch, penalty):
        total, count = training.causal_lm_loss(model, batch, key, regularizer=penalty)[:2]
        return float(total) / float(count)

    first = trained.one(metric="loss", step=1)["value"]
    assert first == pytest.approx(loss(start, batch, Regularizer("cosine", 100.0)), rel=1e-4)
    assert first > loss(start, batch, Regularizer()) + 0.1
    # Held out: without the penalty, on sentences that are not trained on.
    final = loss(model, packing.pack(pairs["eval"], 32), Regularizer())
    # saved as float16
    assert trained.one(metric="eval_loss")["value"] == pytest.approx(final, rel=2e-3)
    predictions = np.asarray(packing.pack(pairs["eval"], 32).targets) >= 0
    assert trained.one(metric="eval_count")["value"] == predictions.sum()
    watched = packing.pack(pairs["fit"][:20], 32)
    for batch, wanted in zip(measured, (watched, packing.pack(pairs["eval"], 32)), strict=True):
        np.testing.assert_array_equal(batch.tokens, wanted.tokens)
    steps = sorted((trained.out / "steps").iterdir())
    assert [path.name for path in steps] == ["000001", "000002", "000003"]
    kept, _ = jmat.load(steps[-1])
    two, three, mean = (
        parameters(jmat.load(path)[0]) for path in (*steps[1:], trained.out / "model")
    )
    for name, value in mean.items():  # --average_checkpoints
        np.testing.assert_allclose(value, (two[name] + three[name]) / 2, atol=2e-3)
    assert max(np.abs(np.asarray(two[name] - three[name])).max() for name in two) > 4e-3
    held_out = trained.one(metric="held_out_loss", step=3)["value"]
    assert held_out == pytest.approx(loss(kept, watched, Regularizer()), rel=2e-3)
    assert trained.find(metric="held_out_loss") == [trained.one(metric="held_out_loss", step=3)]
    assert [row["step"] for row in trained.find(metric="loss")] == [1, 2, 3]


# --- the study ------------------------------------------------------------------------------------


def test_a_study_trains_and_measures_each_variant_under_its_own_name(monkeypatch):
    """Every step is replaced by results that are its own, so that a swap shows."""
    steps = []

    def step(experiment, out, given, more, *, trained=(), overwrite=False):
        steps.append((experiment, out, [*given, *more]))
        # What was trained with other flags is measured again; only a study that is told to replaces
        # results.
        assert list(trained) == ([] if experiment == "pretrain" else ["--layers=2", "--width=8"])
        assert not overwrite
        kind, number = out.parent.name, len(steps)
        row = {"value": number / 100, "n": 9}
        if experiment == "pretrain":
            rows = [{**row, "metric": metric, "step": 9} for metric in ("eval_loss", "loss")]
            return {"rows": rows, "model_hash": f"hash {number}", "text": {}}
        rows = {
            "linearity": [
                {
                    "map": "mat",
                    "metric": metric,
                    "layer": layer,
                    "target": layer + 1,
                    **row,
                    "value": number + layer,
                }
                for metric in ("linearity", "linearity_without_residual")
                for layer in (0, 1)
            ],
            "probe": [
                {
                    "map": name,
                    "metric": "accuracy",
                    "layer": 0,
                    **row,
                    "value": number / 100 + other,
                }
                for other, name in enumerate(("ridge", "majority"))
            ],
            "layer_jump": [
                {
                    "map": name,
                    "metric": "precision@1",
                    "layer": 0,
                    "target": 2,
                    **row,
                    "value": number / 100 + other,
                }
                for other, name in enumerate(("mat", "id"))
            ],
            "early_exit": [
                {
                    "map": name,
                    "metric": "layers_saved@0.95",
                    "confidence": confidence,
                    **row,
                    "value": number / 100 + other,
                }
                for other, (confidence, name) in enumerate(
                    itertools.product(("gap", "entropy"), ("mat", "id", "mat - id"))
                )
            ],
        }
        assert kind in ("none", "cosine-0.5", "cosine-2")
        return {"rows": rows[experiment], "model_hash": f"hash {number}", "text": {}}

    with loaded("regularizer_study") as script:
        monkeypatch.setattr(script, "step", step)
        monkeypatch.setattr(script, "check_flags", lambda *_: None)
        outcome = call(
            "regularizer_study",
            "--pretrain=--layers=2 --width=8",
            "--measure=--num_fit=20",
            model=None,
            kinds="none,cosine",
            weights="0.5,2",
        )
    experiments = ["pretrain", "linearity", "probe", "layer_jump", "early_exit"]
    assert [experiment for experiment, *_ in steps] == experiments * 3
    for k, (name, kind, weight) in enumerate(
        (("none", "none", 0), ("cosine 0.5", "cosine", 0.5), ("cosine 2", "cosine", 2))
    ):
        folder = outcome.out / name.replace(" ", "-")
        for n, (experiment, out, given) in enumerate(steps[5 * k : 5 * k + 5]):
            assert out == folder / experiment
            if experiment == "pretrain":
                assert f"--regularizer={kind}" in given
                assert [
                    float(flag.partition("=")[2])
                    for flag in given
                    if flag.startswith("--reg_weight")
                ] == [weight]
                assert {"--layers=2", "--width=8"} <= set(given)
                metric, found = "eval_loss", outcome.find(map=name, metric="eval_loss")
            else:
                assert f"--model={folder / 'pretrain' / 'model'}" in given
                assert "--num_fit=20" in given
                metric = {
                    "linearity": "linearity",
                    "probe": "accuracy",
                    "layer_jump": "precision@1",
                }.get(experiment)
                found = (
                    outcome.find(map=name, metric=metric)
                    if metric
                    else outcome.find(map=f"{name}, mat")
                )
            number = 5 * k + n + 1
            values = [number, number + 1] if experiment == "linearity" else [number / 100]
            assert [row["value"] for row in found] == values, (name, experiment)
    assert not outcome.find(metric="loss")
    saved = [row["map"] for row in outcome.rows if row["metric"] == "layers_saved@0.95"]
    assert saved == [
        f"{name}, {kind}"
        for name in ("none", "cosine 0.5", "cosine 2")
        for kind in ("mat", "id", "mat - id")
    ]
    (figure,) = outcome.figures
    titles = ["linearity", "linearity without residual", "accuracy of the probe", "precision@1"]
    assert [panel.get_title() for panel in figure.axes] == titles
    assert list(legend(figure)) == ["no penalty", "cosine 0.5", "cosine 2"]
    assert "cosine 2              eval_loss         0.1100" in outcome.printed
