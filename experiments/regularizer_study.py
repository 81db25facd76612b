"""Measures how a penalty on the stream's steps changes linearity, shortcuts and loss.

    python -m experiments.regularizer_study --pretrain='--layers=4 --width=96 --heads=4 --epochs=1'
    python -m experiments.regularizer_study --kinds=none,cosine --weights=0.1,0.5,2

Pretrains one model without a regulariser and one with each kind and weight, from the
same seed on the same text, and measures them with the other experiments: held-out loss;
linearity of every block, with and without the residual; accuracy of a linear probe for
the next token's class on every layer; precision@1 of `mat` from every layer; blocks
saved by early exit. Each step is an experiment of its own, with its own folder under
--out, and is not repeated when the study is started again. Writes results.json and
regularizer_study.png. The first command takes about ten minutes a model on two CPU
cores. The paper (arXiv 2405.12250) reports that with the cosine penalty linearity falls
at every layer and that the model becomes better; whether shortcuts gain is the question
here.
"""

import math
import re
import shlex
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Unpack

from absl import flags
from matplotlib.figure import Figure

from experiments import cli, figure_flags, tracking
from experiments.figure_flags import figure_file
from experiments.pretraining.reported import BY_LAYER, MEASURES, reported
from experiments.steps import step
from jmat.report.drawing import Drawing, titled
from jmat.report.plots import plot_by_layer
from jmat.report.results import Content, Results
from jmat.report.tables import Row, format_table
from jmat.runtime.annotations import Keywords
from jmat.runtime.folders import check_output_folder, output_path
from jmat.training.penalties import KINDS

flags.adopt_module_key_flags(figure_flags)
flags.adopt_module_key_flags(tracking)
_KINDS = flags.DEFINE_list(
    "kinds", ["none", "cosine", "mse", "final_jump"], "Regularisers to compare."
)
_WEIGHTS = flags.DEFINE_list(
    "weights", ["0.5"], "Weights of the penalty, for each kind but `none`."
)
_PRETRAIN = flags.DEFINE_string(
    "pretrain",
    "",
    "More flags of experiments.pretrain, the same for every model; not those that the study sets "
    "itself.",
)
_MEASURE = flags.DEFINE_string(
    "measure", "", "More flags of the experiments that measure, such as --num_fit=2000."
)
_OUT = flags.DEFINE_string(
    "out", "runs/regularizer_study", "Folder for results and for every step's own folder."
)
_OVERWRITE = flags.DEFINE_bool(
    "overwrite",
    False,
    "Replace what a study with other flags left in --out, once there is something new.",
)
FIGURE = "regularizer_study.png"


def main(argv: list[str]) -> None:
    """Runs the study."""
    del argv
    overwrite = _OVERWRITE.value
    models = list(dict.fromkeys(variants(_KINDS.value, _WEIGHTS.value)))
    if not models:
        raise ValueError(
            "--kinds and --weights name no model; give such as --kinds=none,cosine --weights=0.5."
        )
    out = output_path(_OUT.value)
    check_output_folder(out)
    folders = {model: out / label(*model).replace(" ", "-") for model in models}
    for folder in (
        folder / experiment for folder in folders.values() for experiment in ("pretrain", *MEASURES)
    ):
        check_output_folder(folder)
    more = {"pretrain": more_flags(_PRETRAIN, ("regularizer", "reg_weight", "out"))}
    more |= dict.fromkeys(MEASURES, more_flags(_MEASURE, ("model", "out")))
    for experiment, given in more.items():
        check_flags(experiment, given)
    config = {flag.name: flag.value for flag in (_KINDS, _WEIGHTS, _PRETRAIN, _MEASURE)}
    claim = cli.claim_folder(
        out, "regularizer_study", config, writes=(figure_file(FIGURE),), overwrite=overwrite
    )
    rows: list[Row] = []
    hashes: Keywords = {}
    texts: Keywords = {}
    for (kind, weight), folder in folders.items():
        name = label(kind, weight)
        given = [f"--regularizer={kind}", f"--reg_weight={weight}"]
        trained = step(
            "pretrain", folder / "pretrain", given, more["pretrain"], overwrite=overwrite
        )
        rows += [{"map": name, **row} for row in trained["rows"] if row["metric"] == "eval_loss"]
        texts["pretrain"] = trained.get("text")
        for experiment, wanted in MEASURES.items():
            given = [f"--model={folder / 'pretrain' / 'model'}"]
            measured = step(
                experiment,
                folder / experiment,
                given,
                more[experiment],
                trained=more["pretrain"],
                overwrite=overwrite,
            )
            rows += reported(name, measured, wanted)
            hashes[name], texts[f"{experiment} {name}"] = (
                measured.get("model_hash"),
                measured.get("text"),
            )
    results = Results(
        "regularizer_study", rows, config, hashes, texts, figures={FIGURE: plot}, tables=table
    )
    look: Keywords = {
        "figure_format": flags.FLAGS.figure_format,
        "width": flags.FLAGS.figure_width,
    }
    written = results.save(out, before=claim.path, say=cli.say, **look)
    print(results.table())
    print(f"wrote {out}/{', '.join(written)}")


