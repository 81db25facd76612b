"""Multiple-choice tasks by name from the Hugging Face hub: ARC, HellaSwag, parts of
SuperGLUE. Needs the extra `hub`.

Each is one parquet file of the split that has answers, pinned to a commit.
"""

import dataclasses
from collections.abc import Callable

from jmat.data import hub_corpora
from jmat.runtime.annotations import Fields


@dataclasses.dataclass(frozen=True)
class HubTask:
    """Holds the place of a task on the hub, and how its rows become those of
    `jmat.studies.tasks`' JSONL files.
    """

    about: str
    repo: str
    revision: str
    path: str
    ask: Callable[[Fields], Fields]

    @property
    def address(self) -> str:
        """Returns the address of its file, as `datasets` reads it."""
        return f"hf://datasets/{self.repo}@{self.revision}/{self.path}"


def _arc(row: Fields) -> Fields:
    choices = row["choices"]
    return {
        "question": row["question"],
        "choices": list(choices["text"]),
        "answer": list(choices["label"]).index(row["answerKey"]),
    }


def _boolq(row: Fields) -> Fields:
    context = f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:"
    return {"context": context, "choices": ["no", "yes"], "answer": row["label"]}


def _copa(row: Fields) -> Fields:
    """Returns a question such as `The lamp was on because` … `it was dark.`"""
    joined = {"cause": "because", "effect": "so"}[row["question"]]
    choices = [row[name][:1].lower() + row[name][1:] for name in ("choice1", "choice2")]
    return {
        "context": f"{row['premise'].rstrip('. ')} {joined}",
        "choices": choices,
        "answer": row["label"],
    }


def _rte(row: Fields) -> Fields:
    context = (
        f"{row['premise']}\nQuestion: {row['hypothesis'].rstrip('.')}. True or false?\nAnswer:"
    )
    return {"context": context, "choices": ["true", "false"], "answer": row["label"]}


def _cb(row: Fields) -> Fields:
    context = (
        f"{row['premise']}\nQuestion: {row['hypothesis'].rstrip('.')}. True, false or "
        "neither?\nAnswer:"
    )
    return {"context": context, "choices": ["true", "false", "neither"], "answer": row["label"]}


def _hellaswag(row: Fields) -> Fields:
    return {"context": row["ctx"], "choices": list(row["endings"]), "answer": int(row["label"])}


_ARC = ("allenai/ai2_arc", "210d026faf9955653af8916fad021475a3f00453")
_SUPERGLUE = ("aps/super_glue", "3de24cf8022e94f4ee4b9d55a6f539891524d646")
_HELLASWAG = ("Rowan/hellaswag", "218ec52e09a7e7462a5400043bb9a69a41d06b76")
TASKS = {
    "arc_easy": HubTask("ARC, easy set, test", *_ARC, "ARC-Easy/test-00000-of-00001.parquet", _arc),
    "arc_challenge": HubTask(
        "ARC, challenge set, test", *_ARC, "ARC-Challenge/test-00000-of-00001.parquet", _arc
    ),
    "boolq": HubTask(
        "BoolQ, validation", *_SUPERGLUE, "boolq/validation-00000-of-00001.parquet", _boolq
    ),
    "cb": HubTask(
        "CommitmentBank, validation", *_SUPERGLUE, "cb/validation-00000-of-00001.parquet", _cb
    ),
    "copa": HubTask(
        "COPA, validation", *_SUPERGLUE, "copa/validation-00000-of-00001.parquet", _copa
    ),
    "rte": HubTask("RTE, validation", *_SUPERGLUE, "rte/validation-00000-of-00001.parquet", _rte),
    "hellaswag": HubTask(
        "HellaSwag, validation", *_HELLASWAG, "data/validation-00000-of-00001.parquet", _hellaswag
    ),
}


def hub_task(name: str, *, open_file: hub_corpora.OpenFile | None = None) -> list[Fields]:
    """Returns the questions of a task, as the lines of a JSONL file hold them
    (`jmat.studies.tasks`).

    Args:
      name: one of `TASKS`.
      open_file: reads a file's rows; default: streams it with `datasets`.

    Raises:
      ValueError: the extra is not installed.
      ConnectionError: the hub cannot be read.
    """
    task = TASKS[name]
    open_file = open_file or hub_corpora.stream(f"task {name}")
    advice = "offline, give a JSONL file of questions instead"
    return [
        task.ask(row) for row in hub_corpora.rows(f"task {name}", task.address, open_file, advice)
    ]
