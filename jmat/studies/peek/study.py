"""Reads each position of given sentences at each layer: directly (`id`), and through a
map to the end (`mat`).
"""

import dataclasses
import html
import json
import pathlib
from collections.abc import Mapping, Sequence

from jmat.capture.activations import capture
from jmat.capture.reading import mask_token_of
from jmat.capture.shared import SharedActivations
from jmat.checkpoint import parameters
from jmat.data.corpus import sentences_fingerprint
from jmat.data.encoding import Tokenizer, check_text
from jmat.data.examples import Examples, Split, fingerprint, mask_positions
from jmat.forward import logits
from jmat.maps.compact import Map
from jmat.maps.files import read_maps
from jmat.maps.jumps import fit_jumps
from jmat.maps.types import Identity
from jmat.metrics.predictions import Predictions
from jmat.models.family import Transformer, check_model
from jmat.models.sites import Site, stream_sites
from jmat.report.notes import format_notes, noted
from jmat.report.results import Results
from jmat.report.rows import Row
from jmat.runtime.checks import check_whole, chosen_layers
from jmat.runtime.digests import model_hash
from jmat.runtime.files import save_atomically
from jmat.studies.fitting import announce_ranks
from jmat.studies.peek.page import page
from jmat.studies.peek.predictions import (
    Peek,
    all_positions,
    check_top,
    format_peek,
    peek,
    peek_rows,
)
from jmat.studies.settings import Say, Settings, check_head, read_subject

FILES = ("peek.json", "peek.html")
DEFAULT_SENTENCES = (
    "Return a new array of the same ___ as the input.",
    "If the file does not ___, an error is raised.",
    "The first argument is the name of the ___ to call.",
)
_READ = 256  # positions at which the full model's predictions are compared with one another


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """Holds the settings of the study.

    Attributes:
      layers: layers to read; none: all. The last one is always there.
      top: number of the most probable tokens to show.
    """

    layers: Sequence[int | str] = ()
    top: int = 5

    def __post_init__(self) -> None:
        """Raises ValueError for a setting that is not valid."""
        super().__post_init__()
        check_whole("top", self.top, 1)


@dataclasses.dataclass(frozen=True, eq=False)
class PeekResults(Results):
    """Holds the predictions, and shows them in a notebook as a page with one table a
    sentence.
    """

    peek: Peek | None = None

    def table(self) -> str:
        """Returns a table for each sentence, an empty line, and the notes."""
        return "\n".join([f"{self.tables(self.rows)}\n", *format_notes(self.rows)])

    def _repr_html_(self) -> str:
        if self.peek is None:
            return super()._repr_html_()
        return framed(page(self.peek))


def framed(content: str) -> str:
    """Returns a whole page as a notebook shows it: in a frame of its own."""
    return (
        f'<iframe srcdoc="{html.escape(content, quote=True)}" style="width: 100%; height: 40em; '
        'border: 0"></iframe>'
    )


def run(
    model: Transformer,
    sentences: Sequence[str] | None = None,
    options: Options = Options(),
    *,
    tokenizer: Tokenizer | None,
    maps: Mapping[str, Map] | str | pathlib.Path | None = None,
    examples: Examples | Sequence[str] | None = None,
    say: Say | None = None,
    shared: SharedActivations | None = None,
) -> PeekResults:
    """Reads the most probable tokens at every position of the sentences, layer by
    layer.

    Args:
      model: as `jmat.load` returns it.
      sentences: texts to look at; for a masked model with or without its mask token.
        None: three as docstrings have them.
      options: the settings.
      tokenizer: the model's.
      maps: maps to the final layer by name (`mat.3.12`), or the folder in which
        `layer_jump` saved them; None: maps are fitted on `examples`.
      examples: examples, or texts, on which maps are fitted.
      say: prints what happens now, beside progress bars; None: quiet.
      shared: activations that other studies of the model read, too; None: this one
        reads its own.

    Returns:
      One row for each sentence, position, map and layer; in a notebook, a page.

    Raises:
      ValueError: no tokenizer; a sentence that is empty or too long; a layer that the
        model does not have; neither maps nor examples, or both; maps of another model.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> texts = [f"Entry {i} holds a list of {i % 7} values." for i in range(40)]
      >>> results = jmat.studies.peek.run(
      ...     model, ["Returns a list of the"], tokenizer=tokenizer, examples=texts
      ... )
      >>> results.rows[0]["token"]
      'Returns'
    """
    sentences, layers, split = check(model, sentences, options, tokenizer=tokenizer)
    assert tokenizer is not None  # `check` has refused that
    if (maps is None) == (examples is None):
        raise ValueError(
            "peek reads with maps or fits some on examples: give one of maps= and examples=."
        )
    L, sites = model.config.layers, stream_sites(model.config.layers)
    if maps is not None:
        linear = _given_maps(model, maps, layers)
        text = {"maps": str(maps) if isinstance(maps, str | pathlib.Path) else "given"}
    else:
        linear, text = _fitted_maps(model, examples or (), options, tokenizer, say, shared)
    acts = capture(model, mask_positions(split, mask_token_of(model, tokenizer)), sites)
    shortcuts: dict[str, dict[int, Site]] = {
        "id": {layer: Identity() for layer in layers},
        "mat": {layer: linear[layer] if layer < L else Identity() for layer in layers},
    }
    streams = [acts[site] for site in sites]
    name = pathlib.Path(model.name).name
    seen = peek(model, tokenizer, sentences, split, streams, shortcuts, name=name, top=options.top)
    predictions = Predictions()
    predictions.add(logits(model, streams[L][:_READ]))
    rows = noted(peek_rows(seen), predictions.note())

    def write(folder: pathlib.Path) -> None:
        content = json.dumps(seen, ensure_ascii=False, indent=1) + "\n"
        save_atomically(folder / FILES[0], lambda path: path.write_text(content, "utf-8"))
        save_atomically(folder / FILES[1], lambda path: path.write_text(page(seen), "utf-8"))

    def table(rows: Sequence[Row]) -> str:
        return "\n\n".join(format_peek(seen, number) for number in range(len(seen["sentences"])))

    return PeekResults(
        "peek",
        rows,
        {"model": model.name, **dataclasses.asdict(options)},
        model_hash(parameters(model)),
        {**text, "sentences": sentences_fingerprint(sentences)},
        tables=table,
        files={FILES: write},
        peek=seen,
    )


