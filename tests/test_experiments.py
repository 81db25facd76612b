"""The scripts as users run them: figures equal the reference, mistakes end in one
sentence and exit code 1.
"""

import ast
import importlib.metadata
import json
import re
import signal
import time

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jmat
from experiments import steps
from experiments.pretraining.reported import reported
from jmat.checkpoint import parameters
from jmat.data.examples import fingerprint, load_examples
from jmat.maps.files import read_maps
from jmat.runtime.digests import model_hash
from tests.scripts import ROOT, on, rows_of, run, start
from tests.test_linearity import cut_examples
from tests.test_reference import REFERENCE, WEIGHTS, check

SCRIPTS = (
    "layer_jump",
    "map_zoo",
    "decoding",
    "r2",
    "submodule_ablation",
    "early_exit",
    "peek",
    "cross_corpus",
    "verify",
    "pretrain",
    "prune",
    "tasks",
    "linearity",
    "probe",
    "report",
    "regularizer_study",
    "benchmark",
)


@pytest.mark.parametrize("family", ["gpt2", pytest.param("bert", marks=pytest.mark.slow)])
def test_layer_jump(tmp_path, family):
    printed, _ = run("layer_jump", *on(family, tmp_path))
    figures = json.loads((REFERENCE / family / "figures.json").read_text())["rows"]
    check(
        rows_of(tmp_path),
        [r for r in figures if r["map"] in ("mat", "id") and "layer" in r and r["metric"] != "r2"],
    )
    assert (tmp_path / "layer_jump.png").read_bytes().startswith(b"\x89PNG")
    maps, info = read_maps(tmp_path)
    assert info.n == 1500
    examples, model = (
        load_examples(REFERENCE / family / "examples.npz"),
        jmat.load(REFERENCE / family)[0],
    )
    results = json.loads((tmp_path / "results.json").read_text())
    source = str(REFERENCE / family / "examples.npz")
    prints = {"fit": fingerprint(examples.fit), "eval": fingerprint(examples.eval)}
    assert results["text"] == {"source": source, **prints}
    assert results["model_hash"] == info.model_hash == model_hash(parameters(model))
    assert (info.fit_text, info.eval_text) == tuple(prints.values())
    assert info.jmat == results["environment"]["jmat"] == importlib.metadata.version("jmat")
    reference = load_file(REFERENCE / family / "maps.safetensors")
    for name in (name for name in reference if name.startswith("mat.")):
        error = np.linalg.norm(maps[name].W - reference[name]) / np.linalg.norm(reference[name])
        assert error < WEIGHTS.get(name, 1e-3), name
    assert "precision@1" in printed
    assert str(tmp_path) in printed


@pytest.mark.slow
def test_submodule_ablation_and_subsets(tmp_path):
    run("submodule_ablation", *on("gpt2", tmp_path, maps="mat_attn,mat_ffn", layers="1,3"))
    rows = [row for row in rows_of(tmp_path) if row["map"] in ("mat_attn", "mat_ffn")]
    assert {(row["map"], row["layer"]) for row in rows} == {
        (m, i) for m in ("mat_attn", "mat_ffn") for i in (1, 3)
    }
    figures = json.loads((REFERENCE / "gpt2" / "figures.json").read_text())["rows"]
    check(
        rows,
        [
            row
            for row in figures
            if row["map"] in ("mat_attn", "mat_ffn") and row["layer"] in (1, 3)
        ],
    )
    assert {row["metric"] for row in rows} >= {"recall@5", "kl", "perplexity"}


@pytest.mark.slow
def test_early_exit_reports_cost_and_calibration(tmp_path):
    printed, _ = run("early_exit", *on("gpt2", tmp_path, timing_examples=4))
    cut_examples(tmp_path / "few.npz", "gpt2", (200, 5))
    run("early_exit", *on("gpt2", tmp_path / "few", examples=tmp_path / "few.npz"))
    assert {row["metric"] for row in rows_of(tmp_path / "few")} >= {"time_ratio"}
    rows = rows_of(tmp_path)
    figures = json.loads((REFERENCE / "gpt2" / "figures.json").read_text())["rows"]
    check(rows, [row for row in figures if "lambda" in row])
    metrics = {row["metric"] for row in rows}
    assert metrics >= {
        "flops",
        "flops_ratio",
        "layers_saved@0.95",
        "layers_saved@0.90",
        "time_ratio",
        "disagreement",
    }
    assert {row["confidence"] for row in rows if "confidence" in row} == {
        "gap",
        "max_probability",
        "entropy",
        "patience",
        "gap_cheap",
        "fixed",
    }
    assert "wall clock, batch 1, cheap check" in printed
    machine = json.loads((tmp_path / "results.json").read_text())["environment"]["cpu"]
    assert f"timed on {machine} (" in printed
    assert "flops_ratio_token" in printed


