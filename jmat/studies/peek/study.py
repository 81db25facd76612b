"""Reads each position of given sentences at each layer: directly (`id`), and through
maps to the end, such as `mat`.
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
from jmat.data.examples import Examples, Split, mask_positions
from jmat.forward import logits
from jmat.maps.compact import Map
from jmat.maps.types import Identity
from jmat.metrics.predictions import Predictions
from jmat.models.family import Transformer, check_model
from jmat.models.sites import Site, stream_sites
from jmat.report.notes import format_notes, noted
from jmat.report.results import Results
from jmat.report.rows import Row
from jmat.runtime.checks import check_several, check_whole, chosen_layers
from jmat.runtime.digests import model_hash
from jmat.runtime.files import save_atomically
from jmat.studies.peek.page import page
from jmat.studies.peek.predictions import (
    Peek,
    all_positions,
    check_top,
    format_peek,
    peek,
    peek_rows,
)
from jmat.studies.peek.readings import check_kinds, fitted_maps, given_maps
from jmat.studies.settings import Say, Settings, check_head

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
      layers: layers to read; none: all, or all from which there are maps. The last one
        is always there.
      top: number of the most probable tokens to show.
      kinds: kinds of maps to read with, such as `id` and `rank:64`; none: `id` and
        `mat`, or `id` and all kinds of given maps.
    """

    layers: Sequence[int | str] = ()
    top: int = 5
    kinds: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Raises ValueError for a setting that is not valid."""
        super().__post_init__()
        check_whole("top", self.top, 1)
        check_several("kinds", self.kinds)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
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
      maps: maps to the final layer by name (`mat.3.12`), or what `jmat.load_maps`
        reads: a folder that `layer_jump` or `map_zoo` wrote, a tuned lens, a Jacobian
        lens; None: maps are fitted on `examples`.
      examples: examples, or texts, on which maps are fitted.
      say: prints what happens now, beside progress bars; None: quiet.
      shared: activations that other studies of the model read, too; None: this one
        reads its own.

    Returns:
      One row for each sentence, position, map and layer; in a notebook, a page.

    Raises:
      ValueError: no tokenizer; a sentence that is empty or too long; a layer that the
        model does not have; neither maps nor examples, or both; maps of another model;
        a kind that there is not, or that cannot be fitted here.

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
    sentences, layers, split = check(
        model, sentences, options, tokenizer=tokenizer, fits=maps is None
    )
    assert tokenizer is not None  # `check` has refused that
    if (maps is None) == (examples is None):
        raise ValueError(
            "peek reads with maps or fits some on examples: give one of maps= and examples=."
        )
    L, sites = model.config.layers, stream_sites(model.config.layers)
    if maps is not None:
        asked = layers if options.layers else None
        readings = given_maps(model, maps, options.kinds, asked)
        text = {"maps": str(maps) if isinstance(maps, str | pathlib.Path) else "given"}
    else:
        readings, text = fitted_maps(
            model,
            examples or (),
            options,
            options.kinds,
            layers,
            tokenizer=tokenizer,
            say=say,
            shared=shared,
        )
    acts = capture(model, mask_positions(split, mask_token_of(model, tokenizer)), sites)
    shortcuts: dict[str, dict[int, Site]] = {
        kind: {**by_layer, L: Identity()} for kind, by_layer in readings.items()
    }
    streams = [acts[site] for site in sites]
    name = pathlib.Path(model.name).name
    seen = peek(model, tokenizer, sentences, split, streams, shortcuts, name=name, top=options.top)
    predictions = Predictions()
    predictions.add(logits(model, streams[L][:_READ]))
    rows = noted(peek_rows(seen), predictions.note())

    def write(folder: pathlib.Path) -> None:
        content = json.dumps(seen, ensure_ascii=False, indent=1, allow_nan=False) + "\n"
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
    fits: bool = True,
) -> tuple[list[str], list[int], Split]:
    """Returns the sentences, the layers to read and every position; arguments as for
    `run`. `fits` says that maps are fitted here.

    Raises:
      ValueError: as `run`, for these arguments.
    """
    check_model(model)
    check_head(model)
    check_top(options.top, model.config)
    if fits:
        check_kinds(options.kinds, model.config)
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
