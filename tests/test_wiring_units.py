"""Small pieces of scripts, called alone: names, choices, defaults, and what trains a
masked model.
"""

import pathlib
import sys
import types

import jax
import numpy as np
import pytest
from absl import flags
from tokenizers import processors

import jmat
from experiments.pretraining import setup
from jmat import models
from jmat.data import corpus
from jmat.runtime.checks import chosen, chosen_layers
from jmat.studies import cross_corpus, layer_jump
from jmat.studies.early_exit import study as exit_study
from jmat.studies.fitting import ReadingSettings, tokens_read
from jmat.studies.peek.study import without_gap
from jmat.studies.settings import Subject
from jmat.studies.verify import study as verify_study
from jmat.studies.verify.differences import Report, SiteDifference
from jmat.training.penalties import Regularizer
from tests.inside import call, loaded, text
from tests.test_reference import REFERENCE


@pytest.mark.parametrize(("given", "out"), [((), "runs/r2-gpt2"), (("--out=here",), "here")])
def test_the_output_folder_is_named_by_experiment_and_model(given, out):
    with loaded("r2") as script:
        flags.FLAGS(["experiments.r2", f"--model={REFERENCE / 'gpt2'}", *given])
        assert script.common.output_folder("r2") == pathlib.Path(out)


def test_a_run_is_known_by_the_flags_that_decide_its_figures(monkeypatch):
    with loaded("layer_jump") as script:
        monkeypatch.setattr(sys, "argv", ["experiments.layer_jump"])
        flags.FLAGS(
            [
                "experiments.layer_jump",
                "--seed=4",
                "--targets=final",
                "--route=memory",
                "--overwrite",
            ]
        )
        own = script.common.own_flags()
    assert {
        "seed": 4,
        "targets": "final",
        "route": "memory",
        "intercept": False,
    }.items() <= own.items()
    assert not {"out", "overwrite", "coordinator", "snapshot_every"} & own.keys()


@pytest.mark.parametrize(
    ("family", "given", "first"), [("gpt2", None, 1), ("bert", None, 0), ("gpt2", 0, 0)]
)
def test_all_tokens_are_those_that_protocol_jmat_reads(
    request, gpt2_examples, family, given, first
):
    model = request.getfixturevalue(family)
    split, settings = (
        gpt2_examples.eval,
        ReadingSettings(protocol="jmat", skip_special=False, skip_first=given),
    )
    read = tokens_read(Subject(model, gpt2_examples), split, "all", settings)
    places = np.arange(len(split.tokens)) - np.repeat(split.starts, split.lengths)
    np.testing.assert_array_equal(read, places >= first)


def test_settings_of_a_study_are_the_flags_of_their_names(tmp_path):
    with loaded("layer_jump") as script:
        given = (
            "--seed=4",
            "--targets=final",
            "--route=memory",
            "--intercept",
            "--snapshot_every=0",
        )
        flags.FLAGS(["experiments.layer_jump", *given])
        job = script.common.Job("layer_jump", {}, tmp_path, None, None, None, "docs")
        found = job.options(layer_jump.Options)
        flags.FLAGS(["experiments.layer_jump", "--snapshot_every=7"])
        kept = job.options(layer_jump.Options)
    wanted = layer_jump.Options(
        seed=4, targets="final", route="memory", intercept=True, snapshot_every=0.0
    )
    assert found == wanted
    assert (kept.snapshot_folder, kept.snapshot_every) == (tmp_path / "checkpoints", 7)


def test_choices_are_among_the_valid_ones():
    assert chosen_layers([], 3) == [0, 1, 2, 3]
    assert chosen_layers(["3", "1"], 3) == [3, 1]
    with pytest.raises(ValueError, match=r"^layers has '4'; choose from 0, 1, 2, 3\."):
        chosen_layers(["1", "4"], 3)
    with pytest.raises(ValueError, match=r"^maps has no name; choose from a, b\."):
        chosen("maps", [], ["a", "b"])


def test_sizes_are_whole_numbers():
    assert cross_corpus.Options(sizes=["250", 1]).sizes == ["250", 1]
    for wrong in ("0", "-3", "2.5", "", 0):
        with pytest.raises(ValueError, match=f"sizes has {wrong!r}"):
            cross_corpus.Options(sizes=["250", wrong])


def test_a_masked_model_is_shown_the_gap_and_a_causal_one_what_stands_before():
    _, tokenizer = jmat.load(REFERENCE / "bert")
    assert (
        without_gap("Return a new ___ of it.", tokenizer, masked=True)
        == "Return a new [MASK] of it."
    )
    assert without_gap("Return a new ___ of it.", tokenizer, masked=False) == "Return a new"


