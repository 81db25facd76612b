"""Perplexity and multiple choice: log-likelihoods as computed by hand, prompts cut, bad
files named, the script.
"""

import json

import numpy as np
import pytest

import jmat
from jmat.data.encoding import SpecialTokens
from jmat.studies.tasks import choices
from jmat.studies.tasks import scoring as tasks
from jmat.studies.tasks.questions import Question, read_task
from tests.scripts import rows_of, run
from tests.test_reference import REFERENCE

QUESTIONS = [
    {"question": "What does it return?", "choices": ["A list of values.", "zq"], "answer": 0},
    {"context": "This function returns", "choices": ["qqqq zzzz", "the value", "xx"], "answer": 1},
]


@pytest.fixture(scope="module")
def loaded():
    return jmat.load(REFERENCE / "gpt2")


@pytest.fixture
def task(tmp_path):
    path = tmp_path / "task.jsonl"
    path.write_text("\n".join(map(json.dumps, QUESTIONS)))
    return path


def by_hand(model, tokens, scored_from):
    """Σ ln p of the tokens from `scored_from` on, in float64 from the logits of one
    unpadded row.
    """
    logits = jmat.run(model, np.asarray([tokens], np.int32), keep=("logits",))[1]["logits"]
    scores = np.asarray(logits, np.float64)[0]
    log_p = (
        scores
        - np.log(np.exp(scores - scores.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - scores.max(-1, keepdims=True)
    )
    return sum(log_p[t - 1, tokens[t]] for t in range(max(scored_from, 1), len(tokens)))


def test_log_likelihoods_and_answers(loaded, task):
    model, tokenizer = loaded
    questions = read_task(task)
    assert questions[0].prompt == "Question: What does it return?\nAnswer:"
    expected = []
    for question in questions:
        for choice in question.choices:
            prompt, whole = (
                tokenizer(question.prompt)["input_ids"],
                tokenizer(f"{question.prompt} {choice}")["input_ids"],
            )
            assert whole[: len(prompt)] == prompt  # byte-level BPE does not join across the space
            expected.append((whole, len(prompt)))
    passages = [tasks.Passage(np.asarray(tokens, np.int32), first) for tokens, first in expected]
    found = tasks.log_likelihoods(model, passages, tokens_per_batch=64)
    np.testing.assert_allclose(
        found[:2], [by_hand(model, *pair) for pair in expected[:2]], rtol=1e-4
    )
    sizes = [len(choice) for question in questions for choice in question.choices]
    of_questions = choices.choice_scores(model, tokenizer, questions)
    np.testing.assert_allclose(np.concatenate(of_questions[0]), found, rtol=1e-4)
    np.testing.assert_allclose(np.concatenate(of_questions[1]), found / sizes, rtol=1e-4)
    assert [len(scores) for scores in of_questions[0]] == [2, 3]
    whole, per_character = (
        np.concatenate([choices.best_choices(scores) for scores in each]) for each in of_questions
    )
    assert whole.tolist() == [found[:2].argmax(), found[2:].argmax()]
    assert per_character.tolist() == [(found / sizes)[:2].argmax(), (found / sizes)[2:].argmax()]
    assert per_character.tolist() == [0, 1]  # what a model that has read docstrings says


def test_a_long_prompt_loses_its_beginning(loaded):
    _, tokenizer = loaded
    prompt, choice = "one two three four five six", "seven"
    whole = tokenizer(f"{prompt} {choice}")["input_ids"]
    alone = tokenizer(prompt)["input_ids"]
    passage = tasks.continued(tokenizer, prompt, f" {choice}", len(whole) - 2, SpecialTokens())
    assert passage.tokens.tolist() == whole[2:]
    assert passage.scored_from == len(alone) - 2
    with pytest.raises(
        ValueError,
        match=f"the choice 'seven'… has .* tokens; the model reads {len(whole) - len(alone)}",
    ):
        tasks.continued(tokenizer, prompt, f" {choice}", len(whole) - len(alone), SpecialTokens())


def test_a_choice_that_is_too_long_is_told_before_anything_is_computed(loaded, monkeypatch):
    model, tokenizer = loaded
    monkeypatch.setattr(tasks, "run", None)
    questions = [
        Question("It is", ("hot", "cold"), 0),
        Question("It is", ("a", "the value " * 200), 0),
    ]
    choices.check_choices(model, tokenizer, questions[:1])
    with pytest.raises(ValueError, match=r"the choice 'the value .* tokens; the model reads"):
        choices.check_choices(model, tokenizer, questions)


def test_perplexity_counts_every_token_but_the_first_of_a_piece(loaded):
    model, tokenizer = loaded
    lines = ["Returns the value.", "a", " ".join(["the value of the array"] * 60)]
    rows = tasks.text_rows(model, tokenizer, "text", lines)
    sizes = [len(ids) for ids in tokenizer(lines)["input_ids"]]
    limit = model.config.num_positions
    assert sizes[2] > limit
    assert rows[0]["n"] == sum(size - 1 - (size - 1) // limit for size in sizes)
    assert rows[0]["low"] <= rows[0]["value"] <= rows[0]["high"]
    short = tokenizer(lines[0])["input_ids"]
    alone = tasks.text_rows(model, tokenizer, "text", lines[:1])[0]["value"]
    assert alone == pytest.approx(np.exp(-by_hand(model, short, 1) / (len(short) - 1)), rel=1e-4)


def test_what_is_cut_is_counted(loaded, caplog):
    model, tokenizer = loaded
    long = " ".join(["the value of the array"] * 60)
    tasks.text_rows(model, tokenizer, "mine.txt", ["Returns the value.", long])
    assert (
        "1 of 2 lines of mine.txt are longer than 128 tokens, and are read in pieces."
        in caplog.text
    )
    questions = [Question("It returns", ("a", "b"), 0), Question(long, ("a", "b"), 0)]
    choices.choice_scores(model, tokenizer, questions)
    assert (
        "2 of 4 prompts with a choice are longer than 128 tokens: the prompts lost their "
        "beginnings." in caplog.text
    )
    caplog.clear()
    tasks.text_rows(model, tokenizer, "mine.txt", ["Returns the value."])
    choices.choice_scores(model, tokenizer, questions[:1])
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"choices": ["a", "b"], "answer": 0}', "neither a question nor a context"),
        (
            '{"context": "x", "question": "y", "choices": ["a", "b"], "answer": 0}',
            "both a question and a context",
        ),
        ('{"context": "x", "choices": ["a"], "answer": 0}', "two or more"),
        ('{"context": "x", "choices": ["a", "b"], "answer": 2}', "answer=2 is no index of 2"),
        (
            '{"context": "x", "choices": ["a", ""], "answer": 1}',
            "the choice '' is not a text, or an empty one",
        ),
        ('{"context": "x", "choices": {"a": "b"}, "answer": 0}', "two or more"),
        (
            '{"question": null, "choices": ["a", "b"], "answer": 1}',
            "the question is None, not a text",
        ),
        (
            '{"question": " ", "choices": ["a", "b"], "answer": 1}',
            "the question is ' ', not a text, or an empty one",
        ),
        ("[1]", "line 2"),
        ("{", "line 2"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, says):
    path = tmp_path / "task.jsonl"
    path.write_text(f"{json.dumps(QUESTIONS[0])}\n{line}\n")
    with pytest.raises(ValueError, match=says):
        read_task(path)
    path.write_text(" \n")
    with pytest.raises(ValueError, match="is empty; expected JSON lines"):
        read_task(path)


def test_masked_models_are_refused(bert):
    with pytest.raises(ValueError, match="no causal language model"):
        tasks.check_causal(bert, None, "bert")


@pytest.mark.slow
def test_script(tmp_path, task):
    text = tmp_path / "text.txt"
    text.write_text("Returns the value.\nRaises an error if there is none.\n")
    out = tmp_path / "out"
    flags = [f"--model={REFERENCE / 'gpt2'}", f"--text={text}", f"--tasks={task}", f"--out={out}"]
    printed, _ = run("tasks", *flags)
    rows = {row["metric"]: row for row in rows_of(out)}
    assert set(rows) == {"perplexity", "accuracy", "accuracy_norm", "chance"}
    assert rows["chance"]["value"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert rows["accuracy_norm"]["value"] == 1
    assert "accuracy_norm" in printed