def check(
    model: Transformer,
    sentences: Sequence[str] | None,
    options: Options,
    *,
    tokenizer: Tokenizer | None,
) -> tuple[list[str], list[int], Split]:
    """Returns the sentences, the layers to read and every position; arguments as for
    `run`.

    Raises:
      ValueError: as `run`, for these arguments.
    """
    check_model(model)
    check_head(model)
    check_top(options.top, model.config)
    L, masked = model.config.layers, not model.config.causal
    layers = sorted({*chosen_layers(options.layers, L), L})
    if tokenizer is None:
        raise ValueError(f"{model.name} has no tokenizer, which it takes to read sentences.")
    if isinstance(sentences, str):
        raise ValueError("expected a list of sentences; got one text.")
    for sentence in sentences or ():
        check_text(sentence, "a sentence")
    if sentences is None:
        sentences = [without_gap(sentence, tokenizer, masked) for sentence in DEFAULT_SENTENCES]
    split = all_positions(
        sentences, tokenizer, max_length=model.config.num_positions, masked=masked
    )
    return list(sentences), layers, split


def without_gap(text: str, tokenizer: Tokenizer, masked: bool) -> str:
    """Returns what a causal model reads, up to the gap; for a masked one, the whole
    with a mask in the gap.
    """
    before, after = text.split("___")
    return before + str(getattr(tokenizer, "mask_token", "")) + after if masked else before.rstrip()


def _given_maps(
    model: Transformer, maps: Mapping[str, Map] | str | pathlib.Path, layers: Sequence[int]
) -> dict[int, Map]:
    """Returns the maps from the layers to the final one; those of a folder are refused
    if they are another model's.
    """
    config, source = model.config, "maps="
    if isinstance(maps, str | pathlib.Path):
        source = str(maps)
        maps, _ = read_maps(maps, model_hash=model_hash(parameters(model)), width=config.width)
    names = {layer: f"mat.{layer}.{config.layers}" for layer in layers if layer < config.layers}
    if missing := [name for name in names.values() if name not in maps]:
        raise ValueError(
            f"{source} has no map {missing[0]}; expected what experiments.layer_jump saves."
        )
    return {layer: maps[name] for layer, name in names.items()}


def _fitted_maps(
    model: Transformer,
    examples: Examples | Sequence[str],
    options: Options,
    tokenizer: Tokenizer,
    say: Say | None,
    shared: SharedActivations | None,
) -> tuple[dict[int, Map], dict[str, str]]:
    """Returns new maps from every layer to the final one, and what results.json says of
    the text.
    """
    subject = read_subject(model, examples, tokenizer, options, say=say, shared=shared)
    text = {"source": "texts"} | {name: fingerprint(split) for name, split in subject.splits}
    maps, solutions = fit_jumps(
        subject.streams("fit"),
        targets="final",
        intercept=options.intercept,
        progress=subject.bar("fit"),
    )
    announce_ranks(subject, solutions)
    return {layer: linear for (layer, _), linear in maps.items()}, text