def test_continuations_begin_with_the_prompt_though_the_model_reads_bos_before_it(
    gpt2, monkeypatch
):
    _, tokenizer = jmat.load(REFERENCE / "gpt2")
    name, end, read = tokenizer.eos_token, tokenizer.eos_token_id, []
    bos = processors.TemplateProcessing(single=f"{name} $A", special_tokens=[(name, end)])
    tokenizer.backend_tokenizer.post_processor = bos
    own = tokenizer("Returns the", add_special_tokens=False)["input_ids"]
    with loaded("bundled_quality") as script:
        run = script.forward.run
        monkeypatch.setattr(
            script.forward,
            "run",
            lambda model, tokens: read.append(tokens[0]) or run(model, tokens),
        )
        told = script.complete(
            gpt2, tokenizer, "Returns the", temperature=0.0, key=jax.random.key(0), most=3
        )
    assert told.startswith("Returns the")
    assert read[0][: len(own) + 1].tolist() == [end, *own]
    assert len(read[0]) == len(own) + 1 + 3


def test_every_part_of_the_benchmark_has_its_own_rows():
    with loaded("benchmark") as script:
        assert {name: rows.__name__ for name, rows in script.PARTS.items()} == {
            name: f"{name}_rows"
            for name in (
                "streaming",
                "capture",
                "early_exit",
                "suite",
                "fit",
                "linearity",
                "condition",
                "decoding",
                "jacobian",
            )
        }


@pytest.mark.parametrize(("verdict", "code"), [("WRONG", 1), ("PRECISION", 0), ("MATCH", 0)])
def test_verify_ends_with_the_code_of_its_verdict(monkeypatch, verdict, code):
    found = Report(
        verdict, (SiteDifference("logits", 0.5, 0.1),), "logits" if code else None, 0.75, 0.9, 12
    )
    monkeypatch.setattr(verify_study, "verify", lambda *_, **__: found)
    if code:
        with pytest.raises(ValueError, match="verify ended with 1"):
            call("verify", f"--text={verdict}")
    else:
        outcome = call("verify", f"--text={verdict}")
        assert {row["verdict"] for row in outcome.rows} == {verdict}
        assert {"0.5", "0.1", "0.75", "0.9"} == {str(row["value"]) for row in outcome.rows}


def test_what_is_trained_has_the_sizes_that_are_asked_for():
    sizes = {"vocab_size": 300, "layers": 3, "width": 12, "heads": 2, "length": 40}
    for arch in ("gpt2", "bert"):
        config = models.config_from_hf(setup.hf_config(arch, **sizes))
        found = (
            config.family,
            config.vocab_size,
            config.layers,
            config.width,
            config.heads,
            config.num_positions,
        )
        assert found == (arch, *sizes.values())
        assert config.ffn_width == 48
        assert config.causal == (arch == "gpt2")


def test_sentences_are_what_each_kind_of_model_reads():
    sentences = ["Returns the name of the file.", "Returns " * 30]
    for arch in ("gpt2", "bert"):
        _, tokenizer = jmat.load(REFERENCE / arch)
        ids = tokenizer(sentences)["input_ids"]
        pairs = setup.encode(arch, tokenizer, sentences, 16)
        assert len(pairs) == 2
        inputs, targets = (np.asarray(values).tolist() for values in pairs[0])
        if arch == "gpt2":
            assert inputs == ids[0]
            assert targets == [*ids[0][1:], tokenizer.eos_token_id]
        else:
            assert inputs == ids[0]
            special = set(tokenizer.all_special_ids)
            assert targets == [-1 if token in special else token for token in ids[0]]
            assert len(pairs[1][0]) == 16
            assert pairs[1][0][-1] == tokenizer.sep_token_id


def test_each_kind_of_model_has_its_own_loss_with_the_penalty(monkeypatch):
    _, tokenizer = jmat.load(REFERENCE / "bert")
    penalty = Regularizer("mse", 2.0)
    causal = setup.language_model_loss("gpt2", tokenizer, penalty)
    assert (causal.func.__name__, causal.keywords) == ("causal_lm_loss", {"regularizer": penalty})
    monkeypatch.setattr(setup.training, "masked_lm_loss", lambda *given, **named: (given, named))
    masked = setup.language_model_loss("bert", tokenizer, penalty)
    assert masked == ((tokenizer.mask_token_id,), {"regularizer": penalty})


def test_variants_of_the_study():
    with loaded("regularizer_study") as script:
        found = list(script.variants(["none", "mse"], ["0.5", "2"]))
        assert found == [("none", 0.0), ("mse", 0.5), ("mse", 2.0)]
        for kinds, weights in (
            (["lasso"], ["1"]),
            (["mse"], ["-1"]),
            (["mse"], ["inf"]),
            (["mse"], ["x"]),
        ):
            with pytest.raises(ValueError, match=r"--(kinds|weights) has"):
                list(script.variants(kinds, weights))


