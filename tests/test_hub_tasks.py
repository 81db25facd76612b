"""Tasks of the hub, read through a stand-in for it: what each asks, and errors."""

import re

import pytest

from jmat.data import hub_corpora
from jmat.data.hub_tasks import TASKS, hub_task
from jmat.studies.tasks.questions import Question, read_task

# A row of each, as the hub has it, and what a model is asked: prompt, choices, answer.
ARC = {
    "question": "What melts ice?",
    "choices": {"text": ["shade", "heat"], "label": ["A", "B"]},
    "answerKey": "B",
}
COPA = {
    "premise": "The lamp was on.",
    "choice1": "It was dark.",
    "choice2": "It was day.",
    "label": 0,
}
CLAIM = {"premise": "It rained.", "hypothesis": "The street is wet."}
ROWS = {
    "arc_easy": (ARC, "Question: What melts ice?\nAnswer:", ("shade", "heat"), 1),
    "arc_challenge": (ARC, "Question: What melts ice?\nAnswer:", ("shade", "heat"), 1),
    "boolq": (
        {"passage": "Ice melts.", "question": "does ice melt", "label": 1},
        "Ice melts.\nQuestion: does ice melt?\nAnswer:",
        ("no", "yes"),
        1,
    ),
    "copa": (
        {**COPA, "question": "cause"},
        "The lamp was on because",
        ("it was dark.", "it was day."),
        0,
    ),
    "rte": (
        {**CLAIM, "label": 1},
        "It rained.\nQuestion: The street is wet. True or false?\nAnswer:",
        ("true", "false"),
        1,
    ),
    "cb": (
        {**CLAIM, "label": 2},
        "It rained.\nQuestion: The street is wet. True, false or neither?\nAnswer:",
        ("true", "false", "neither"),
        2,
    ),
    "hellaswag": (
        {"ctx": "A man sits", "endings": ["down.", "up."], "label": "0"},
        "A man sits",
        ("down.", "up."),
        0,
    ),
}


@pytest.mark.parametrize("name", TASKS)
def test_what_is_asked(name, monkeypatch):
    row, prompt, choices, answer = ROWS[name]
    monkeypatch.setattr(hub_corpora, "stream", lambda what: lambda address: [row, row])
    assert read_task(name) == [Question(prompt, choices, answer)] * 2


@pytest.mark.parametrize("name", TASKS)
def test_files_are_pinned_parquet(name):
    assert re.fullmatch(
        r"hf://datasets/[\w-]+/\w+@[0-9a-f]{40}/[\w-]+/\w+-00000-of-00001\.parquet",
        TASKS[name].address,
    )


def test_effects_follow_with_so():
    (asked,) = hub_task("copa", open_file=lambda address: [{**COPA, "question": "effect"}])
    assert asked["context"] == "The lamp was on so"


def test_unreachable_hub_is_one_sentence():
    def offline(address):
        raise RuntimeError("connection lost\nand a long traceback")

    with pytest.raises(
        ConnectionError,
        match=r"task copa cannot be read .*RuntimeError: connection lost\).*JSONL file",
    ):
        hub_task("copa", open_file=offline)
