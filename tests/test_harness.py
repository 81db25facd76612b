"""Models for the LM Evaluation Harness score texts as `tasks` does; the harness itself
is in test_lm_eval.py.
"""

import copy
import sys
import types

import numpy as np
import pytest

import jmat
from jmat.maps.types import Identity
from jmat.studies import tasks
from jmat.studies.tasks import choices
from jmat.studies.tasks.harness import harness_model, scorer
from tests.test_reference import REFERENCE

PAIRS = [("Returns the", " value"), ("Raises an error if the", " zq zq"), ("It is", "n't")]


@pytest.fixture(scope="module")
def loaded():
    return jmat.load(REFERENCE / "gpt2")


def by_hand(model, tokens, sites=None):
    """ln p of each token but the first in float64, and whether it is the likeliest."""
    kept = jmat.run(model, np.asarray([tokens], np.int32), sites=sites, keep="logits")[1]["logits"]
    scores = np.asarray(kept, np.float64)[0, :-1]
    log_p = scores - np.logaddexp.reduce(scores, -1, keepdims=True)
    return log_p[np.arange(len(tokens) - 1), tokens[1:]], scores.argmax(-1) == tokens[1:]


def test_continuations_are_those_of_the_model(loaded):
    model, tokenizer = loaded
    likeliest = tokenizer.decode([by_likelihood(model, tokenizer("Returns the")["input_ids"])])
    pairs = [*PAIRS, ("Returns the", likeliest)]
    for (context, continuation), (value, greedy) in zip(
        pairs, scorer(model, tokenizer).continuations(pairs), strict=True
    ):
        tokens, first = (
            tokenizer(context + continuation)["input_ids"],
            len(tokenizer(context)["input_ids"]),
        )
        values, hits = by_hand(model, tokens)
        assert value == pytest.approx(values[first - 1 :].sum(), rel=1e-4)
        assert greedy == hits[first - 1 :].all()
    assert scorer(model, tokenizer).continuations(pairs)[-1][1]
    assert not scorer(model, tokenizer).continuations(pairs)[1][1]


def by_likelihood(model, tokens):
    return int(
        np.asarray(jmat.run(model, np.asarray([tokens], np.int32), keep="logits")[1]["logits"])[
            0, -1
        ].argmax()
    )


def test_continuations_are_those_of_tasks(loaded):
    model, tokenizer = loaded
    questions = [
        tasks.Question("Returns", ("the value", "zq"), 0),
        tasks.Question("It is", ("a", "of the", "x"), 1),
    ]
    pairs = [
        (question.prompt, f" {choice}") for question in questions for choice in question.choices
    ]
    for sites in ({}, {"block.*.ffn": jmat.Zero()}):
        values = [value for value, _ in scorer(model, tokenizer, sites=sites).continuations(pairs)]
        expected = np.concatenate(
            choices.choice_scores(model, tokenizer, questions, sites=sites)[0]
        )
        np.testing.assert_allclose(values, expected, rtol=1e-5)


def test_without_a_context_the_first_token_follows_bos(loaded):
    model, tokenizer = loaded
    ((value, _),) = scorer(model, tokenizer).continuations([("", "Returns the")])
    tokens = [tokenizer.bos_token_id, *tokenizer("Returns the")["input_ids"]]
    assert value == pytest.approx(by_hand(model, tokens)[0].sum(), rel=1e-4)
    assert scorer(model, tokenizer).texts(["Returns the"]) == [pytest.approx(value, rel=1e-5)]


def test_every_token_of_a_long_text_is_scored_once(loaded):
    model, tokenizer = loaded
    limit, long = model.config.num_positions, "the value of the array is new " * 60
    tokens = np.asarray([tokenizer.bos_token_id, *tokenizer(long)["input_ids"]])
    assert 2 * limit < len(tokens) < 5 * limit
    total, scored = 0.0, 1
    # the first window has room for `limit`, each later one for `limit - 1` new tokens
    while scored < len(tokens):
        stop = min(limit, len(tokens)) if scored == 1 else min(scored + limit - 1, len(tokens))
        total += by_hand(model, tokens[max(stop - limit, 0) : stop])[0][scored - stop :].sum()
        scored = stop
    values = scorer(model, tokenizer).texts(["", long, "Returns"])
    assert values[0] == 0
    assert values[1] == pytest.approx(total, rel=1e-4)
    assert values[2] == pytest.approx(scorer(model, tokenizer).texts(["Returns"])[0], rel=1e-5)


