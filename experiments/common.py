"""Holds all that experiments share: flags, the model and its examples, the output
folder, and its results.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Collection
from typing import TypeVar

import jax
from absl import flags

from experiments import cli, figure_flags, text_flags, tracking
from experiments.cli import own_flags, say
from experiments.text_flags import (
    check_text_flags,
    describe_source,
    describe_text,
    prepare_examples,
)
from jmat.capture.reading import mask_token_of
from jmat.capture.snapshots import discard
from jmat.checkpoint import parameters
from jmat.checkpoint.load import DTYPES, load
from jmat.data.encoding import Tokenizer
from jmat.data.examples import Examples, fingerprint
from jmat.models.family import Transformer
from jmat.report.results import Results
from jmat.runtime import hosts, joining
from jmat.runtime.annotations import Fields, JsonObject, Keywords
from jmat.runtime.digests import model_hash
from jmat.runtime.folders import OutputFolder, output_path
from jmat.runtime.mesh import usual_batch
from jmat.runtime.names import PREFIX
from jmat.studies.settings import Settings, check_head

flags.adopt_module_key_flags(text_flags)
flags.DEFINE_string(
    "model",
    "gpt2-docs",
    "Hub id (gpt2), local Hugging Face folder, or a bundled name (jmat:NAME where a folder has it, "
    "too).",
)
flags.DEFINE_string("revision", None, "Branch, tag or commit of a hub id.")
flags.DEFINE_enum(
    "dtype",
    "float32",
    DTYPES,
    "dtype of parameters and activations; regression always runs in float32 or better.",
)
flags.DEFINE_multi_string(
    "ignore_config", [], "config.json fields to ignore because they do not change the numbers."
)
flags.DEFINE_bool(
    "intercept", False, "Fit affine maps, y = x @ W + b, instead of the papers' y = x @ W."
)
flags.DEFINE_integer(
    "tokens_per_batch",
    None,
    "Padded tokens in one forward pass; default: 1024 on a CPU, 4096 for each accelerator, where "
    "more can be faster.",
    lower_bound=1,
)
flags.adopt_module_key_flags(tracking)
flags.DEFINE_string("out", None, "Folder for results; default runs/EXPERIMENT-MODEL.")
flags.DEFINE_bool(
    "overwrite",
    False,
    "Replace what a run with other flags left in --out, once there are new results.",
)
flags.DEFINE_bool(
    "shard_parameters", False, "Split every parameter over the devices: for models larger than one."
)
flags.DEFINE_string(
    "coordinator",
    None,
    "On many hosts, each starting the same command: HOST:PORT of process 0, or auto (TPU pods, "
    "Slurm, Open MPI).",
)
flags.DEFINE_integer(
    "num_processes", None, "With --coordinator=HOST:PORT: how many processes there are."
)
flags.DEFINE_integer(
    "process_id", None, "With --coordinator=HOST:PORT: the number of this process, from 0."
)

FLAGS = flags.FLAGS
SNAPSHOTS = "checkpoints"  # the folder of a pass that can go on, in the output folder
Options = TypeVar("Options", bound=Settings)


@dataclasses.dataclass(frozen=True)
class Job:
    """A run of one experiment: what it works on and where it writes."""

    experiment: str
    config: JsonObject
    out: pathlib.Path
    claim: OutputFolder | None  # on its output folder; of several processes only the first has one
    model: Transformer
    tokenizer: Tokenizer | None
    source: str  # of the examples: a prepared file or a corpus

    def path(self, name: str) -> pathlib.Path:
        """Returns the path of a file or folder in the output folder that is to be
        written next.
        """
        return self.out / name if self.claim is None else self.claim.path(name)

    @functools.cached_property
    def examples(self) -> Examples:
        """The examples that maps are fitted to and evaluated on; read or made at the
        first use.
        """
        examples = prepare_examples(self.model, self.tokenizer, self.source)
        hosts.check_same({f"the text of {self.source}": fingerprint(examples)})
        say(
            f"{examples.fit.num_examples} examples to fit on, {examples.eval.num_examples} to "
            "evaluate on"
        )
        return examples

    @functools.cached_property
    def model_hash(self) -> str:
        """Fingerprint of the model's weights."""
        return model_hash(parameters(self.model))

    def _protocol(self) -> str:
        """Returns the name of the protocol, and the settings that it leaves open."""
        words = [FLAGS.protocol]
        if self.config.get("fit_tokens") == "all":
            words.append("all tokens")
        elif FLAGS.positions_per_sentence > 1:
            words.append(f"{FLAGS.positions_per_sentence} positions a sentence")
        if FLAGS.piece_length:
            words.append(f"pieces of {FLAGS.piece_length} characters")
        chosen = {name: self.config[name] for name in ("skip_first", "skip_special")}
        words += [
            f"{name}={str(value).lower()}" for name, value in chosen.items() if value is not None
        ]
        return ", ".join(words)

    def text(self) -> JsonObject:
        """Returns the source of the examples, and their fingerprints."""
        return describe_text(self.source, self.examples)

    @property
    def context(self) -> JsonObject:
        """Returns the arguments of a study that say how the text is read and where it
        reports.
        """
        return {"tokenizer": self.tokenizer, "say": say}

    def options(self, kind: type[Options]) -> Options:
        """Returns the settings of a study, each by the flag of its name; snapshots go
        to the output folder.
        """
        options = flag_options(kind)
        if getattr(options, "snapshot_every", None):
            folder = self.path(SNAPSHOTS)
            cli.when_all_is_done(functools.partial(discard, folder))
            options = dataclasses.replace(options, snapshot_folder=folder)  # type: ignore[call-arg]
        return options

    def described(
        self,
        results: Results,
        *,
        config: Fields | None = None,
        text: Fields | None = None,
    ) -> Results:
        """Returns the results of a study with the run's flags and the source of its
        text.

        Args:
          results: the results.
          config: the flags; default: the run's.
          text: what was read; default: the examples.
        """
        info, read = results.maps_info, text
        if info is not None:
            info = dataclasses.replace(
                info, protocol=self._protocol(), corpus=FLAGS.examples or FLAGS.corpus
            )
        if read is None:
            read = {**dict(results.text or {}), **describe_source(self.source)}
        return dataclasses.replace(results, config=config or self.config, text=read, maps_info=info)

    def publish(self, results: Results, *, text: Fields | None = None) -> None:
        """Writes the results of a study, which then have the run's flags, and prints
        them; the first process does.

        `text`: what was read; default: the examples.
        """
        if not hosts.is_first():
            return
        results = self.described(results, text=text)
        drawing: Keywords = {
            "figure_format": FLAGS.figure_format,
            "width": FLAGS.figure_width,
        }
        written = results.save(self.out, before=self.path, say=say, **drawing)
        print(results.table())
        pages = [name for name in written if name.endswith(".html")]
        others = ", ".join(name for name in written if name not in pages)
        print(
            f"wrote {self.out}/{others}",
            *(f"open {self.out}/{name} in a browser" for name in pages),
            sep="; ",
        )


