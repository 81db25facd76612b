"""Defines --track, and sends the figures of a finished run to a tracker.

Each figure becomes a scalar named after its metric and its map, such as
`precision@1/mat`, with the layer as step. Its interval becomes two more, `…/low` and
`…/high`. The settings go along. All that is sent comes out of results.json.
"""

import collections
import importlib.util
import json
import pathlib
import shutil
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from absl import flags

from jmat.report.tables import Row
from jmat.runtime.annotations import Fields, JsonObject, Keywords
from jmat.runtime.errors import in_one_line
from jmat.runtime.folders import OutputFolder
from jmat.runtime.json_files import read_json_object

# tracker → the package that writes for it, and its extra
PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
_STEPS = ("layer", "removed", "step")  # the first of these that a row has is its step
# Fields that are part of a name: words always, numbers where a name would else have two figures at
# one step.
_WORDS = (
    "model",
    "text",
    "task",
    "fit_corpus",
    "eval_corpus",
    "map",
    "of",
    "method",
    "score",
    "confidence",
    "check",
    "site",
)
_NUMBERS = ("target", "n_fit", "batch", "sentence", "position")

flags.DEFINE_enum(
    "track",
    None,
    list(PACKAGES),
    "Send the figures to a tracker when the run ends. tensorboard: to OUT/tensorboard, with the "
    "extra `tensorboard`; wandb: to the project jmat of Weights & Biases, with the extra `wandb`.",
)


class Point(NamedTuple):
    """Holds one scalar of a tracker."""

    name: str
    step: int
    value: float


def chosen() -> tuple[str, ...]:
    """Returns the tracker of --track, if there is one.

    Raises:
      ValueError: its package is not installed.
    """
    name: str | None = flags.FLAGS["track"].value
    if name is None:
        return ()
    spec = importlib.util.find_spec(PACKAGES[name])
    if spec is None or spec.origin is None:  # a folder of that name has no origin
        raise ValueError(
            f"--track={name} needs the package {PACKAGES[name]}: pip install 'jmat[{name}]'."
        )
    return (name,)


def send(claim: OutputFolder) -> str:
    """Sends the results in an output folder to a tracker, and returns a sentence on it.

    Raises:
      ValueError: the tracker failed; the run's files are not touched.
    """
    (name,) = chosen()
    about, rows = _read(claim.folder)
    scalars = [point for study, of_study in rows.items() for point in points(of_study, study)]
    try:
        where = {"tensorboard": _to_tensorboard, "wandb": _to_wandb}[name](claim, about, scalars)
    except Exception as error:  # whatever a tracker raises, such as errors of its network
        reason = in_one_line(error).rstrip(".")
        raise ValueError(
            f"--track={name} failed: {reason}. All results are in {claim.folder}."
        ) from error
    return f"sent {len(scalars):,} scalars to {where}"


def points(rows: Sequence[Row], study: str = "") -> list[Point]:
    """Returns the scalars of rows, by step.

    A row without a layer, a number of removed blocks or a training step is numbered
    within its name, in the order of results.json. Rows without a value are left out.

    Args:
      rows: rows of results.json.
      study: begins the names, where there are several studies.
    """
    series: dict[tuple[str, bool], list[tuple[Row, int | None]]] = collections.defaultdict(list)
    for row in rows:
        words = [f"{row[key]}" for key in _WORDS if row.get(key) is not None]
        step = next((int(row[key]) for key in _STEPS if row.get(key) is not None), None)
        name = "/".join([*([study] if study else []), row["metric"], *words])
        series[name, step is None].append((row, step))
    named: dict[str, list[tuple[Row, int | None]]] = collections.defaultdict(list)
    for (name, _), members in series.items():
        steps = [step for _, step in members]
        numbers = _NUMBERS if None not in steps and len(set(steps)) < len(steps) else ()
        for row, step in members:
            parts = [f"{key}={row[key]}" for key in numbers if row.get(key) is not None]
            named["/".join([name, *parts])].append((row, step))
    found = [point for name, members in named.items() for point in _scalars(name, members)]
    return sorted(found, key=lambda point: point.step)


def _scalars(name: str, members: Sequence[tuple[Row, int | None]]) -> Iterator[Point]:
    """Yields the scalars of one name."""
    steps = [step for _, step in members]
    distinct = None not in steps and len(set(steps)) == len(steps)
    for number, (row, step) in enumerate(members):
        at = step if distinct and step is not None else number
        for end in ("value", "low", "high"):
            if row.get(end) is not None:
                yield Point(name if end == "value" else f"{name}/{end}", at, float(row[end]))


def _read(folder: pathlib.Path) -> tuple[JsonObject, dict[str, Sequence[Row]]]:
    """Returns the settings of a run, and its rows by study ("" for a single one)."""
    single = folder / "results.json"
    content = read_json_object(single if single.exists() else folder / "report.json")
    about: Keywords = {
        key: content[key]
        for key in ("experiment", "config", "model_hash", "text")
        if key in content
    }
    if single.exists():
        return about, {"": content["rows"]}
    return about, {study: each["rows"] for study, each in content["studies"].items()}


def _to_tensorboard(claim: OutputFolder, about: Fields, scalars: Sequence[Point]) -> str:
    from tensorboardX import SummaryWriter

    folder = claim.path("tensorboard")
    shutil.rmtree(folder, ignore_errors=True)  # what an earlier run of these flags sent
    with SummaryWriter(logdir=str(folder)) as writer:
        text = json.dumps(about, indent=1, default=str)
        writer.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()))
        for point in scalars:
            writer.add_scalar(point.name, point.value, point.step)
    return f"{folder}: tensorboard --logdir={claim.folder}"


def _to_wandb(claim: OutputFolder, about: Fields, scalars: Sequence[Point]) -> str:
    import wandb

    claim.path("wandb")  # where it keeps its own files
    by_step: dict[int, dict[str, float]] = collections.defaultdict(dict)
    for point in scalars:
        by_step[point.step][point.name] = point.value
    names: Keywords = {
        "project": "jmat",
        "name": claim.folder.name,
        "job_type": about["experiment"],
    }
    with wandb.init(dir=str(claim.folder), config=dict(about), **names) as tracked:
        for step, values in by_step.items():
            tracked.log(values, step=step)
    return "the project jmat of Weights & Biases"
