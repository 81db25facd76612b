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
from jmat.decode.draft import MOST_DRAFTED
from jmat.decode.options import check_lengths
from jmat.decode.prompts import Prompts, prompt_ids
from jmat.maps.kinds import AFFINE, parse_kinds
from jmat.models.cache import check_causal
from jmat.models.config import ModelConfig
from jmat.models.family import Transformer
from jmat.report.environment import environment
from jmat.report.results import Results
from jmat.report.rows import Row
from jmat.report.tables import format_table
from jmat.runtime.annotations import Keywords
from jmat.runtime.checks import check_number, check_several, check_whole, chosen_layers
from jmat.runtime.digests import short_hash
from jmat.runtime.files import save_atomically
from jmat.studies.decoding.measure import Written, write_all
from jmat.studies.decoding.methods import draft_methods, plain_method
from jmat.studies.decoding.plots import plot
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
from jmat.studies.fitting import read_statistics
from jmat.studies.kind_settings import KindSettings, routed
from jmat.studies.map_zoo.fits import check_fitted_here, fit_zoo
from jmat.studies.map_zoo.jumps import stream_jumps
from jmat.studies.settings import Say, read_subject, report

FIGURE, TEXTS = "decoding.png", "decoding.json"
_LENGTHS = (1, 2, 4)  # of drafts, by default
_SHOWN = (SPEED, SPEED_UP, SAME, UNTIL, ACCEPTED, PER_CHECK)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(KindSettings):
    """Holds the settings of the study.

    Attributes:
      kinds: kinds of maps that draft, such as `affine` or `rank:64`.
      layers: from which to draft, of 1 .. L − 1; none: a quarter, half and three
        quarters of the blocks, and L − 1.
      draft_tokens: lengths of drafts; none: 1, 2 and 4.
      num_prompts: the number of texts that are written at once.
      prompt_tokens: the length of prompts that are taken from the text.
      new_tokens: the length of each new text, which no stop token ends.
      temperature: 0 takes the most likely tokens; above it, tokens are drawn, and texts
        of a draft differ from plain ones, though not in law.
      turns: how often each way of writing is timed; 0: never, and then two runs give
        the same bytes.
    """

    kinds: Sequence[str] = (AFFINE,)
    layers: Sequence[int | str] = ()
    draft_tokens: Sequence[int | str] = ()
    num_prompts: int = 16
    prompt_tokens: int = 8
    new_tokens: int = 64
    temperature: float = 0.0
    turns: int = 3

    def __post_init__(self) -> None:
        """Raises ValueError for a setting that is not valid."""
        super().__post_init__()
        check_fitted_here(parse_kinds(self.kinds), "decoding")
        check_several("draft_tokens", self.draft_tokens)
        for length in self.draft_lengths:
            check_whole("draft_tokens", length, 1, MOST_DRAFTED)
        check_whole("num_prompts", self.num_prompts, 1)
        check_whole("prompt_tokens", self.prompt_tokens, 1)
        check_whole("new_tokens", self.new_tokens, 2)
        check_number("temperature", self.temperature, 0)
        check_whole("turns", self.turns, 0)

    @property
    def draft_lengths(self) -> list[int | str]:
        """Returns the lengths of drafts, as numbers where they are some."""
        given = [str(length) for length in self.draft_tokens or _LENGTHS]
        return [int(text) if text.isascii() and text.isdecimal() else text for text in given]

    def check(self, config: ModelConfig) -> None:
        """Raises ValueError for a masked model, and for what this one cannot have: a
        rank above its width, a layer, or so many positions.
        """
        check_causal(config)
        super().check(config)
        self.draft_layers(config)

    def draft_layers(self, config: ModelConfig) -> list[int]:
        """Returns the layers to draft from. Raises ValueError where there is none."""
        L = config.layers
        if L == 1:
            raise ValueError("a model of one block has no other blocks to check its drafts.")
        usual = sorted({max(L // 4, 1), max(L // 2, 1), max(3 * L // 4, 1), L - 1})
        layers = chosen_layers(self.layers or usual, L - 1)
        if 0 in layers:
            raise ValueError(f"layers: no block drafts from layer 0; expected 1 to {L - 1}.")
        return layers


def run(
    model: Transformer,
    examples: Examples | Sequence[str],
    options: Options = Options(),
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
      second, and how many times as fast as plain text that is. Intervals are over
      prompts; those of the clock are extremes over turns.

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
    lengths = [int(length) for length in options.draft_lengths]
    methods = [plain_method(), *draft_methods(maps, layers, lengths)]
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
        remarks=[_machine()] if options.turns else [],
    )


def table(rows: Sequence[Row]) -> str:
    """Returns a table of the ways to write."""
    return format_table(rows, index="method", columns=("metric",), metrics=_SHOWN, intervals=True)


def _machine() -> str:
    """Returns which machine the clock is of."""
    machine = environment()
    return (
        f"timed on {machine['cpu']} ({', '.join(machine['devices'])}): another machine's clock "
        "differs"
    )


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
        if texts.drafts is not None:
            drafts = texts.drafts._asdict().items()
            methods[name] |= {field: counts.tolist() for field, counts in drafts}
    content = {"prompts": [row.tolist() for row in prompts], "methods": methods}
    text = json.dumps(content, ensure_ascii=False) + "\n"
    save_atomically(folder / TEXTS, lambda path: path.write_text(text, "utf-8"))