def edited(tmp_path, family, *, tensors=None, config=None):
    """A copy of a checkpoint with some tensors or config fields changed."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in (REFERENCE / family).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    if tensors is not None:
        save_file(tensors(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    if config is not None:
        fields = json.loads((folder / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps(fields))
    return folder


def mistakes(tmp_path):
    """Name → (flags, what the sentence says)."""
    examples = dict(np.load(REFERENCE / "gpt2" / "examples.npz"))
    base = on("gpt2", tmp_path / "out")

    def npz(**changed):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.npz"
        np.savez(path, **{**examples, **changed})
        return f"--examples={path}"

    empty, binary, foreign = tmp_path / "empty.txt", tmp_path / "latin.txt", tmp_path / "foreign"
    empty.write_text("\n\n")
    binary.write_bytes(b"caf\xe9\n")
    foreign.mkdir()
    (foreign / "run.json").write_text(json.dumps({"experiment": "r2", "config": {}}))
    (foreign / "results.json").write_text("{}")
    cut = tmp_path / "cut.npz"
    cut.write_bytes((REFERENCE / "gpt2" / "examples.npz").read_bytes()[:5000])
    tokens, lengths = examples["fit_tokens"].copy(), examples["fit_lengths"]
    tokens[7] = 768
    return {
        "no such model": ([*base, "--model=./nowhere"], "there is no folder ./nowhere"),
        "no such hub model": ([*base, "--model=nobody/nothing"], "no model 'nobody/nothing'"),
        "no such examples": (
            [*base, f"--examples={tmp_path}/none.npz"],
            "there is no examples file",
        ),
        "truncated examples": ([*base, f"--examples={cut}"], "not a readable .npz"),
        "token out of range": ([*base, npz(fit_tokens=tokens)], "token id 768"),
        "lengths do not add up": ([*base, npz(fit_lengths=lengths + 1)], "add up"),
        "position outside": ([*base, npz(fit_positions=lengths)], "position"),
        "empty corpus": ([*base[:1], *base[2:], f"--corpus={empty}"], "empty"),
        "not UTF-8": ([*base[:1], *base[2:], f"--corpus={binary}"], "UTF-8"),
        "unknown corpus": ([*base[:1], *base[2:], "--corpus=nowhere"], "nowhere"),
        "another run's folder": ([*base, f"--out={foreign}"], "belongs to experiment r2"),
        "positional argument": ([*base, "stray"], "stray"),
        "unknown flag": ([*base, "--protocoll=din2023"], "protocoll"),
        "a process that joins nobody": (
            [*base, "--process_id=1"],
            "--process_id without --coordinator",
        ),
        "a name too long": ([*base, "--examples=" + "x" * 300], "xxx…: File name too long."),
        "a long sentence for a name": (
            [*base[:1], *base[2:], "--corpus=" + "word " * 80],
            "…: File name too long.",
        ),
        "a model's name too long": (
            [*base, "--model=" + "x" * 300],
            f"no model '{'x' * 118}…: not bundled",
        ),
        "no folder": ([*base, "--out="], "--out is empty; expected a folder"),
        "bad flag value": ([*base, "--num_fit=-3"], "num_fit"),
    }


def test_mistakes(tmp_path):
    for name, (flags, says) in mistakes(tmp_path).items():
        _, stderr = run("layer_jump", *flags, code=1)
        assert says in stderr, (name, stderr)
        assert "Errno" not in stderr, (name, stderr)


def test_damaged_checkpoints(tmp_path):
    def poison(tensors):
        tensors["transformer.h.1.mlp.c_fc.weight"][3, 3] = np.nan
        return tensors

    model = edited(tmp_path, "gpt2", tensors=poison)
    _, stderr = run("layer_jump", *on("gpt2", tmp_path / "out", model=model), code=1)
    assert stderr.strip().splitlines()[-1].startswith("error: ")
    assert "h.1.mlp.c_fc.weight" in stderr
    assert "NaN" in stderr


def test_few_examples_are_said_and_survived(tmp_path):
    examples = dict(np.load(REFERENCE / "gpt2" / "examples.npz"))
    count = 20
    size = int(examples["fit_lengths"][:count].sum())
    cut = {"fit_tokens": size, "fit_lengths": count, "fit_positions": count}
    path = tmp_path / "few.npz"
    np.savez(path, **{name: value[: cut.get(name)] for name, value in examples.items()})
    _, stderr = run("layer_jump", *on("gpt2", tmp_path / "out", examples=path))
    assert "rank 20 of 64: fewer examples than dimensions" in stderr


def test_ctrl_c_ends_it_without_a_traceback(tmp_path):
    running = start("layer_jump", *on("gpt2", tmp_path))
    while not (tmp_path / "run.json").exists():
        time.sleep(0.01)
    while not running.is_over():  # one can be lost in a callback, where Python drops exceptions
        running.kill(signal.SIGINT)
        time.sleep(0.5)
    code, _, said = running.finish()
    assert code == 130
    assert said.splitlines()[-1] == "· interrupted."
    assert "Traceback" not in said


def test_help():
    stdout, _ = run("layer_jump", "--help")
    for word in (
        "Measures ",
        "python -m experiments.layer_jump",
        "--model",
        "--num_fit",
        "--protocol",
        "--out",
    ):
        assert word in stdout, word


@pytest.mark.parametrize("script", SCRIPTS)
def test_docstrings_give_the_command(script):
    docstring = ast.get_docstring(ast.parse((ROOT / "experiments" / f"{script}.py").read_text()))
    assert f"python -m experiments.{script}" in docstring


@pytest.mark.slow
def test_the_example_in_the_readme_runs(capsys):
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)[1]
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("Linear map from block.2 to block.7: ")
    assert " shape" in printed  # as its comment says
    linear, identity = (
        [line.split()[:2] for line in printed if line.split()[:1] == [name]]
        for name in ("mat", "id")
    )
    assert all(float(value) > 0 for _, value in (*linear, *identity))
    assert len(linear) == len(identity) == 2


OWN = {
    "pretrain": ("--regularizer=cosine", "--reg_weight=2", "-out=elsewhere", "--out", "--"),
    "measure": ("--model=gpt2-docs", "-model", "--out=elsewhere"),
}


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--weights=1,-1", "--weights has '-1'; expected numbers from 0 on"),
        ("--weights=nan", "--weights has 'nan'"),
        ("--kinds=", "--kinds and --weights name no model"),
        (
            "--pretrain='--steps=3",
            "--pretrain='--steps=3 does not read as flags: No closing quotation",
        ),
        *(
            (f"--pretrain={own}", f"--pretrain has {own}, which the study sets itself")
            for own in OWN["pretrain"]
        ),
        *(
            (f"--measure=--seed=1 {own}", f"--measure has {own}, which the study sets itself")
            for own in OWN["measure"]
        ),
        ("--pretrain=--flagfile=nowhere", "--pretrain=--flagfile=nowhere does not read as flags: "),
        (
            "--pretrain=--layer=3",
            "pretrain does not take --layer=3: there is no flag --layer. Did you mean ",
        ),
        pytest.param(
            "--measure=--corpus=tests/data/docstrings.txt --num_fit=999999",
            "linearity does not take --corpus=tests/data/docstrings.txt --num_fit=999999: corpus ",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_study_checks_weights_and_flags_before_it_trains(tmp_path, flag, says):
    _, said = run("regularizer_study", flag, f"--out={tmp_path / 'out'}", code=1)
    assert said.startswith(f"error: {says}")
    assert not (tmp_path / "out").exists()


def test_a_study_finds_its_own_flags_in_files_of_flags(tmp_path):
    (tmp_path / "flags").write_text("--layers=1\n--regularizer=cosine\n")
    given = f"--pretrain=--flagfile={tmp_path / 'flags'}"
    _, said = run("regularizer_study", given, f"--out={tmp_path / 'out'}", code=1)
    assert said.startswith(
        "error: --pretrain has --regularizer=cosine, which the study sets itself: leave it out."
    )


@pytest.mark.parametrize("earlier", [None, ["--steps=2"], "damaged"])
def test_a_step_of_a_study_is_done_once_for_the_same_flags(tmp_path, earlier, monkeypatch):
    """Its own flags come last, where they win; the folder is the step's, and nothing
    else in it is touched.
    """
    ran = []
    monkeypatch.setattr(steps, "run_child", lambda command: ran.append(command) or 0)
    (tmp_path / "results.json").write_text('{"rows": []}')
    (tmp_path / "notes").write_text("precious")
    if earlier is not None:
        (tmp_path / "done.json").write_text(json.dumps(earlier) if earlier != "damaged" else "[")
    given = ["--regularizer=none"], ["--steps=3"]
    for _ in range(2):
        steps.step("pretrain", tmp_path, *given)
    [command] = ran
    assert command[2:] == [
        *("experiments.pretrain", "--steps=3", "--regularizer=none", f"--out={tmp_path}"),
        *([] if earlier is None else ["--overwrite"]),
    ]
    (tmp_path / "results.json").write_text("{")
    # the step has run again, and left it as it was
    with pytest.raises(ValueError, match=r"results\.json is damaged"):
        steps.step("pretrain", tmp_path, *given)
    assert len(ran) == 2
    (tmp_path / "results.json").write_text('{"rows": []}')
    # the model that it measures is another one
    steps.step("pretrain", tmp_path, *given, trained=["--layers=2"])
    assert len(ran) == 3
    assert (tmp_path / "notes").read_text() == "precious"


def test_a_study_reports_one_figure_a_layer_and_metric():
    wanted = {"linearity": ("mat",), "layers_saved@0.95": ("mat", "id")}
    rows = [
        {"map": name, "layer": 0, "metric": "linearity", "value": 1.0}
        for name in ("mat", "ln_1", "ffn")
    ]
    rows += [
        {"map": name, "metric": "layers_saved@0.95", "value": 0.5, "confidence": "gap"}
        for name in ("mat", "id")
    ]
    rows += [{"map": "mat", "metric": "layers_saved@0.95", "value": 0.4, "confidence": "entropy"}]
    found = [
        (row["map"], row["of"], row["metric"]) for row in reported("none", {"rows": rows}, wanted)
    ]
    saved = "layers_saved@0.95"
    assert found == [
        ("none", "mat", "linearity"),
        ("none, mat", "mat", saved),
        ("none, id", "id", saved),
    ]
