"""Prints the flags of an experiment in groups, the ones that newcomers need first."""

import re
import sys
import textwrap

from absl import flags

# The groups of flags that experiments share, in the order in which they are printed; those that
# only one experiment has come before them, under "What to measure".
GROUPS = {
    "Model": ("model", "revision", "dtype", "ignore_config"),
    "Text": (
        "corpus",
        "examples",
        "num_fit",
        "num_eval",
        "seed",
        "protocol",
        "positions_per_sentence",
        "skip_first",
        "skip_special",
        "piece_length",
        "fit_tokens",
    ),
    "Maps": ("maps", "intercept", "targets", "route"),
    "Output": ("out", "overwrite", "figure_format", "figure_width", "track", "snapshot_every"),
    "Hardware": ("tokens_per_batch", "shard_parameters"),
    "Many hosts": ("coordinator", "num_processes", "process_id"),
}
# Described by --helpfull alone.
RARE = {
    "revision",
    "ignore_config",
    "positions_per_sentence",
    "skip_first",
    "skip_special",
    "piece_length",
    "route",
    "snapshot_every",
    "tokens_per_batch",
    "shard_parameters",
    "coordinator",
    "num_processes",
    "process_id",
    "figure_width",
}
_WIDTH = 88


def asks_for_help(arguments: list[str]) -> bool:
    """Returns whether the arguments of a script ask for its flags in groups."""
    return any(argument in ("-h", "-help", "--help") for argument in arguments)


def print_help(description: str) -> None:
    """Prints what an experiment does, and its flags by group."""
    print(description.strip())
    named = {flag.name: flag for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0])}
    shared = {name for names in GROUPS.values() for name in names}
    own = [name for name in named if name not in shared]
    for title, names in {"What to measure": own, **GROUPS}.items():
        shown = [named[name] for name in names if name in named and name not in RARE]
        if shown:
            print(f"\n{title}:")
        for flag in shown:
            print(_described(flag))
    if rare := [f"--{name}" for name in sorted(RARE & named.keys())]:
        print("\nRarely needed, described by --helpfull:")
        print(textwrap.fill(", ".join(rare), _WIDTH, initial_indent="  ", subsequent_indent="  "))


def _described(flag: flags.Flag) -> str:
    """Returns the lines on one flag: its name, default and values, and below them its
    help.
    """
    if flag.boolean:
        head = f"  --[no]{flag.name}"
    else:
        values = getattr(flag.parser, "enum_values", None)
        head = f"  --{flag.name}={'|'.join(values) if values else flag.flag_type().upper()}"
    if flag.default is not None and flag.default != [] and flag.default is not False:
        head += f"  (default {(flag.default_as_str or '').strip(chr(39))})"
    words = re.sub(r"^<[^>]*>: ", "", flag.help or "")  # the values, which stand in the head
    text = textwrap.fill(words, _WIDTH, initial_indent="      ", subsequent_indent="      ")
    return f"{head}\n{text}"
