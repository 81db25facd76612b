"""Reads what every study is given: settings, examples, and the token that masks a
position.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from jaxtyping import Float
from numpy import ndarray

from jmat.capture.activations import capture, check_examples
from jmat.capture.reading import mask_token_of
from jmat.capture.shared import SharedActivations
from jmat.checkpoint import parameters
from jmat.data.encoding import Tokenizer
from jmat.data.examples import Examples, Split, fingerprint, mask_positions
from jmat.data.reading import check_texts
from jmat.data.sampling import make_examples
from jmat.data.splitting import divide
from jmat.maps.compact import Map
from jmat.maps.files import MapsInfo
from jmat.models.config import ModelConfig
from jmat.models.family import Transformer, check_model
from jmat.models.sites import stream_sites
from jmat.report.results import Results
from jmat.report.rows import Row
from jmat.runtime.annotations import Fields, Keywords
from jmat.runtime.checks import check_flag, check_seed, check_whole
from jmat.runtime.digests import model_hash
from jmat.runtime.versions import package_version

Say = Callable[[str], object]  # prints one line about the work that begins

_SHARES = {"fit": 3, "held_out": 1}  # of texts that are not divided yet


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Holds the settings that studies share.

    Attributes:
      seed: draws positions, and the resamples of intervals.
      intercept: fit `y = x @ W + b` instead of the papers' `y = x @ W`.
      tokens_per_batch: padded tokens in one forward pass; None:
        `jmat.runtime.mesh.usual_batch`.
    """

    seed: int = 0
    intercept: bool = False
    tokens_per_batch: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a setting that is out of range."""
        check_seed(self.seed)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == bool or (field.type == bool | None and value is not None):  # noqa: E721
                check_flag(field.name, value)
        if self.tokens_per_batch is not None:
            check_whole("tokens_per_batch", self.tokens_per_batch, 1)

    def check(self, config: ModelConfig) -> None:
        """Raises ValueError for a setting that this model cannot have, such as a layer;
        before any text is read.
        """


@dataclasses.dataclass(frozen=True)
class Subject:
    """Holds the model and the text of one study.

    Attributes:
      model: the model.
      examples: sentences to fit on and others to evaluate on.
      tokenizer: the model's; None where examples were prepared before.
      mask_token: id that hides a position when a masked model is read there; None for a
        causal model.
      say: prints what happens now; None where the study is quiet.
      shared: activations that other studies of the model read, too; None where this one
        is alone.
      tokens_per_batch: padded tokens in one forward pass; None:
        `jmat.runtime.mesh.usual_batch`.
    """

    model: Transformer
    examples: Examples
    tokenizer: Tokenizer | None = None
    mask_token: int | None = None
    say: Say | None = None
    shared: SharedActivations | None = None
    tokens_per_batch: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for shared activations of another model."""
        if self.shared is not None and self.shared.model is not self.model:
            raise ValueError(
                "the shared activations are another model's: give those of the model that is "
                "studied."
            )

    @functools.cached_property
    def model_hash(self) -> str:
        """Returns the fingerprint of the model's weights; they are read at the first
        use.
        """
        return model_hash(parameters(self.model))

    @functools.cached_property
    def as_read(self) -> Examples:
        """Returns the examples as the model reads them: those of a masked model under
        its mask.
        """
        return Examples(*(mask_positions(split, self.mask_token) for _, split in self.splits))

    @property
    def capture(self) -> Callable[..., dict[str, Float[ndarray, "N _"]]]:
        """Returns `jmat.capture` of the model: a function of a split, `keep`, and
        `progress`.

        Where activations are shared, it is the function that reads those.
        """
        read = functools.partial(capture, self.model) if self.shared is None else self.shared.read
        return functools.partial(read, tokens_per_batch=self.tokens_per_batch)

    def streams(self, part: Literal["fit", "eval"]) -> list[Float[ndarray, "N D"]]:
        """Returns h_0 .. h_L at the examples of one part."""
        split, sites = getattr(self.as_read, part), stream_sites(self.model.config.layers)
        return list(self.capture(split, sites, progress=self.bar(f"capture {part}")).values())

    def capture_both(
        self, keep: Sequence[str]
    ) -> tuple[dict[str, Float[ndarray, "N _"]], dict[str, Float[ndarray, "M _"]]]:
        """Returns activations at the examples to fit on and at those to evaluate on, by
        site.
        """
        fit = self.capture(self.as_read.fit, keep, progress=self.bar("capture fit"))
        return fit, self.capture(self.as_read.eval, keep, progress=self.bar("capture eval"))

    @property
    def splits(self) -> tuple[tuple[str, Split], tuple[str, Split]]:
        """Returns the examples to fit on and those to evaluate on, with their names."""
        return ("fit", self.examples.fit), ("eval", self.examples.eval)

    @property
    def text(self) -> dict[str, str]:
        """Returns the source of the text, and fingerprints of what is fitted and
        evaluated on.
        """
        return {"source": "texts"} | {name: fingerprint(split) for name, split in self.splits}

    def announce(self, message: str) -> None:
        """Prints a message, unless the study is quiet."""
        if self.say is not None:
            self.say(message)

    def bar(self, words: str) -> str | None:
        """Returns the words of a progress bar; None, for no bar, where the study is
        quiet.
        """
        return None if self.say is None else words