def flag_options(kind: type[Options]) -> Options:
    """Returns the settings of a study, each by the flag of its name. Raises ValueError
    where one is not valid.
    """
    names = [field.name for field in dataclasses.fields(kind) if field.name in FLAGS]
    given: Keywords = {name: FLAGS[name].value for name in names}
    return kind(**given)


def start(
    experiment: str,
    *,
    writes: Collection[str],
    options: type[Settings] = Settings,
    reads: Collection[str] = (),
    needs_head: bool = True,
    many_hosts: bool = False,
) -> Job:
    """Checks the flags, claims the output folder and loads the model, which must have a
    head if that is needed.

    Where the experiment runs on many hosts, all of them load it, and only the first
    claims the folder.

    Args:
        experiment: its name.
        writes: names of the files and folders that it writes in its output folder,
          beside results.json.
        options: the settings of its study, which are checked before anything is loaded.
        reads: names of its own flags that can name files.
        needs_head: refuse a model without a head.
        many_hosts: the experiment can share its work with other processes.
    """
    check_text_flags()
    settings = flag_options(options)
    config, out, claimed = claim(experiment, writes=writes, reads=reads, many_hosts=many_hosts)
    ignore = tuple(FLAGS.ignore_config)
    model, tokenizer = load_checked(FLAGS.model, settings, ignore=ignore, needs_head=needs_head)
    source = FLAGS.examples or FLAGS.corpus
    job = Job(experiment, config, out, claimed, model, tokenizer, source)
    check_same_weights(FLAGS.model, lambda: job.model_hash)
    return job


