"""Reads questions with given answers: a task of the hub, or a JSONL file."""

import dataclasses
import pathlib

from jmat.data.hub_tasks import TASKS, hub_task
from jmat.data.json_lines import read_json_lines
from jmat.runtime.annotations import Fields
from jmat.runtime.names import known_name


@dataclasses.dataclass(frozen=True)
class Question:
    """Holds one line of a task."""

    prompt: str
    choices: tuple[str, ...]
    answer: int  # index of the right choice


def read_task(name_or_path: str | pathlib.Path) -> list[Question]:
    """Reads the questions of a task of the hub (`jmat.data.hub_tasks.TASKS`), or of a
    JSONL file.

    Raises what `jmat.data.hub_tasks.hub_task` and
    `jmat.data.json_lines.read_json_lines` do.
    """
    if (named := known_name(name_or_path, TASKS, pathlib.Path.is_file, kind="task")) is not None:
        return [_question(fields) for fields in hub_task(named)]
    expected = (
        '{"question" or "context": text, "choices": [two or more texts], '
        '"answer": index of the right one, from 0}'
    )
    return read_json_lines(name_or_path, _own_question, expected)


def _own_question(fields: Fields) -> Question:
    """Returns a question of a user's file. Raises ValueError for two equal choices,
    which are equally likely.
    """
    question = _question(fields)
    choices = [choice.strip() for choice in question.choices]
    if twice := [choice for choice in choices if choices.count(choice) > 1]:
        raise ValueError(f"the choice {twice[0]!r} is there twice")
    return question


def _question(fields: Fields) -> Question:
    if "question" not in fields and "context" not in fields:
        raise ValueError("it has neither a question nor a context")
    if "question" in fields and "context" in fields:
        raise ValueError("it has both a question and a context")
    kind = "question" if "question" in fields else "context"
    asked, choices, answer = fields[kind], fields["choices"], fields["answer"]
    if not _is_text(asked):
        raise ValueError(f"the {kind} is {asked!r}, not a text, or an empty one")
    if not isinstance(choices, list) or len(choices) < 2:
        raise ValueError(f"choices={choices!r} is no list of two or more texts")
    if wrong := [choice for choice in choices if not _is_text(choice)]:
        raise ValueError(f"the choice {wrong[0]!r} is not a text, or an empty one")
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise ValueError(f"answer={answer!r} is no index of {len(choices)} choices")
    prompt = f"Question: {asked}\nAnswer:" if kind == "question" else asked
    return Question(prompt, tuple(choices), answer)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())
