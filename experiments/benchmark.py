"""Measures how fast and how exact jmat is, beside what people use.

    python -m experiments.benchmark
    python -m experiments.benchmark --shape=gpt2-xl --dtype=bfloat16 \\
        --parts=capture,streaming --positions=200000 --num_sentences=30000 --tokens_per_batch=65536

Makes a GPT-2 of a published shape with random weights and random sentences, and
measures in one run on one machine, the contenders in turn:
- `fit`: all L(L + 1)/2 maps from stored activations, against scikit-learn pair by pair;
- `linearity`: of all pairs of layers, against an SVD for every pair, as the public code
  does it;
- `capture`: all streams at sampled positions, against transformers on PyTorch with the
  same sentences, and as a share of the rate of bare matrix products (or of
  --peak_tflops);
- `early_exit`: the whole grid of lambda by thresholding, against a forward pass for
  each;
- `streaming`: moments of all pairs of layers at --positions tokens, and all maps from
  them: tokens/s, share of the peak, peak memory, and what `jmat.models.cost` predicts;
- `suite`: every figure of arXiv 2303.09435 but the sub-modules, against one capture of
  its sentences;
- `decoding`: 80 tokens of greedy text behind 1 and 16 prompts, against transformers'
  `generate`; --shape=gpt2-docs is that of the bundled model;
- `jacobian`: mean derivatives of the final stream by all others, against a loop in
  torch;
- `condition`: errors of several ways to solve least squares, by condition number, and
  with three coordinates 3,000 times as large as the rest.
By default the shape is GPT-2's, for some twenty minutes on two cores; --shape=tiny
--smoke takes a minute, and is not held against the goals. Prints the ratios beside
their goals, misses included, and writes results.json. Times are the best of --repeats,
without compilation; `low` and `high` of a ratio are its extremes over the turns.
Competitors that are not installed are left out with a sentence (`pip install
'jmat[test]'`).
"""

import pathlib
import tempfile

import jax
from absl import flags

from experiments import cli, common, text_flags
from experiments.benchmarking import decoding, jacobians, maps, papers, passes
from experiments.benchmarking.rows import format_errors, format_ratios
from experiments.benchmarking.setup import SHAPES, Bench, random_model, random_sentences
from jmat.checkpoint import parameters
from jmat.data.examples import Examples
from jmat.report.results import write_results
from jmat.runtime.annotations import Keywords
from jmat.runtime.checks import chosen
from jmat.runtime.digests import model_hash
from jmat.runtime.folders import output_path

PARTS = {
    "streaming": passes.streaming_rows,
    "capture": passes.capture_rows,
    "early_exit": papers.early_exit_rows,
    "suite": papers.suite_rows,
    "fit": maps.fit_rows,
    "linearity": maps.linearity_rows,
    "decoding": decoding.decoding_rows,
    "jacobian": jacobians.jacobian_rows,
    "condition": maps.condition_rows,
}
_SHAPE = flags.DEFINE_enum("shape", "gpt2", list(SHAPES), "Shape of the model.")
_PARTS = flags.DEFINE_list("parts", list(PARTS), "Parts to measure.")
_REPEATS = flags.DEFINE_integer(
    "repeats", 3, "Turns of the contenders; the best counts.", lower_bound=1
)
_POSITIONS = flags.DEFINE_integer("positions", 8192, "Tokens of the streaming pass.", lower_bound=1)
_SAMPLED = flags.DEFINE_integer(
    "sampled_pairs", 4, "Pairs on which pair-by-pair rivals are timed.", lower_bound=1
)
_SENTENCES = flags.DEFINE_integer(
    "num_sentences", 3000, "Sentences to fit on; a third as many others are read.", lower_bound=2
)
_PEAK = flags.DEFINE_float(
    "peak_tflops", None, "Peak of the device in --dtype, TFLOP/s; default: measured.", 0.0
)
_SMOKE = flags.DEFINE_bool("smoke", False, "Tiny sizes, whatever other flags say: does it run?")
_SMOKE_SIZES = {"num_sentences": 60, "num_fit": 200, "positions": 500, "tokens_per_batch": 256}
for name in ("dtype", "num_fit", "seed", "tokens_per_batch", "out", "overwrite", "track"):
    flags.declare_key_flag(name)

FLAGS = flags.FLAGS


def main(argv: list[str]) -> None:
    """Runs the experiment."""
    del argv
    parts = chosen("parts", _PARTS.value, list(PARTS))
    if FLAGS.dtype == "float32":
        jax.config.update("jax_default_matmul_precision", "highest")
    for name, size in _SMOKE_SIZES.items() if _SMOKE.value else ():
        FLAGS[name].value = size
    out = output_path(f"runs/benchmark-{_SHAPE.value}" if FLAGS.out is None else FLAGS.out)
    judged = _judged(parts)
    cli.claim_folder(out, "benchmark", cli.own_flags(), overwrite=FLAGS.overwrite)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        bench = set_up(pathlib.Path(folder))
        about: Keywords = {
            "model_hash": model_hash(parameters(bench.model)),
            "text": text_flags.describe_text("random tokens", Examples(bench.fit, bench.eval)),
        }
        for part in (part for part in PARTS if part in parts):
            cli.say(f"measuring {part}")
            rows += [
                {key: row[key] for key in row if part in judged or key != "met"}
                for row in PARTS[part](bench)
            ]
            # After each part, so that nothing measured is lost if a later one fails.
            write_results(out, "benchmark", cli.own_flags(), rows, **about)
    if "condition" in parts:
        errors = [row for row in rows if row["metric"] == "prediction_error"]
        print(format_errors(errors), end="\n\n")
    print(format_ratios(rows))
    if set(parts) - set(judged):
        print("The goals are for GPT-2's shape: sizes so small say nothing about them.")
    print(f"wrote {out}/results.json")


def _judged(parts: list[str]) -> list[str]:
    """Returns the parts whose goals mean something at the sizes of this run."""
    if _SMOKE.value or _SHAPE.value == "tiny":
        return []
    return [part for part in parts if part == "decoding" or _SHAPE.value != "gpt2-docs"]


def set_up(folder: pathlib.Path) -> Bench:
    """The model, and sizes by the flags."""
    cli.say(f"making a model of shape {_SHAPE.value}")
    model = random_model(_SHAPE.value, folder, dtype=FLAGS.dtype, seed=FLAGS.seed)
    vocabulary = model.config.vocab_size
    return Bench(
        model=model,
        folder=folder,
        dtype=FLAGS.dtype,
        fit=random_sentences(_SENTENCES.value, vocabulary, FLAGS.seed + 1),
        eval=random_sentences(max(_SENTENCES.value // 3, 1), vocabulary, FLAGS.seed + 2),
        num_fit=int(FLAGS.num_fit),
        positions=_POSITIONS.value,
        tokens_per_batch=common.tokens_per_batch(),
        sampled=_SAMPLED.value,
        repeats=_REPEATS.value,
        peak=None if _PEAK.value is None else 1e12 * _PEAK.value,
    )


if __name__ == "__main__":
    cli.run(main)
