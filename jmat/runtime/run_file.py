"""Reads and writes run.json, which says which run a folder belongs to and what that run
has written there.

    {"experiment": "r2", "config": {"model": "gpt2", …}, "wrote": ["results.json", "r2.png"]}

Folders of version 0.1 list no files: each experiment's own are named here.
"""

import contextlib
import json
import pathlib
import re
from typing import NamedTuple

from jmat.runtime.annotations import JsonObject
from jmat.runtime.files import is_temporary, save_atomically

RUN, RESULTS = "run.json", "results.json"


_MAPS = ("maps.json", "maps.safetensors")


# Without run.json, a folder that holds one of these is a model's or an older run's.
_TELLING = ("*.json", "*.safetensors", "checkpoints", "model", "steps")


# What each experiment of version 0.1 could write, beside results.json: its run.json does not list
# it.
WRITTEN_BY_0_1: dict[str, tuple[str, ...]] = {
    "layer_jump": ("layer_jump.png", *_MAPS, "checkpoints"),
    "r2": ("r2.png", *_MAPS, "checkpoints"),
    "submodule_ablation": ("submodule_ablation.png", *_MAPS),
    "early_exit": ("early_exit.png", *_MAPS),
    "peek": ("peek.json", "peek.html"),
    "cross_corpus": ("pairs.png", "learning_curve.png"),
    "linearity": (
        *(
            "linearity.png",
            "geometry.png",
            "errors.png",
            "checkpoints.png",
            "difference.png",
            "pairs.png",
        ),
        "checkpoints",
    ),
    "prune": ("prune.png", *_MAPS, "model"),
    "probe": ("probe.png",),
    "pretrain": ("checkpoints", "model", "steps"),
    "regularizer_study": ("regularizer_study.png",),
}


class Owner(NamedTuple):
    """Holds the content of run.json."""

    experiment: str
    config: JsonObject
    wrote: list[str]


def read_owner(folder: pathlib.Path, *, overwrite: bool) -> Owner:
    """Returns what run.json says; an owner without a name where there is none, and
    nothing that tells of a run.
    """
    names = {path.name for kind in _TELLING for path in folder.glob(kind)}
    telling = sorted(name for name in names - {RUN} if is_temporary(name) not in (RUN, RESULTS))
    try:
        text = (folder / RUN).read_text("utf-8", errors="replace")
    except FileNotFoundError:
        if telling == [RESULTS] and (owner := _owner_of_results(folder)) is not None:
            return owner
        if telling:
            raise ValueError(
                f"{folder} holds {telling[0]}, and no run.json that says which run wrote it; "
                "choose another --out."
            ) from None
        return Owner("", {}, [])
    if not _is_run_of_jmat(text):
        raise ValueError(not_ours(folder, RUN))
    try:
        content = json.loads(text)
        wrote = content.get("wrote")
        if wrote is None:
            wrote = [RESULTS, *WRITTEN_BY_0_1.get(content["experiment"], ())]
        if not all(pathlib.PurePath(name).name == name not in ("", "..") for name in wrote):
            raise ValueError("a path that leads out of the folder")
        return Owner(content["experiment"], dict(content["config"]), list(wrote))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        if telling and not overwrite:
            raise ValueError(
                f"{folder / RUN} is damaged; choose another --out, or --overwrite."
            ) from None
    return Owner("", {}, [RESULTS] if RESULTS in telling else [])


def _is_run_of_jmat(text: str) -> bool:
    """Returns whether a run.json is one of jmat's, perhaps a damaged one, and not a
    user's file of that name.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return re.match(r'\{\s*"experiment"|$', text.strip("\0 \t\r\n")) is not None
    return isinstance(content, dict) and {"experiment", "config"} <= content.keys()


def _owner_of_results(folder: pathlib.Path) -> Owner | None:
    """Returns whose results.json it is where version 0.1 wrote no run.json beside it."""
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        content = json.loads((folder / RESULTS).read_text("utf-8"))
        if content["experiment"] == "bundled_quality":
            return Owner(content["experiment"], dict(content["config"]), [RESULTS])
    return None


def write_owner(folder: pathlib.Path, owner: Owner) -> None:
    """Writes run.json whole, or leaves the old one."""
    text = to_json(owner._asdict())
    save_atomically(folder / RUN, lambda path: path.write_text(text, "utf-8"))


def not_ours(folder: pathlib.Path, name: str) -> str:
    """Returns the error of a file that a run would replace and that no run wrote."""
    return (
        f"{folder} holds {name}, which no run is known to have written and this one would replace: "
        "move it away, or choose another --out."
    )


def to_json(content: JsonObject) -> str:
    """Returns the text of run.json; values that JSON does not know become strings."""
    return json.dumps(content, indent=1, allow_nan=False, default=str) + "\n"