def load_checked(
    name: str, settings: Settings, *, ignore: tuple[str, ...], needs_head: bool
) -> tuple[Transformer, Tokenizer | None]:
    """Returns a model and its tokenizer. Raises ValueError where the model cannot have the
    settings, or has no head and needs one.

    Args:
      name: as --model takes it.
      settings: of the study.
      ignore: fields of its config.json to ignore.
      needs_head: refuse a model without a head.
    """
    say(f"loading {name}")
    loading: Keywords = {"dtype": FLAGS.dtype, "shard_parameters": FLAGS.shard_parameters}
    model, tokenizer = load(name, revision=FLAGS.revision, ignore_config=ignore, **loading)
    if needs_head:
        check_head(model)
    mask_token_of(model, tokenizer)  # or raises
    settings.check(model.config)
    return model, tokenizer


def claim(
    experiment: str,
    *,
    writes: Collection[str] = (),
    reads: Collection[str] = (),
    many_hosts: bool = False,
    out: pathlib.Path | None = None,
) -> tuple[JsonObject, pathlib.Path, OutputFolder | None]:
    """The flags and the output folder of the run, which is claimed for it; settles the
    precision of products.

    Joins the other processes first, if there are any and the experiment can share its
    work with them. `out` is the folder where no other is asked for; default: one that is
    named by the model.
    """
    out = output_folder(experiment) if out is None or FLAGS.out is not None else out
    joining.check_flags(FLAGS.coordinator, FLAGS.num_processes, FLAGS.process_id)
    if FLAGS.coordinator and not many_hosts:
        raise ValueError(
            f"{experiment} runs on one host: leave out --coordinator, --num_processes and "
            "--process_id."
        )
    if FLAGS.coordinator:
        say(f"joining the other processes at {FLAGS.coordinator}")
    joining.initialize(FLAGS.coordinator, FLAGS.num_processes, FLAGS.process_id)
    if FLAGS.dtype == "float32":
        # The default of accelerators is a lower precision.
        jax.config.update("jax_default_matmul_precision", "highest")
    config = own_flags()
    hosts.check_same({f"--{name}": value for name, value in config.items()})
    claimed = None
    if hosts.is_first():
        inputs = ("model", "examples", "corpus", *reads)
        names = figure_flags.figure_files(writes)
        claimed = cli.claim_folder(
            out, experiment, config, writes=names, reads=inputs, overwrite=FLAGS.overwrite
        )
    return config, out, claimed


def output_folder(experiment: str) -> pathlib.Path:
    """Returns the output folder of a run: --out, or a name made of the experiment's and
    the model's.
    """
    model = pathlib.Path(FLAGS.model.removeprefix(PREFIX)).name
    return output_path(f"runs/{experiment}-{model}" if FLAGS.out is None else FLAGS.out)


def check_same_weights(name: str, fingerprint: Callable[[], str]) -> None:
    """Raises ValueError, on all hosts, where they have read different weights under one
    name; one alone hashes none.
    """
    if hosts.count() > 1:
        hosts.check_same({f"the hash of the weights of {name}": fingerprint()})


def tokens_per_batch() -> int:
    """Padded tokens in one forward pass: by the flag, or what suits the devices."""
    return FLAGS.tokens_per_batch or usual_batch()
