"""Numbers that decide figures are those that the documents name, and each holds exactly
up to its bound.
"""

import dataclasses
import importlib
import inspect

import numpy as np
import pytest
from absl import flags

import jmat
from jmat.data import Examples, Split
from jmat.metrics.predictions import Predictions
from jmat.metrics.r2 import usual_coordinates
from jmat.report.results import Results
from jmat.report.style import width_in_inches
from jmat.runtime.checks import check_share, check_whole
from jmat.runtime.errors import in_one_line, shortened, shortened_name
from jmat.studies import early_exit, linearity, overview, peek, probe, prune
from jmat.studies.fitting import FitSettings, ReadingSettings
from jmat.studies.overview.tables import number
from jmat.studies.routes import bytes_in_words, choose_route
from jmat.studies.settings import Settings
from tests.inside import loaded

CONSTANTS = {
    "jmat.metrics.r2": {"OUTLIER": 6.0},
    "jmat.runtime.checks": {"LARGEST_SEED": 4294967295},
    "jmat.studies.evaluation": {"KS": (1, 5, 10)},
    "jmat.studies.cross_corpus.rows": {"SIZES": (250, 500, 1000, 2000, 4000, 8000)},
    "jmat.studies.linearity.intrinsic": {"DISCARDED": 0.1},
    "jmat.studies.routes": {"FINE": 4e9},
    "jmat.studies.verify.differences": {"TOLERANCE": 1e-4, "FACTOR": 8.0},
    "jmat.studies.early_exit.curves": {"LEVELS": (0.95, 0.9)},
    "jmat.studies.early_exit.thresholds": {
        "BERT_POSITION": 3,
        "LAMBDAS": (-1.112, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.112),
    },
    "jmat.studies.early_exit.rows": {
        "PROBABILITIES": tuple(pytest.approx(1 - k / 20) for k in range(21))
    },
    "jmat.studies.shortcuts": {"METRICS": ("precision@1", "surprisal", "kl", "perplexity")},
    "jmat.report.style": {"WIDTHS": {"column": 3.25, "page": 6.75}},
    "jmat.report.saving": {"FORMATS": ("png", "pdf", "svg")},
    "jmat.data.splitting": {"SPLIT_SHARES": {"train": 0.78, "fit": 0.155, "eval": 0.065}},
    "jmat.training.penalties": {"KINDS": ("none", "cosine", "mse", "final_jump")},
    "jmat.training.train": {"OPTIMIZERS": ("adamw", "muon")},
    "jmat.checkpoint.load": {"DTYPES": ("float32", "bfloat16", "float16")},
    "jmat.maps.files": {"CONVENTION": "y = x @ W (+ b)"},
    "jmat.studies.prune.scores": {
        "SCORES": ("kl", "block_influence", "angular", "linearity", "linearity_without_residual")
    },
}


@pytest.mark.parametrize("module", CONSTANTS)
def test_constants_are_those_of_the_documents(module):
    found = importlib.import_module(module)
    assert {name: getattr(found, name) for name in CONSTANTS[module]} == CONSTANTS[module]


SHARED = {"seed": 0, "intercept": False, "tokens_per_batch": None}
READING = SHARED | {
    "protocol": "din2023", "skip_first": None, "skip_special": None, "snapshot_folder": None, "snapshot_every": 300.0
}  # fmt: skip
FITTING = READING | {"fit_tokens": "sampled", "route": "auto"}
STUDIES = (
    "layer_jump",
    "r2",
    "submodule_ablation",
    "early_exit",
    "linearity",
    "prune",
    "probe",
    "peek",
)
OPTIONS = {
    "settings": SHARED,
    "layer_jump": FITTING | {"targets": "all"},
    "r2": FITTING,
    "submodules": SHARED
    | {
        "maps": ("mat", "mat_attn", "mat_ffn", "mat_ln1_ln2"),
        "layers": (),
        "refit": "none",
        "heads": False,
    },
    "early_exit": SHARED
    | {"protocol": "din2023", "check_every": 2, "short_list": 512, "delta": 0.1, "epsilon": 0.05}
    | {"timing_examples": 64},
    "linearity": READING
    | {"parts": True, "all_pairs": False, "tokens": "all", "intrinsic_dimension": False},
    "prune": SHARED
    | {
        "method": ("delete", "map"),
        "remove": 1,
        "save": False,
        "score": "kl",
        "rescore": False,
        "spans": False,
    }
    | {
        "refit": "original",
        "ridge": 0.0,
        "merge_from": "hidden",
        "score_sentences": 256,
        "distil_steps": 300,
    }
    | {"learning_rate": 0.003, "kl_weight": 0.0, "distil_loss": "relative"},
    "probe": SHARED | {"classifier": "ridge"},
    "peek": SHARED | {"layers": (), "top": 5, "kinds": ()},
    "cross_corpus": SHARED | {"sizes": (), "layers": ()},
    "tasks": SHARED,
    "verify": SHARED | {"dtype": "float32"},
    "overview": READING
    | {"studies": STUDIES, "method": ("delete", "map"), "remove": 1, "score": "linearity"},
}


