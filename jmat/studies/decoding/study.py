"""Writes texts in several ways, and compares their speed and their tokens with those of
plain greedy text.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping, Sequence

from jaxtyping import Int32
from numpy import ndarray

from jmat.data.encoding import Tokenizer
from jmat.data.examples import Examples
from jmat.decode.exits import DIRECT, MAP, RECOMPUTE, Exits
from jmat.decode.fit_exits import fit_exits
from jmat.decode.generate import generate
from jmat.decode.options import check_lengths
from jmat.decode.prompts import Prompts, prompt_ids
from jmat.decode.words import frequent_words
from jmat.maps.carry import fit_carry
from jmat.maps.compact import Map
from jmat.maps.kinds import parse_kinds
from jmat.models.family import Transformer
from jmat.report.environment import timed_on
from jmat.report.results import Results
from jmat.report.rows import Row
from jmat.report.tables import format_table
from jmat.runtime.annotations import Keywords
from jmat.runtime.digests import short_hash
from jmat.runtime.files import save_atomically
from jmat.runtime.progress import track
from jmat.studies.decoding.agreement import exit_rows, plain_perplexity
from jmat.studies.decoding.measure import Written, write_all
from jmat.studies.decoding.methods import (
    CARRY,
    DRAFT,
    EXIT,
    LOOKUP,
    PLAIN,
    Method,
    draft_methods,
    exit_methods,
    lookup_methods,
    plain_method,
)
from jmat.studies.decoding.options import Options
from jmat.studies.decoding.plots import plot
from jmat.studies.decoding.predicted import PREDICTED, predicted_rows
from jmat.studies.decoding.prompts import first_tokens
from jmat.studies.decoding.rows import (
    ACCEPTED,
    PER_CHECK,
    SAME,
    SPEED,
    SPEED_UP,
    UNTIL,
    method_rows,
)
from jmat.studies.fitting import fit_split, read_statistics
from jmat.studies.kind_settings import routed
from jmat.studies.map_zoo.fits import fit_zoo
from jmat.studies.map_zoo.jumps import stream_jumps
from jmat.studies.settings import Say, Subject, read_subject, report

FIGURE, TEXTS = "decoding.png", "decoding.json"
LEFT = "layers"
_SHOWN = (SPEED, SPEED_UP, PREDICTED, SAME, UNTIL, ACCEPTED, PER_CHECK, LEFT, "kl", "perplexity")


def run(
    model: Transformer,
    examples: Examples | Sequence[str],
    options: Options = Options(),  # noqa: B008 (immutable)
    *,
    prompts: Prompts | None = None,
    tokenizer: Tokenizer | None = None,
    say: Say | None = None,
) -> Results:
    """Writes texts behind the same prompts in several ways.

    Args:
      model: as `jmat.load` returns it; a causal one.
      examples: examples, or texts, of which three quarters are fitted on.
      options: the settings.
      prompts: as `jmat.generate` takes them; None: the first tokens of sentences to
        evaluate on.
      tokenizer: the model's; texts need it.
      say: prints what happens now, beside progress bars; None: quiet.

    Returns:
      Rows for every way to write (`method`): the share of plain tokens that stand at
      the same place, the number of tokens before the first difference, the share of
      drafted tokens that the model accepted, the tokens that one check brings, tokens a
      second, and how many times as fast as plain text that is, measured and predicted
      (`jmat.studies.decoding.predicted`). Early exits have the rows of
      `jmat.studies.decoding.agreement.measure_exits`, too. Intervals are over prompts;
      those of the clock are extremes over turns.

    Raises:
      ValueError: a masked model; a layer or kind that it cannot have; too few sentences;
        as `jmat.generate` for prompts, and `jmat.studies.settings.read_subject`.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> texts = [f"Entry {i} of {i % 7} lists holds a list of values." for i in range(80)]
      >>> decoding = jmat.studies.decoding
      >>> options = decoding.Options(
      ...     layers=[6], draft_tokens=[2], num_prompts=2, new_tokens=4, turns=0
      ... )
      >>> results = decoding.run(model, texts, options, tokenizer=tokenizer)
      >>> figure, table = results.plot(), results.table()
    """
    subject = read_subject(model, examples, tokenizer, options, say=say)
    options.check(model.config)
    kinds, layers = parse_kinds(options.kinds), options.draft_layers(model.config)
    if prompts is None:
        ids = first_tokens(subject.examples.eval, options.num_prompts, options.prompt_tokens)
    else:
        ids = prompt_ids(prompts, tokenizer, model.config)
    check_lengths(ids, options.new_tokens, model.config)
    options = routed(options)
    L = model.config.layers
    jumps = stream_jumps(L, layers, [L])
    statistics = read_statistics(subject, options, [(jump.source, jump.target) for jump in jumps])
    fits = fit_zoo(model, statistics, kinds, jumps, seed=options.seed, progress=subject.bar("fit"))
    maps = {(kind, jump.layer): stand_in for (kind, jump), stand_in in fits.maps.items()}
    del statistics
    methods = [plain_method(), *_methods(subject, options, maps, layers)]
    shared: Keywords = {
        "tokenizer": tokenizer,
        "max_new_tokens": options.new_tokens,
        "temperature": options.temperature,
        "seed": options.seed,
        "stop_tokens": [],
    }
    bar = subject.bar("write")
    written = write_all(model, ids, methods, turns=options.turns, options=shared, progress=bar)
    rows = method_rows(methods, written, seed=options.seed)
    plain = written[PLAIN].texts
    if any("exits" in method.arguments for method in methods):
        scored = generate(model, ids, scores=True, **shared)
        rows.append({**methods[0].fields, **plain_perplexity(scored, options.seed)})
    for method in methods:
        if exits := method.arguments.get("exits"):
            figures = exit_rows(model, written[method.name].texts, plain, exits, options.seed)
            rows += [{**method.fields, **figure} for figure in figures]
    if options.turns:
        subject.announce("timing single passes")
        rows += predicted_rows(model, ids, methods, written, turns=options.turns)
    digest = short_hash(*(f"{len(row)} ".encode() + row.tobytes() for row in ids))
    return report(
        "decoding",
        subject,
        options,
        rows,
        maps={jump.map_name(kind): stand_in for (kind, jump), stand_in in fits.maps.items()},
        n=fits.n,
        text={**subject.text, "prompts": digest},
        tables=table,
        figures={FIGURE: plot},
        files={(TEXTS,): functools.partial(_save_texts, ids, written)},
        remarks=[timed_on()] if options.turns else [],
    )


def _methods(
    subject: Subject, options: Options, maps: Mapping[tuple[str, int], Map], layers: Sequence[int]
) -> list[Method]:
    """Returns the ways to write that were asked for; what they need beside maps to the
    last layer is fitted here.
    """
    model, split = subject.model, subject.examples.fit
    lengths = [int(length) for length in options.draft_lengths]
    words = frequent_words(split, options.short_list) if options.short_list else None
    methods = []
    if DRAFT in options.ways:
        methods += draft_methods(maps, layers, lengths, words=words)
    if CARRY in options.ways:
        bar = subject.bar("fit carries")
        carries = {
            (CARRY, layer): fit_carry(model, split, layer).map for layer in track(layers, bar)
        }
        methods += draft_methods(carries, layers, lengths, way=CARRY, words=words)
    if LOOKUP in options.ways:
        methods += lookup_methods(lengths)
    if EXIT in options.ways:
        read, fitted = fit_split(subject, options), {}
        for kind in map(str, parse_kinds(options.kinds)):
            by_maps: dict[str, Exits] = {}  # fills without maps of their own share one fit
            for fill in options.fills:
                needed = fill if fill in (MAP, DIRECT) else RECOMPUTE
                if needed not in by_maps:
                    subject.announce(f"fitting exits: {kind}, {fill}")
                    own: Keywords = {"confidence": options.confidence, "fill": needed, "kind": kind}
                    level = options.levels[0]
                    by_maps[needed] = fit_exits(model, read, layers, level, words=words, **own)
                fitted[kind, fill] = dataclasses.replace(by_maps[needed], fill=fill)
        methods += exit_methods(fitted, options.levels)
    return methods


def table(rows: Sequence[Row]) -> str:
    """Returns a table of the ways to write."""
    rows = [row for row in rows if "distance" not in row]
    return format_table(rows, index="method", columns=("metric",), metrics=_SHOWN, intervals=True)


def _save_texts(
    prompts: Sequence[Int32[ndarray, " _"]], written: Mapping[str, Written], folder: pathlib.Path
) -> None:
    """Writes all tokens and times, from which the figures can be found again."""
    methods = {}
    for name, (texts, seconds) in written.items():
        methods[name] = {
            "tokens": [tokens.tolist() for tokens in texts.tokens],
            "texts": texts.texts,
            "seconds": list(seconds),
        }
        if texts.exits is not None:
            methods[name]["layers"] = [layers.tolist() for layers in texts.exits.layers]
        if texts.drafts is not None:
            drafts = texts.drafts._asdict().items()
            methods[name] |= {field: counts.tolist() for field, counts in drafts}
    content = {"prompts": [row.tolist() for row in prompts], "methods": methods}
    text = json.dumps(content, ensure_ascii=False) + "\n"
    save_atomically(folder / TEXTS, lambda path: path.write_text(text, "utf-8"))