def read_subject(
    model: Transformer,
    examples: Examples | Sequence[str],
    tokenizer: Tokenizer | None = None,
    options: Settings = Settings(),
    *,
    needs_head: bool = True,
    say: Say | None = None,
    shared: SharedActivations | None = None,
) -> Subject:
    """Returns the subject of a study.

    Args:
      model: as `jmat.load` returns it.
      examples: examples, or texts, of which a hash decides which quarter is evaluated
        on.
      tokenizer: reads texts, and knows the mask of a masked model.
      options: the study's settings; the seed draws the position that is read in each
        text.
      needs_head: refuse a model without a language-model head.
      say: prints what happens now; None: nothing is printed, and there are no progress
        bars.
      shared: activations that several studies of the model read; None: this study reads
        its own.

    Raises:
      ValueError: the model has no head, or no mask token; texts without a tokenizer, or
        too few of them; tokens that the model does not have; shared activations of
        another model.
    """
    check_model(model)
    if not isinstance(options, Settings):
        raise ValueError(
            f"options is of type {type(options).__name__}; expected the Options of the study."
        )
    if needs_head:
        check_head(model)
    mask_token = mask_token_of(model, tokenizer)
    if not isinstance(examples, Examples):
        examples = _examples_of(examples, model, tokenizer, options.seed)
    check_examples(examples, model.config)
    return Subject(model, examples, tokenizer, mask_token, say, shared, options.tokens_per_batch)


def check_head(model: Transformer) -> None:
    """Raises ValueError for a model that makes no predictions."""
    if model.head is None:
        raise ValueError(
            f"{model.name or 'the model'} has no language-model head; this study needs its "
            "predictions."
        )


def _examples_of(
    texts: Sequence[str], model: Transformer, tokenizer: Tokenizer | None, seed: int
) -> Examples:
    tokenizer = check_texts(texts, tokenizer)
    fit, held_out = divide(set(texts), **_SHARES)
    if not (fit and held_out):
        raise ValueError(
            f"{len(set(texts))} different texts are too few: some are fitted on and others "
            "evaluated on."
        )
    size: Keywords = {"max_length": model.config.num_positions, "masked": not model.config.causal}
    return make_examples(fit, held_out, tokenizer, protocol="din2023", seed=seed, **size)


def report(
    experiment: str,
    subject: Subject,
    options: Settings,
    rows: list[Row],
    *,
    maps: Mapping[str, Map] | None = None,
    n: int | None = None,
    text: Fields | None = None,
    **shown: Any,
) -> Results:
    """Returns the results of a study with all that they depend on.

    Args:
      experiment: its name.
      subject: what it was of.
      options: its settings, which become the results' `config`.
      rows: its figures.
      maps: maps that it fitted, by name.
      n: number of tokens that they were fitted on; default: the number of fit examples.
      text: what was read; default: the subject's.
      shown: `tables`, `figures`, `files` of `Results`.
    """
    model, text = subject.model, subject.text if text is None else text
    info = None
    if maps is not None:
        info = MapsInfo(
            model=model.name,
            model_hash=subject.model_hash,
            protocol="",
            corpus=text["source"],
            n=subject.examples.fit.num_examples if n is None else n,
            seed=options.seed,
            dtype=model.embed.tokens.table.dtype.name,
            fit_text=text["fit"],
            eval_text=text["eval"],
            jmat=package_version("jmat"),
        )
    config = {"model": model.name, **dataclasses.asdict(options)}
    return Results(experiment, rows, config, subject.model_hash, text, maps or {}, info, **shown)