@pytest.mark.parametrize("study", OPTIONS)
def test_settings_by_default_are_those_of_the_papers(study):
    module = importlib.import_module(f"jmat.studies.{study}")
    kind = module.Settings if study == "settings" else module.Options
    found = dataclasses.asdict(kind())
    assert {name: found.get(name) for name in OPTIONS[study]} == OPTIONS[study]


FLAGS = {  # script → flags that are no settings of a study, by default
    "layer_jump": {"model": "gpt2-docs", "corpus": "docs", "num_fit": 9000, "num_eval": 3000, "dtype": "float32",
                   "positions_per_sentence": 1, "figure_format": "png", "figure_width": None, "overwrite": False,
                   "examples": None, "piece_length": None, "revision": None, "shard_parameters": False},
    "linearity": {"revisions": [], "against": None},
    "probe": {"labels": None, "against": None},
    "peek": {"sentences": None, "maps": None},
    "cross_corpus": {"corpora": []},
    "pretrain": {"arch": "gpt2", "vocab_size": 4096, "layers": 8, "width": 192, "heads": 6, "length": 96,
                 "batch_size": 32, "optimizer": "muon", "learning_rate": 0.002, "warmup_steps": 100,
                 "weight_decay": 0.1, "regularizer": "none", "reg_weight": 0.5, "steps": 0, "epochs": 4.0,
                 "checkpoint_every": 200, "average_checkpoints": 1, "seed": 0, "log_every": 20, "eval_every": 200,
                 "eval_sentences": 1000, "keep_every": 0, "out": "runs/pretrain", "corpus": "docs"},
    "bundled_quality": {"gpt2": "gpt2-docs", "bert": "bert-docs", "corpus": "docs", "order": 5, "seed": 0,
                        "out": "runs/bundled_quality"},
    "regularizer_study": {"kinds": ["none", "cosine", "mse", "final_jump"], "weights": ["0.5"], "pretrain": "",
                          "measure": "", "out": "runs/regularizer_study"},
    "benchmark": {"shape": "gpt2", "repeats": 3, "positions": 8192, "sampled_pairs": 4, "num_sentences": 3000,
                  "peak_tflops": None, "smoke": False},
}  # fmt: skip


@pytest.mark.parametrize("script", FLAGS)
def test_flags_by_default_are_those_of_the_help(script):
    with loaded(script) as module:
        flags.FLAGS([module.__name__])
        assert {name: flags.FLAGS[name].value for name in FLAGS[script]} == FLAGS[script]


DEFAULTS = {
    "fit_map": {"tokens": "predicted", "seed": 0, "intercept": False, "progress": None, "tokenizer": None,
                "kind": "mat", "solver": "qr"},
    "capture": {"tokenizer": None, "sites": None, "stop": None, "tokens_per_batch": None, "devices": None,
                "progress": None},
    "evaluate": {"tokenizer": None, "seed": 0, "progress": None},
    "load": {"dtype": "float32", "revision": None, "ignore_config": (), "shard_parameters": False,
             "ignore_maps": False},
    "run": {"tokenizer": None, "keep": (), "sites": None, "start": 0, "stop": None, "mask": None, "segments": None,
            "positions": None, "type_ids": None, "read_at": None},
    "save_maps": {"model": None, "info": None, "n": 0, "corpus": "", "format": "jmat"},
    "push_maps": {"model": None, "info": None, "n": 0, "corpus": "", "format": "jmat", "private": False,
                  "revision": None},
    "load_maps": {"model": None, "revision": None},
    "encode": {"max_length": None},
    "logits": {"sites": None},
}  # fmt: skip


@pytest.mark.parametrize("name", DEFAULTS)
def test_functions_by_default_do_what_their_docstrings_say(name):
    parameters = inspect.signature(getattr(jmat, name)).parameters.values()
    found = {each.name: each.default for each in parameters if each.default is not each.empty}
    assert {each: found.get(each) for each in DEFAULTS[name]} == DEFAULTS[name]


# --- bounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spread", "is_usual"), [(5.9, True), (6.0, True), (6.1, False), (0.0, True)]
)
def test_a_coordinate_is_an_outlier_beyond_six_times_the_median_spread(spread, is_usual):
    stream = np.array([[-1.0], [1.0]]) * [1.0, 1.0, 1.0, spread]
    assert usual_coordinates(stream.astype(np.float32)).tolist() == [True, True, True, is_usual]