def test_an_exit_reads_an_earlier_layer(loaded):
    model, tokenizer = loaded
    tokens = tokenizer("Returns the value")["input_ids"]
    pairs = [("Returns the", " value")]
    for layer in (0, 2, model.config.layers):
        ((value, _),) = scorer(model, tokenizer, exit_layer=layer).continuations(pairs)
        x, _ = jmat.run(model, np.asarray([tokens], np.int32), stop=layer)
        scores = np.asarray(jmat.logits(model, x), np.float64)[0, -2]
        assert value == pytest.approx(scores[tokens[-1]] - np.logaddexp.reduce(scores), rel=1e-4)
    edited = scorer(
        model, tokenizer, exit_layer=2, sites={"block.0.attn": jmat.Zero()}
    ).continuations(pairs)
    sites = {"block.0.attn": jmat.Zero(), "block.2": Identity(), "block.3": Identity()}
    assert edited == scorer(model, tokenizer, sites=sites).continuations(pairs)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"exit_layer": 9}, "exit_layer=9: expected a layer from 0 to 4, the last"),
        ({"exit_layer": -1}, "exit_layer=-1: expected"),
        (
            {"exit_layer": 2, "sites": jmat.Shortcut(3, 4, Identity())},
            "leaves out block.3, which sites names, too",
        ),
    ],
)
def test_exits_that_cannot_be_are_refused(loaded, given, says):
    with pytest.raises(ValueError, match=says):
        scorer(*loaded, **given)


def test_masked_models_and_tokenizers_without_bos_are_refused(bert, loaded):
    model, tokenizer = loaded
    with pytest.raises(ValueError, match="no causal language model"):
        scorer(bert, tokenizer)
    bare = copy.deepcopy(tokenizer)
    bare.bos_token = bare.eos_token = None
    with pytest.raises(ValueError, match="neither BOS nor EOS"):
        scorer(model, bare).texts(["Returns"])


def test_requests_of_the_harness_are_answered(loaded, monkeypatch):
    api = types.SimpleNamespace(LM=object)
    monkeypatch.setitem(
        sys.modules, "lm_eval", types.SimpleNamespace(api=types.SimpleNamespace(model=api))
    )
    monkeypatch.setitem(sys.modules, "lm_eval.api", types.SimpleNamespace(model=api))
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", api)
    harness = harness_model(*loaded, exit_layer=3, tokens_per_batch=64)
    expected = scorer(*loaded, exit_layer=3, tokens_per_batch=64)
    requests = [types.SimpleNamespace(args=pair) for pair in PAIRS]
    assert harness.loglikelihood(requests) == expected.continuations(PAIRS)
    assert harness.loglikelihood([]) == []
    texts = [types.SimpleNamespace(args=(context,)) for context, _ in PAIRS]
    assert harness.loglikelihood_rolling(texts) == expected.texts([context for context, _ in PAIRS])
    options = {"until": ["."], "max_gen_toks": 6}
    asked = [types.SimpleNamespace(args=("Return a new", options))]
    assert harness.generate_until(asked) == expected.answers([("Return a new", options)])


@pytest.mark.slow
def test_answers_are_generated_text(loaded):
    """Each request by itself, whatever the others: with its stops, its law and its end."""
    model, tokenizer = loaded
    limit = model.config.num_positions
    found = scorer(*loaded, tokens_per_batch=64)
    long = "Return a new array with the same shape. " * limit
    requests = [
        ("Return a new", {"until": [" array"], "max_gen_toks": 6}),
        ("The default", {"until": [], "max_gen_toks": 4, "do_sample": False, "temperature": 0.0}),
        (long, {"until": "zzz", "max_gen_toks": 10 * limit}),
        ("The default", {"until": [], "max_gen_toks": 4, "do_sample": True, "top_k": 3}),
        ("The", {"until": [], "max_gen_toks": 4}),
    ]
    own = tokenizer([long])["input_ids"][0][-limit // 2 :]
    options = [
        {"prompts": "Return a new", "stop_strings": " array", "max_new_tokens": 6},
        {"prompts": "The default", "max_new_tokens": 4},
        {"prompts": own, "max_new_tokens": limit // 2, "stop_strings": "zzz"},
        {"prompts": "The default", "max_new_tokens": 4, "temperature": 1.0, "top_k": 3},
        {"prompts": "The", "max_new_tokens": 4},
    ]
    expected = [jmat.generate(model, tokenizer=tokenizer, **each).texts[0] for each in options]
    assert found.answers(requests) == expected
    assert found.answers([]) == []
    with pytest.raises(ValueError, match="the option 'num_beams' of a request is not implemented"):
        found.answers([("The", {"num_beams": 4})])
    with pytest.raises(ValueError, match="max_gen_toks=0: expected a whole number of at least 1"):
        found.answers([("The", {"max_gen_toks": 0})])


def test_the_extra_is_named_where_it_is_missing(loaded, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(
        ValueError, match=r"needs the extra `lm-eval`: pip install 'jmat\[lm-eval\]'"
    ):
        harness_model(*loaded)
