"""Runs every study that applies to one model, from one capture of its activations, and
reports all of them.
"""

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence

from jmat.capture.shared import SharedActivations
from jmat.data.encoding import Tokenizer
from jmat.data.examples import Examples
from jmat.models.family import Transformer
from jmat.models.sites import stream_sites
from jmat.report.environment import environment
from jmat.report.results import Results, ignore_message
from jmat.runtime.annotations import Fields, JsonObject, Keywords
from jmat.runtime.files import save_atomically
from jmat.runtime.replaced import discard_replaced
from jmat.studies import peek, submodules
from jmat.studies.overview import finished, rules
from jmat.studies.overview.claims import HOLDS, Verdict, verdicts
from jmat.studies.overview.finished import Finished
from jmat.studies.overview.options import ORDER, STUDIES, Options, ablated_layers, reason_against
from jmat.studies.overview.page import page
from jmat.studies.settings import Say, Settings, Subject, read_subject

FILES = ("report.html", "report.json")


@dataclasses.dataclass(frozen=True, eq=False)
class Overview:
    """Holds the results of all studies of one model, and shows them as a page.

    Attributes:
      model: name, number of blocks, width, and whether it predicts the next token
        (`causal`).
      model_hash: fingerprint of its weights.
      text: source of the text, its fingerprints, and the numbers of examples.
      config: the settings.
      studies: results by study, in the order of the page.
      skipped: studies that were not run, each with the reason.
      failures: studies that failed, each with a sentence.
      verdicts: on the claims of both papers.
      passes: number of passes that read activations at the examples, for all studies
        together.
      environment: versions, processor and devices.
    """

    model: Fields
    model_hash: str
    text: Fields
    config: Fields
    studies: Mapping[str, Finished]
    skipped: Mapping[str, str]
    failures: Mapping[str, str]
    verdicts: Sequence[Verdict]
    passes: int
    environment: Fields

    def content(self) -> JsonObject:
        """Returns what report.json holds."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        studies = {
            name: {k: v for k, v in done._asdict().items() if k != "figures"}
            for name, done in self.studies.items()
        }
        return (
            {"experiment": "report"}
            | fields
            | {
                "verdicts": [verdict._asdict() for verdict in self.verdicts],
                "studies": studies,
            }
        )

    def page(self) -> str:
        """Returns the page, which needs nothing else."""
        return page(self.content(), {name: done.figures for name, done in self.studies.items()})

    def table(self) -> str:
        """Returns the verdicts, the durations, and the studies that are missing, as
        text.
        """
        lines = [
            f"{verdict.verdict:>14}  {verdict.statement} {verdict.figures}"
            for verdict in self.verdicts
        ]
        holding = sum(verdict.verdict == HOLDS for verdict in self.verdicts)
        lines.append(f"{holding} of {len(self.verdicts)} claims hold")
        lines += [f"{name}: {done.duration()}" for name, done in self.studies.items()]
        left_out = [f"{name} was left out: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(
            [*lines, *left_out, *(f"{name} failed: {why}" for name, why in self.failures.items())]
        )

    def save(
        self, folder: str | pathlib.Path, *, before: Callable[[str], object] = ignore_message
    ) -> list[str]:
        """Writes report.html and report.json into a folder, and returns their names;
        `before` is called with each.
        """
        folder = pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.content(), indent=1, allow_nan=False, default=str) + "\n"
        for name, content in zip(FILES, (self.page(), text), strict=True):
            before(name)
            _write(folder / name, content)
        discard_replaced(folder)
        return list(FILES)

    def _repr_html_(self) -> str:
        return peek.framed(self.page())


def run(
    model: Transformer,
    examples: Examples | Sequence[str],
    options: Options = Options(),  # noqa: B008 (immutable)
    *,
    tokenizer: Tokenizer | None = None,
    say: Say | None = None,
    folder: str | pathlib.Path | None = None,
    before: Callable[[str], object] = ignore_message,
    described: Callable[[Results], Results] = lambda results: results,
) -> Overview:
    """Runs all studies of a model on one text.

    Args:
      model: as `jmat.load` returns it.
      examples: examples, or texts, of which three quarters are fitted on.
      options: the settings.
      tokenizer: the model's; texts and masked models need it.
      say: prints what happens now, beside progress bars; None: quiet.
      folder: where each study's files are written when it ends, in a folder of its
        name; one whose settings, text, model and version of jmat are those of now is
        read back instead of run again. None: nothing is written.
      before: is called with the name of each file or folder in it before that is
        written.
      described: adds to the results of a study what their files say beside: flags,
        source.

    Returns:
      The results of all studies, and the verdicts on the papers' claims. A study that
      fails takes nothing from the others: its sentence is among the failures.

    Raises:
      ValueError: as `jmat.studies.settings.read_subject`; the model does not allow a
        setting.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> texts = [f"Entry {i} holds a list of {i % 7} values." for i in range(40)]
      >>> studies = ("layer_jump", "r2")
      >>> options = jmat.studies.overview.Options(studies=studies)
      >>> result = jmat.studies.overview.run(
      ...     model, texts, options, tokenizer=tokenizer
      ... )
      >>> list(result.studies)
      ['layer_jump', 'r2']
    """
    reasons = {name: reason_against(name, model, tokenizer, options) for name in STUDIES}
    skipped = {name: reason for name, reason in reasons.items() if reason is not None}
    subject = read_subject(model, examples, tokenizer, options, needs_head=False, say=say)
    shared = SharedActivations(model)
    done: dict[str, Finished] = {}
    failures: dict[str, str] = {}
    for name in ORDER:
        if name in skipped:
            continue
        settings = _settings(name, options, model.config.layers)
        expected = described(finished.empty(name, subject, settings))
        home = None if folder is None else pathlib.Path(folder) / name
        kept = None if home is None else finished.read(home, expected)
        if kept is not None:
            subject.announce(f"{name} is there already: {home}")
            done[name] = kept
            continue
        subject.announce(
            f"study {len(done) + len(failures) + 1} of {len(STUDIES) - len(skipped)}: {name}"
        )
        began = time.perf_counter()
        try:
            results = described(_run(name, subject, settings, shared))
        except ValueError as error:
            failures[name] = str(error)
            subject.announce(f"{name} failed: {error}")
            continue
        done[name] = finished.of(results, time.perf_counter() - began)
        if home is not None:
            before(name)
            finished.save(home, results, done[name], say=subject.announce)
        shared.keep_only(stream_sites(model.config.layers))
    return _overview(subject, options, described, done, skipped, failures, shared.passes)


def _settings(name: str, options: Options, layers: int) -> Settings:
    """Returns the settings of a study, which has snapshots of its own."""
    settings = options.of(STUDIES[name].Options)
    if isinstance(settings, submodules.Options):
        return dataclasses.replace(settings, layers=ablated_layers(layers))
    if getattr(settings, "snapshot_folder", None) is None:
        return settings
    return dataclasses.replace(settings, snapshot_folder=settings.snapshot_folder / name)


def _run(name: str, subject: Subject, settings: Settings, shared: SharedActivations) -> Results:
    """Runs one study. Raises ValueError where it fails, in whole or in part."""
    given: Keywords = {"tokenizer": subject.tokenizer, "say": subject.say, "shared": shared}
    if isinstance(settings, peek.Options):
        return peek.run(subject.model, None, settings, examples=subject.examples, **given)
    results: Results = STUDIES[name].run(subject.model, subject.examples, settings, **given)
    if failed := getattr(results, "failures", ()):
        raise ValueError(" ".join(failed))
    return results


def _overview(
    subject: Subject,
    options: Options,
    described: Callable[[Results], Results],
    done: Mapping[str, Finished],
    skipped: Mapping[str, str],
    failures: Mapping[str, str],
    passes: int,
) -> Overview:
    """Returns the results of all studies, in the order of the page, with the verdicts."""
    config, examples = subject.model.config, subject.examples
    shape = {
        "name": subject.model.name,
        "layers": config.layers,
        "width": config.width,
        "causal": config.causal,
    }
    own = described(finished.empty("report", subject, options))
    counts = {"num_fit": examples.fit.num_examples, "num_eval": examples.eval.num_examples}
    tested = rules.Evidence(
        {name: of.rows for name, of in done.items()}, config.layers, config.causal, options.score
    )
    return Overview(
        model=shape,
        model_hash=subject.model_hash,
        text={**dict(own.text or {}), **counts},
        config=own.config,
        studies={name: done[name] for name in STUDIES if name in done},
        skipped=skipped,
        failures=failures,
        verdicts=verdicts(tested),
        passes=passes,
        environment=environment(),
    )


def _write(path: pathlib.Path, content: str) -> None:
    save_atomically(path, lambda temporary: temporary.write_text(content, "utf-8"))