@pytest.mark.parametrize(("count", "noted"), [(9, False), (10, True)])
def test_ten_equal_predictions_are_noted_and_nine_may_be_chance(count, noted):
    logits = np.random.default_rng(0).normal(size=(count, 20)).astype(np.float32)
    logits[:, 3] = 9
    predictions = Predictions()
    predictions.add(logits)
    assert (predictions.note() is not None) == noted


@pytest.mark.parametrize("order", [[0, 1], [1, 0], [0, 0, 1], [0, 0]])
def test_every_batch_of_predictions_counts(order):
    """Twelve with one most likely token that are not alike, and twelve with another."""
    logits = np.random.default_rng(0).normal(size=(2, 12, 20)).astype(np.float32)
    logits[0, :, 3], logits[1, :, 5] = 9, 9
    predictions = Predictions()
    for batch in order:
        predictions.add(logits[batch])
    note = predictions.note()
    if 1 in order:
        assert note is None
    else:
        assert note is not None
        assert note.startswith("the model's most likely token is the same (3) at all 24 places")


@pytest.mark.parametrize(("apart", "noted"), [(0.5e-4, True), (2e-4, False)])
def test_two_predictions_are_the_same_up_to_rounding(apart, noted):
    logits = np.zeros((2, 2), np.float32)
    logits[1, 0] = 2 * apart  # of which the softmax takes half
    predictions = Predictions()
    predictions.add(logits)
    assert (predictions.note() is not None) == noted


@pytest.mark.parametrize(
    ("activations", "moments", "route"),
    [(4_000_000_000, 1, "memory"), (4_000_000_001, 1, "streaming"), (9_000_000_000, 9_000_000_000, "memory"),
     (9_000_000_001, 9_000_000_000, "streaming")],
)  # fmt: skip
def test_so_many_bytes_are_stored(activations, moments, route):
    assert choose_route(activations, moments)[0] == route


WHOLE = {
    Settings: {"seed": (0, 4294967295), "tokens_per_batch": (1, None)},
    ReadingSettings: {"skip_first": (0, None)},
    FitSettings: {"skip_first": (0, None)},
    early_exit.Options: {
        "check_every": (1, None),
        "short_list": (2, None),
        "timing_examples": (0, None),
    },
    prune.Options: {"remove": (1, None), "score_sentences": (1, None), "distil_steps": (1, None)},
    peek.Options: {"top": (1, None)},
}
LIMITS = [(kind, name, *limits) for kind, of in WHOLE.items() for name, limits in of.items()]


@pytest.mark.parametrize(("kind", "name", "low", "high"), LIMITS)
def test_whole_settings_are_taken_up_to_their_bounds(kind, name, low, high):
    for value in (low, low + 1, *([] if high is None else [high])):
        assert getattr(kind(**{name: value}), name) == value
    words = f"from {low} to {high}" if high is not None else f"of at least {low}"
    for value in (low - 1, True, *([] if high is None else [high + 1])):
        with pytest.raises(
            ValueError, match=f"^{name}={value!r}: expected a whole number {words}\\.$"
        ):
            kind(**{name: value})


CHOICES = [
    (ReadingSettings, "protocol", ("din2023", "jmat")),
    (FitSettings, "fit_tokens", ("sampled", "all")),
    (FitSettings, "route", ("auto", "memory", "streaming")),
    (FitSettings, "solver", ("qr", "lstsq")),
    (linearity.Options, "tokens", ("sampled", "all")),
    (early_exit.Options, "protocol", ("din2023", "jmat")),
    (probe.Options, "classifier", ("ridge", "logistic")),
    (
        prune.Options,
        "score",
        ("kl", "block_influence", "angular", "linearity", "linearity_without_residual"),
    ),
    (prune.Options, "refit", ("original", "sequential")),
    (prune.Options, "merge_from", ("hidden", "output")),
    (prune.Options, "distil_loss", ("relative", "plain")),
    (
        overview.Options,
        "score",
        ("kl", "block_influence", "angular", "linearity", "linearity_without_residual"),
    ),
]


@pytest.mark.parametrize(("kind", "name", "valid"), CHOICES)
def test_settings_are_one_of_their_choices(kind, name, valid):
    for value in valid:
        assert getattr(kind(**{name: value}), name) == value
    with pytest.raises(
        ValueError, match=f"^{name}='other': expected one of {', '.join(valid)}\\.$"
    ):
        kind(**{name: "other"})