def test_a_continuation_ends_before_the_token_of_the_end(gpt2, monkeypatch):
    _, tokenizer = jmat.load(REFERENCE / "gpt2")
    word = tokenizer(" value")["input_ids"][0]
    said = iter([word, tokenizer.eos_token_id])
    with loaded("bundled_quality") as script:
        best = lambda model, x: np.eye(len(tokenizer), dtype=np.float32)[[next(said)]]  # noqa: E731
        monkeypatch.setattr(script.forward, "logits", best)
        told = script.complete(
            gpt2, tokenizer, "Returns the", temperature=0.0, key=jax.random.key(0)
        )
    assert told == tokenizer.decode([*tokenizer("Returns the")["input_ids"], word])


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (("--num_fit=300",), "has 260 distinct sentences"),
        (("--piece_length=5000",), "pieces of 5000 characters"),
        (("--corpus=docs", "--num_fit=300"), "corpus docs has 260 distinct sentences"),
        (("--num_fit=60", "--num_eval=30"), None),
    ],
)
def test_the_text_of_the_study_is_checked_before_a_model_is_trained(
    given, problem, monkeypatch, capsys
):
    monkeypatch.setitem(corpus.NAMED, "docs", lambda: corpus.text_sentences(text()))
    with loaded("check_text") as script:
        monkeypatch.setattr(sys, "argv", ["experiments.check_text"])
        flags.FLAGS(["experiments.check_text", f"--corpus={text()}", *given])
        if problem is None:
            script.main([])
            said = f"{text()} will do: 60 sentences to fit on, 30 to evaluate on\n"
            assert capsys.readouterr().out == said
        else:
            with pytest.raises(ValueError, match=problem):
                script.main([])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((), "din2023"),
        (("--protocol=jmat",), "jmat"),
        (
            ("--protocol=jmat", "--skip_first=0", "--noskip_special"),
            "jmat, skip_first=0, skip_special=false",
        ),
        (("--protocol=jmat", "--skip_special"), "jmat, skip_special=true"),
        (("--protocol=jmat", "--positions_per_sentence=2"), "jmat, 2 positions a sentence"),
        (("--protocol=jmat", "--positions_per_sentence=2", "--fit_tokens=all"), "jmat, all tokens"),
        (("--piece_length=40", "--fit_tokens=all"), "din2023, all tokens, pieces of 40 characters"),
    ],
)
def test_maps_say_how_their_positions_were_chosen(monkeypatch, given, said):
    with loaded("layer_jump") as script:
        monkeypatch.setattr(sys, "argv", ["experiments.layer_jump"])
        flags.FLAGS(["experiments.layer_jump", *given])
        job = types.SimpleNamespace(config=script.common.own_flags())
        assert script.common.Job._protocol(job) == said


NEED_HEADS = {
    "layer_jump",
    "map_zoo",
    "decoding",
    "submodule_ablation",
    "early_exit",
    "peek",
    "cross_corpus",
    "prune",
    "probe",
}


@pytest.mark.parametrize("name", [*sorted(NEED_HEADS), "r2", "linearity"])
def test_models_without_a_head_are_refused_where_predictions_are_needed(name, monkeypatch):
    model, tokenizer = jmat.load(REFERENCE / "gpt2")
    model.head = None

    def stop(*_, **__):
        raise ValueError("it goes on")

    with loaded(name) as script:
        monkeypatch.setattr(script.common, "load", lambda *_, **__: (model, tokenizer))
        monkeypatch.setattr(script.common, "prepare_examples", stop)
        with pytest.raises(
            ValueError, match="has no language-model head" if name in NEED_HEADS else "it goes on"
        ):
            call(name, corpus=text(), seed=77)


def test_the_short_list_is_as_long_as_the_vocabulary_at_most():
    def stop(config, values, split, protocol, cheap, **_):
        raise ValueError(f"{cheap}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exit_study, "curve_rows", stop)
        with pytest.raises(ValueError, match=r"\{'check_every': 3, 'words': 768\}"):
            call(
                "early_exit", corpus=text(), num_fit=70, num_eval=10, short_list=5000, check_every=3
            )


def test_training_logs_measures_saves_and_keeps_at_its_steps(monkeypatch):
    """Seven steps; --log_every=2, --eval_every=3, --keep_every=2, and a checkpoint
    every four.
    """
    done, batch = (
        {"log": [], "save": [], "keep": []},
        types.SimpleNamespace(segments=np.ones((2, 3), np.int32)),
    )
    state = types.SimpleNamespace(model=0)

    def take(state, batch):
        return types.SimpleNamespace(model=state.model + 1), jax.numpy.float32(state.model)

    with loaded("pretrain") as script:
        flags.FLAGS(["experiments.pretrain", "--log_every=2", "--eval_every=3", "--keep_every=2"])
        ended, finished = script.train(
            state,
            take,
            ((step, batch) for step in range(7)),
            lambda *given: done["log"].append(given[:2]),
            lambda model: {"loss": 1.0, "count": 9},
            lambda state: done["save"].append(state.model),
            lambda state: done["keep"].append(state.model),
            4,
            7,
        )
    assert (ended.model, finished) == (7, True)
    assert (done["save"], done["keep"]) == ([4, 7], [2, 4, 6])
    for name, steps in (
        ("loss", [2, 4, 6, 7]),
        ("tokens_per_second", [2, 4, 6, 7]),
        ("held_out_loss", [3, 6, 7]),
    ):
        assert [step for step, logged in done["log"] if logged == name] == steps
