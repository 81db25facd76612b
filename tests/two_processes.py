"""One of several processes that work together, run by test_hosts: `python -m
tests.two_processes PORT P ID OUT`.

Writes what it got to OUT/ID.npz, and what each script said to OUT/ID.json.
"""

import contextlib
import io
import json
import pathlib
import sys

import jax
import numpy as np
from absl import flags
from matplotlib.figure import Figure

import jmat
from experiments import cli, common, layer_jump, linearity
from jmat.capture.activations import capture
from jmat.capture.jacobians import jacobian_sums
from jmat.capture.statistics import second_moments
from jmat.capture.stream import all_positions, packed_batches, stream_moments
from jmat.checkpoint import parameters
from jmat.data.examples import load_examples
from jmat.maps.types import Identity
from jmat.metrics.predictions import Predictions
from jmat.runtime import hosts
from jmat.runtime.digests import model_hash
from jmat.studies.evaluation import evaluate
from jmat.studies.linearity import study
from tests.test_streaming import few

SCRIPTS = {"layer_jump": layer_jump, "linearity": linearity}
EXTRA = {"layer_jump": ["--targets=final"], "linearity": ["--noparts"]}
PAIRS = [("embed", "block.3"), ("block.1.ffn.in", "block.1.ffn")]


def fewer_batches_than_processes(model, examples):
    """A capture and moments of which one process has no share, by name."""
    split, found = few(examples.eval, 3), {}
    read = all_positions(split, skip_first=1)
    batches = packed_batches(split, read, row_multiple=jax.local_device_count())
    assert len(batches) == 1
    moments = stream_moments(model, batches, PAIRS)
    for x, y in PAIRS:
        found[f"{x} {y}"] = np.asarray(second_moments(moments, x, y, centred=True))
    return found | capture(model, split, ("embed", "block.3"))


def jacobians(model, examples):
    """Sums of Jacobians of ten prompts, of which each process reads its share."""
    settings = {"max_tokens": 32, "skip_first": 4, "rows": 64}
    sums = jacobian_sums(model, few(examples.eval, 10), ["block.1"], "block.3", **settings)
    assert sums.prompts == 10
    found = {"Jacobian": sums.total["block.1"], "mean of block.1": sums.means["block.1"]}
    return found | {"squares of Jacobians": np.sort(sums.squares["block.1"])}


def evaluated(model, examples):
    """Every example's figures, which both processes have though each computes a half;
    and the hosts' predictions.
    """
    streams = capture(model, few(examples.eval, 60), ("block.1", "block.3"))
    shortcuts = {("id", 2): (Identity(), streams["block.1"])}
    predictions, seen = Predictions(), []
    add = predictions.add
    predictions.add = lambda logits, real=None: seen.append(logits.shape[0]) or add(logits, real)
    values = evaluate(
        model, streams["block.3"], shortcuts, examples_per_batch=8, predictions=predictions
    )["id", 2]
    assert sum(seen) == 64 // hosts.count()  # no process computes all
    assert predictions._count == 60
    return {f"evaluated {name}": value for name, value in values.items()}


def exchanges():
    """What the processes tell one another, float64 to the last bit, and how a failure
    in one reaches the other.
    """
    me = jax.process_index()
    mine = np.random.default_rng(me).standard_normal(3 * me)
    found = {f"gathered {k}": values for k, values in enumerate(hosts.gather(mine))}
    hosts._AT_ONCE = 64  # several rounds
    found["in rounds"] = np.concatenate(hosts.gather(np.arange(100.0) + 1000 * me))
    hosts._AT_ONCE = 64 << 20
    said = []
    for failing in (0, 1):
        try:
            with hosts.together():
                if me == failing:
                    raise ValueError("the disk is full")
                hosts.gather(mine)
        except ValueError as error:
            said.append(str(error))
    try:
        hosts.check_same({"--num_fit": 20 + me, "--seed": 0})
    except ValueError as error:
        said.append(str(error))
    return found, said


def run(script, given):
    """Exit code, standard output and standard error of a script in this process."""
    for flag in flags.FLAGS:
        flags.FLAGS[flag].unparse()
    sys.argv = [f"experiments.{script}", *given]  # by which the script finds its own flags
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        try:
            cli.run(SCRIPTS[script].main)
        except SystemExit as end:
            return end.code, out.getvalue(), err.getvalue()


def main(port, processes, me, out):
    """Everything, in one process, since importing and compiling take the time."""
    folder, joined = (
        pathlib.Path(out),
        [f"--coordinator=localhost:{port}", f"--num_processes={processes}"],
    )
    joined = [*joined, f"--process_id={me}"] if processes > 1 else []
    base = [
        f"--model={folder}",
        f"--examples={folder / 'examples.npz'}",
        "--tokens_per_batch=1024",
        *joined,
    ]
    # drawing is slow, and tested elsewhere
    layer_jump.plot_by_layer = lambda *args, **kwargs: Figure()
    study._figures = lambda *_: {}
    ends = {
        name: run(name, [*base, f"--out={folder / name}", *EXTRA.get(name, [])]) for name in SCRIPTS
    }
    ends["claimed"] = run("linearity", [*base, f"--out={folder / 'layer_jump'}"])
    model = jmat.load(folder)[0]
    examples = load_examples(folder / "examples.npz")
    found = fewer_batches_than_processes(model, examples) | evaluated(model, examples)
    found |= jacobians(model, examples)
    said = []
    if processes > 1:
        more, said = exchanges()
        found |= more
        model.blocks[0].ffn.up.bias[...] += me
        try:
            common.check_same_weights("the model", lambda: model_hash(parameters(model)))
        except ValueError as error:
            said.append(str(error))
    np.savez(folder / f"{me}.npz", **found)
    (folder / f"{me}.json").write_text(json.dumps({"ends": ends, "said": said}))


if __name__ == "__main__":
    port, processes, me, out = sys.argv[1:]
    main(port, int(processes), int(me), out)