@pytest.mark.parametrize("name", ["delta", "epsilon"])
def test_shares_are_from_0_to_1(name):
    for value in (0.0, 0.5, 1.0):
        assert getattr(early_exit.Options(**{name: value}), name) == value
        check_share(name, value)
    for value in (-1e-9, 1.0000001, float("nan")):
        with pytest.raises(ValueError, match=f"^{name}={value!r}: expected a number from 0 to 1"):
            early_exit.Options(**{name: value})


@pytest.mark.parametrize("name", ["ridge", "learning_rate", "kl_weight"])
def test_weights_are_finite_and_not_below_0(name):
    assert getattr(prune.Options(**{name: 0.0}), name) == 0
    for value in (-0.1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"^{name}={value}: expected a number >= 0"):
            prune.Options(**{name: value})


@pytest.mark.parametrize(
    ("blocks", "remove", "right"), [(3, 2, True), (3, 3, False), (1, 1, False), (2, 1, True)]
)
def test_at_least_one_block_stays(gpt2, blocks, remove, right):
    config = dataclasses.replace(gpt2.config, layers=blocks)
    if right:
        prune.Options(remove=remove).check(config)
    else:
        with pytest.raises(
            ValueError, match=f"expected 1 .. {blocks - 1}" if blocks > 1 else "a single block"
        ):
            prune.Options(remove=remove).check(config)


def test_widths_of_figures_are_taken_up_to_their_bounds():
    assert [width_in_inches(width) for width in (2.0, 40, "column", "page", None)] == [
        2.0,
        40.0,
        3.25,
        6.75,
        None,
    ]
    for wrong in (1.99, 40.1, "wide", float("nan")):
        with pytest.raises(ValueError, match=f"width={wrong!r} is not a width of a figure"):
            width_in_inches(wrong)


def test_whole_numbers_are_taken_up_to_their_bounds():
    check_whole("n", 3, 3, 3)
    for wrong in (2, 4, 3.0, True, None):
        with pytest.raises(ValueError, match=f"n={wrong!r}: expected a whole number from 3 to 3"):
            check_whole("n", wrong, 3, 3)


def test_long_words_are_cut_where_they_are_said_to_be():
    assert shortened("x" * 118) == repr("x" * 118)
    assert shortened("x" * 119) == f"'{'x' * 118}…"
    assert shortened_name("y" * 60) == "y" * 60
    assert shortened_name("y" * 61) == f"{'y' * 59}…"
    assert in_one_line(ValueError("a \n b" + "c" * 400)) == "a b" + "c" * 297


@pytest.mark.parametrize(
    ("value", "said"),
    [(99.9994, "99.999"), (99.9996, "100.000"), (100.0, "100.0"), (99999.9, "99,999.9"), (100000.0, "1e+05"),
     (7, "7"), (1234567, "1,234,567"), (-0.0004, "0.000"), (-0.0006, "\N{MINUS SIGN}0.001")],
)  # fmt: skip
def test_the_pages_numbers_change_their_look_at_their_bounds(value, said):
    assert number(value) == said


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (999, "1 kB"),
        (499, "0 kB"),
        (999_499, "999 kB"),
        (1e6, "1 MB"),
        (999.4e6, "999 MB"),
        (1e9, "1.0 GB"),
    ],
)
def test_bytes_have_their_units(size, said):
    assert bytes_in_words(size) == said


@pytest.mark.parametrize(
    "wrong", [{"value": 0.5}, {"metric": "r2"}, {"metric": "r2", "value": None}]
)
def test_rows_are_checked_when_results_are_made(wrong):
    with pytest.raises(ValueError, match=r"^row 1 has no "):
        Results("x", [{"metric": "r2", "value": 0.5}, wrong], {})


def test_a_split_holds_together():
    tokens = np.arange(5, dtype=np.int32)
    lengths = np.array([2, 3], np.int32)
    right = Split(tokens, lengths, np.array([1, 2], np.int32))
    assert Examples(right, right).fit.starts.tolist() == [0, 2]
    for positions, rows, said in (
        ([2, 0], None, r"example 0 is at position 2 of a sentence of 2 tokens"),
        ([0, 3], None, r"example 1 is at position 3 of a sentence of 3 tokens"),
        ([-1, 0], None, r"example 0 is at position -1 of a sentence of 2 tokens"),
        ([0, 0], [0, 2], r"example 1 is in sentence 2 of 2"),
        ([0, 0, 0], None, r"3 positions for 2 rows"),
    ):
        given = {} if rows is None else {"rows": np.array(rows, np.int32)}
        with pytest.raises(ValueError, match=said):
            Split(tokens, lengths, np.array(positions, np.int32), **given)
