"""The command `jmat`, and the help of experiments."""

import contextlib
import functools
import io
import os
import pathlib
import runpy
import subprocess
import sys

import pytest

from experiments import command
from experiments.help import GROUPS, RARE
from experiments.streams import CLOSED
from jmat.data.corpus import fit_eval
from tests.inside import call, loaded, text

SCRIPTS = {path.stem for path in pathlib.Path(command.__file__).parent.glob("*.py")}


def said(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["jmat", *arguments])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), ended(0):
        command.main()
    return printed.getvalue()


@contextlib.contextmanager
def ended(code):
    """What stands inside returns, or exits with a code."""
    try:
        yield
    except SystemExit as end:
        if end.code != code:
            raise


def test_all_experiments_are_listed(monkeypatch):
    listed = command.experiments()
    assert {"layer_jump", "prune", "benchmark", "pretrain"} <= listed.keys() <= SCRIPTS
    assert not {"common", "cli", "command", "help"} & listed.keys()
    shown = said(monkeypatch)
    assert shown == said(monkeypatch, "--help")
    for name, description in listed.items():
        assert f"  {name:18}  {description}\n" in shown


def test_descriptions_begin_with_a_verb():
    for name, description in command.experiments().items():
        verb, *rest = description.split()
        assert verb in ("Checks", "Compares", "Makes", "Measures", "Runs", "Shows", "Trains"), name
        assert len(rest) > 4, name
        assert description.endswith("."), name
        assert len(description) <= 85, name


@pytest.mark.parametrize(
    "arguments", [["jmat"], ["jmat", "--version"], ["experiments.layer_jump", "--help"]]
)
def test_a_reader_that_leaves_ends_help_quietly(arguments, monkeypatch):
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(sys, "argv", arguments)
    with (
        open(write, "w") as stdout,
        contextlib.redirect_stdout(stdout),
        loaded("layer_jump") as script,
    ):
        show = (
            command.main
            if arguments[0] == "jmat"
            else functools.partial(script.cli.run, script.main)
        )
        with pytest.raises(SystemExit) as end:
            show()
    assert end.value.code == CLOSED


def test_an_experiment_is_run_as_a_module(monkeypatch):
    given = []

    def run(module, run_name, alter_sys):
        given.append((module, run_name, alter_sys, sys.argv[1:]))

    monkeypatch.setattr(runpy, "run_module", run)
    said(monkeypatch, "r2", "--model=gpt2", "--seed=3")
    assert given == [("experiments.r2", "__main__", True, ["--model=gpt2", "--seed=3"])]


def test_unknown_names_are_refused(monkeypatch):
    with pytest.raises(SystemExit) as error:
        said(monkeypatch, "layer_jmp")
    message = (
        "error: there is no experiment 'layer_jmp'. Did you mean layer_jump? `jmat --help` lists "
        "all."
    )
    assert error.value.code == message
    assert said(monkeypatch, "--version").startswith("jmat 0.")


@pytest.mark.slow
def test_a_text_is_not_checked_for_an_experiment_with_other_flags():
    command = [sys.executable, "-m", "experiments.check_text", "pretrain", "--corpus=mails.txt"]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert outcome.returncode == 1
    assert outcome.stderr.splitlines()[-1].startswith(
        "error: pretrain reads text by flags of its own, which it checks itself;"
    )


@pytest.mark.parametrize("given", [[], ["--corpus=mails.txt"], ["layer_jmp"]])
def test_a_text_is_checked_for_an_experiment(monkeypatch, given):
    monkeypatch.setattr(sys, "argv", ["check_text", *given])
    with pytest.raises(SystemExit) as error:
        runpy.run_path(
            str(pathlib.Path(command.__file__).parent / "check_text.py"), run_name="__main__"
        )
    assert error.value.code.startswith(
        "error: expected an experiment first, such as `jmat check_text layer_jump"
    )
    assert error.value.code.endswith(f"got {given[0] if given else 'none'}.")


@pytest.mark.parametrize("name", ["layer_jump", "prune", "linearity"])
def test_help_has_every_flag_once_or_names_it_as_rare(name, capsys):
    with loaded(name) as script:
        from experiments import help

        flags = {flag.name: flag for flag in help.flags.FLAGS.get_key_flags_for_module(script)}
        help.sys = type("Fake", (), {"argv": [script.__name__]})
        try:
            help.print_help(script.__doc__)
        finally:
            help.sys = sys
    printed = capsys.readouterr().out
    assert printed.startswith(script.__doc__.strip().splitlines()[0])
    shown, rare = printed.split("Rarely needed, described by --helpfull:")
    rare = {word.strip(" \n,") for word in rare.split(",")}
    for flag in flags:
        heads = [
            line
            for line in shown.splitlines()
            if line.startswith((f"  --{flag}=", f"  --[no]{flag}"))
        ]
        assert len(heads) == (flag not in RARE), flag
        assert (f"--{flag}" in rare) == (flag in RARE), flag
    titles = [line[:-1] for line in shown.splitlines() if line[:-1] in {*GROUPS, "What to measure"}]
    assert [title for title in titles if title != "What to measure"] == [*GROUPS][
        : len(titles) - (len(titles) > 4)
    ]


def test_all_sentences_of_a_file_are_used():
    fit, held_out = fit_eval(text(), None, None, seed=0)
    count = len(fit) + len(held_out)
    assert len(fit) == round(0.75 * count)
    assert [len(part) for part in fit_eval(text(), None, 20, seed=0)] == [count - 20, 20]
    assert [len(part) for part in fit_eval(text(), 30, None, seed=0)] == [30, count - 30]
    outcome = call("r2", corpus=text(), num_fit="all", num_eval=20)
    assert {row["n"] for row in outcome.rows if row["metric"] == "r2"} == {20}
    assert outcome.results["config"]["num_fit"] == "all"
    with pytest.raises(ValueError, match="--num_fit=all: pieces are drawn, so give a number"):
        call("r2", corpus=text(), num_fit="all", num_eval=20, piece_length=60)
    with pytest.raises(ValueError, match="expected a whole number above 0, or all"):
        call("r2", corpus=text(), num_fit="some")
