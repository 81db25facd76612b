"""Does a penalty on how the stream moves make a model more linear, and its shortcuts better?

    python -m experiments.regularizer_study --pretrain='--layers=4 --width=96 --heads=4 --epochs=1'
    python -m experiments.regularizer_study --kinds=none,cosine --weights=0.1,0.5,2

Pretrains one model without a regulariser and one with each kind and weight, from the same seed on the same text, and
measures them with the other experiments: held-out loss; linearity of every block, with and without the residual;
accuracy of a linear probe for the next token's class on every layer; precision@1 of `mat` from every layer; blocks
saved by early exit. Each step is an experiment of its own, with its own folder under --out, and is not repeated when
the study is started again. Writes results.json and regularizer_study.png. The first command takes about ten minutes a
model on two CPU cores. The paper (arXiv 2405.12250) reports that with the cosine penalty linearity falls at every layer
and that the model becomes better; whether shortcuts gain is the question here.
"""

import json
import math
import pathlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from absl import flags

from experiments import cli
from jmat.folders import check_output_folder, output_path
from jmat.plots import plot_by_layer
from jmat.regularizers import KINDS
from jmat.results import format_table, read_results, write_results
from jmat.study import BY_LAYER, MEASURES, reported

_KINDS = flags.DEFINE_list("kinds", ["none", "cosine", "mse", "final_jump"], "Regularisers to compare.")
_WEIGHTS = flags.DEFINE_list("weights", ["0.5"], "Weights of each but `none`.")
_PRETRAIN = flags.DEFINE_string("pretrain", "", "More flags of experiments.pretrain, the same for every model.")
_MEASURE = flags.DEFINE_string("measure", "", "More flags of the experiments that measure, such as --num_fit=2000.")
_OUT = flags.DEFINE_string("out", "runs/regularizer_study", "Folder for results and for every step's own folder.")
_OVERWRITE = flags.DEFINE_bool(
    "overwrite", False, "Replace what a study with other flags left in --out, once there is something new."
)
FIGURE = "regularizer_study.png"


def main(argv: list[str]) -> None:
    """Runs the study."""
    del argv
    models = list(variants(_KINDS.value, _WEIGHTS.value))
    out = output_path(_OUT.value)
    check_output_folder(out)
    more = {"pretrain": more_flags(_PRETRAIN)} | {experiment: more_flags(_MEASURE) for experiment in MEASURES}
    for experiment, given in more.items():
        check_flags(experiment, given)
    config = {flag.name: flag.value for flag in (_KINDS, _WEIGHTS, _PRETRAIN, _MEASURE)}
    claim = cli.claim_folder(out, "regularizer_study", config, writes=(FIGURE,), overwrite=_OVERWRITE.value)
    rows: list[dict[str, Any]] = []
    hashes: dict[str, Any] = {}
    texts: dict[str, Any] = {}
    for kind, weight in models:
        name = f"{kind} {weight:g}" if weight else kind
        folder = out / name.replace(" ", "-")
        penalty = [f"--regularizer={kind}", f"--reg_weight={weight}"]
        trained = step("pretrain", folder / "pretrain", [*penalty, *more["pretrain"]])
        rows += [{"map": name, **row} for row in trained["rows"] if row["metric"] == "eval_loss"]
        texts["pretrain"] = trained.get("text")
        for experiment, wanted in MEASURES.items():
            given = [f"--model={folder / 'pretrain' / 'model'}", *more[experiment]]
            found = step(experiment, folder / experiment, given)
            rows += reported(name, found, wanted)
            hashes[name], texts[f"{experiment} {name}"] = found.get("model_hash"), found.get("text")
    results = write_results(out, "regularizer_study", config, rows, model_hash=hashes, text=texts)
    title = "the same model under different penalties"
    figure = cli.drawn(claim.path(FIGURE), plot_by_layer, results, BY_LAYER, title=title)
    for metric in BY_LAYER:
        print(format_table(rows, index="layer", columns=("metric", "map"), metrics=(metric,)))
    wide = max(len(row["map"]) for row in rows)
    for row in rows:
        if "layer" not in row:
            value = "-" if row["value"] is None else f"{row['value']:.4f}"
            print(f"{row['map']:<{wide}}  {row['metric']:<18}{value}")
    cli.print_notes(rows)
    print(f"wrote {out}/results.json{figure}")


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
                raise ValueError(f"--weights has {weight!r}; expected numbers from 0 on, such as 0.1,0.5,2.")
            yield kind, number


def more_flags(flag: Any) -> list[str]:
    """The flags that are one flag's value."""
    try:
        return shlex.split(flag.value)
    except ValueError as error:
        raise ValueError(f"--{flag.name}={flag.value} does not read as flags: {error}.") from None


def check_flags(experiment: str, given: list[str]) -> None:
    """Raises ValueError where an experiment does not take these flags, before any model is trained."""
    if not given:
        return
    command = [sys.executable, "-m", f"experiments.{experiment}", *given]
    found = subprocess.run([*command, "--only_check_args"], check=False, capture_output=True, text=True)
    if found.returncode:
        raise ValueError(f"{experiment} does not take {shlex.join(given)}: {found.stderr.strip().splitlines()[0]}")


def step(experiment: str, out: pathlib.Path, given: list[str]) -> dict[str, Any]:
    """Runs one experiment in a process of its own, unless it has run to its end with these flags; its results."""
    done = out / "done.json"
    if done.exists() and json.loads(done.read_text()) != given:
        shutil.rmtree(out)  # of an earlier study with other flags
    if not done.exists():
        cli.say(f"{experiment} → {out}")
        command = [sys.executable, "-m", f"experiments.{experiment}", *given, f"--out={out}"]
        if subprocess.run(command, check=False).returncode:
            raise ValueError(f"{shlex.join(command)} failed, see above; mend it, and start the study again to go on.")
        done.write_text(json.dumps(given))
    return read_results(out)


if __name__ == "__main__":
    cli.run(main)