def table(rows: Sequence[Row]) -> str:
    """Returns the figures by layer, a table for each metric, and below them those of
    whole models.
    """
    tables = [
        format_table(rows, index="layer", columns=("metric", "map"), metrics=(metric,))
        for metric in BY_LAYER
    ]
    wide = max(len(row["map"]) for row in rows)
    for row in rows:
        if "layer" not in row:
            value = "-" if row["value"] is None else f"{row['value']:.4f}"
            tables.append(f"{row['map']:<{wide}}  {row['metric']:<18}{value}")
    return "\n".join(tables)


def plot(results: Content, **drawing: Unpack[Drawing]) -> Figure:
    """Draws the figures by layer, a panel for each metric, and a curve for each
    penalty.
    """
    title = titled(drawing, "the same model under different penalties")
    return plot_by_layer(results, BY_LAYER, names={"none": "no penalty"}, **title)


def variants(kinds: list[str], weights: list[str]) -> Iterator[tuple[str, float]]:
    """Kind and weight of every model; `none` has no weight."""
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"--kinds has {kind!r}; choose from {', '.join(KINDS)}.")
        for weight in ["0"] if kind == "none" else weights:
            try:
                number = float(weight)
            except ValueError:
                number = math.nan
            if not 0 <= number < math.inf:
                raise ValueError(
                    f"--weights has {weight!r}; expected numbers from 0 on, such as 0.1,0.5,2."
                )
            yield kind, number


def label(kind: str, weight: float) -> str:
    """Returns the name of a model in the study's rows, such as `cosine 0.5`."""
    short = f"{weight:g}"
    return f"{kind} {short if float(short) == weight else repr(weight)}" if weight else kind


def more_flags(flag: flags.FlagHolder[str], own: Collection[str]) -> list[str]:
    """Returns the flags that are one flag's value. Raises ValueError where the study
    sets one of them itself.
    """
    try:
        given = shlex.split(flag.value)
        in_files = flags.FLAGS.read_flags_from_files(given)
    except (ValueError, flags.Error) as error:
        raise ValueError(f"--{flag.name}={flag.value} does not read as flags: {error}.") from None
    for text in in_files:
        name = re.match(r"--?(\w*)", text)
        if name is not None and (name[1] in own or text == "--"):
            raise ValueError(
                f"--{flag.name} has {text}, which the study sets itself: leave it out."
            )
    return given


def check_flags(experiment: str, given: list[str]) -> None:
    """Raises ValueError where an experiment does not take these flags, or cannot use
    the text that they name.

    The check runs in a process of its own, before any model is trained.
    """
    if not given:
        return
    check = [f"experiments.{experiment}", "--only_check_args"]
    if experiment in MEASURES:
        check = ["experiments.check_text", experiment]
    checked = subprocess.run(
        [sys.executable, "-m", *check, *given], check=False, capture_output=True, text=True
    )
    if checked.returncode:
        said = checked.stderr.strip().splitlines() or [f"exit code {checked.returncode}"]
        reason = next(
            (line.removeprefix("error: ") for line in said if line.startswith("error: ")), said[0]
        )
        raise ValueError(f"{experiment} does not take {shlex.join(given)}: {reason}")


if __name__ == "__main__":
    cli.run(main)
