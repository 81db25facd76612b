"""Fits maps from layer to layer: chooses the tokens, and whether activations are stored
for it.
"""

import dataclasses
import pathlib
from collections.abc import Collection, Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray

from jmat.capture.moments import Moments, Pair
from jmat.capture.snapshots import Snapshots
from jmat.capture.stream import all_positions, packed_batches, sampled_positions, stream_moments
from jmat.checkpoint import parameters
from jmat.data.batches import Batch
from jmat.data.examples import Examples, Split
from jmat.data.sampling import PROTOCOLS, skipped_tokens
from jmat.maps.jumps import fit_jumps, fit_jumps_to_moments, jump_pairs
from jmat.maps.plain import SOLVERS
from jmat.maps.solution import Solution
from jmat.maps.types import Linear
from jmat.models.cost import moments_bytes
from jmat.models.family import Transformer
from jmat.models.sites import stream_sites
from jmat.runtime import hosts
from jmat.runtime.annotations import JsonObject, Keywords
from jmat.runtime.checks import check_choice, check_number, check_path, check_whole
from jmat.runtime.digests import model_hash
from jmat.runtime.mesh import usual_batch
from jmat.studies.routes import choose_route, memory_of_activations
from jmat.studies.settings import Settings, Subject

TOKENS = ("sampled", "all")
_FEW = 5  # tokens for each dimension, below which a fit would gain much from more
ROUTES = ("auto", "memory", "streaming")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadingSettings(Settings):
    """Holds the settings of a pass over whole sentences.

    Attributes:
      protocol: `din2023` or `jmat`; with `jmat`, first positions and special tokens are
        left out where all tokens are read.
      skip_first: with `jmat`, first positions that are left out; None: 1, for masked
        models 0.
      skip_special: with `jmat`, whether special tokens are left out; None: for masked
        models.
      snapshot_folder: where a pass that is killed can go on from; None writes no
        snapshots.
      snapshot_every: seconds between two snapshots; 0 writes none.
    """

    protocol: str = "din2023"
    skip_first: int | None = None
    skip_special: bool | None = None
    snapshot_folder: pathlib.Path | None = None
    snapshot_every: float = 300.0

    def __post_init__(self) -> None:
        """Raises ValueError for a setting that is not valid."""
        super().__post_init__()
        check_choice("protocol", self.protocol, PROTOCOLS)
        if self.skip_first is not None:
            check_whole("skip_first", self.skip_first, 0)
        if self.snapshot_folder is not None:
            check_path("snapshot_folder", self.snapshot_folder)
        check_number("snapshot_every", self.snapshot_every, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitSettings(ReadingSettings):
    """Holds the settings of a fit from layer to layer.

    Attributes:
      fit_tokens: maps are fitted on the `sampled` positions of the sentences, or on
        `all` tokens.
      route: `memory` stores activations, `streaming` sums their moments; `auto`
        chooses.
      solver: of stored activations: `qr`, or `lstsq` for
        `jnp.linalg.lstsq(x, y, rcond=0)`.
    """

    fit_tokens: str = "sampled"
    route: str = "auto"
    solver: str = "qr"

    def __post_init__(self) -> None:
        """Raises ValueError for a setting that is not valid."""
        super().__post_init__()
        check_choice("fit_tokens", self.fit_tokens, TOKENS)
        check_choice("route", self.route, ROUTES)
        check_choice("solver", self.solver, SOLVERS)
        if self.solver != "qr" and self.route == "streaming":
            raise ValueError(
                f"solver={self.solver!r} needs stored activations: leave out route='streaming'."
            )


def as_read(subject: Subject, tokens: str) -> Examples:
    """Returns the sentences as the model reads them.

    A masked model reads `sampled` positions under the mask, and `all` tokens unmasked.
    """
    return subject.as_read if tokens == "sampled" else subject.examples


def tokens_read(
    subject: Subject, split: Split, tokens: str, settings: ReadingSettings
) -> Bool[ndarray, " total"]:
    """Returns which tokens of a split are read.

    These are the `sampled` positions, or `all` but those that the protocol `jmat`
    leaves out.

    Raises:
      ValueError: special tokens are to be left out, and there is no tokenizer that
        knows them.
    """
    if tokens == "sampled":
        return sampled_positions(split)
    if settings.protocol != "jmat":
        return all_positions(split)
    causal = subject.model.config.causal
    first = int(causal) if settings.skip_first is None else settings.skip_first
    special = settings.skip_special
    if subject.tokenizer is None and (special or (special is None and not causal)):
        raise ValueError(
            f"{subject.model.name} has no tokenizer that knows special tokens; give "
            "--noskip_special."
        )
    skipped: Collection[int] = ()
    if subject.tokenizer is not None:
        skipped = skipped_tokens(subject.tokenizer, masked=not causal, skip_special=special)
    return all_positions(split, skip_first=first, skip_tokens=sorted(skipped))


def sentence_batches(
    subject: Subject, split: Split, tokens: str, settings: ReadingSettings
) -> list[Batch]:
    """Returns batches of the sentences (`as_read`), in which the tokens to read are
    marked.
    """
    read = tokens_read(subject, split, tokens, settings)
    size = settings.tokens_per_batch or usual_batch()
    return packed_batches(split, read, tokens_per_batch=size, row_multiple=jax.local_device_count())


def snapshots(
    subject: Subject, settings: ReadingSettings, name: str = "fit", model: Transformer | None = None
) -> Snapshots | None:
    """Returns the snapshots of one pass over the text, by default with the subject's
    model.

    Every host has its own, and goes through its share of the text independently. None
    where no snapshots are written.
    """
    if settings.snapshot_folder is None or not settings.snapshot_every:
        return None
    weights = subject.model_hash if model is None else model_hash(parameters(model))
    owner: JsonObject = {"hash of the model's weights": weights}
    if hosts.count() > 1:
        name = f"{name}-{jax.process_index()}"
        owner["number of processes"] = hosts.count()
    folder = pathlib.Path(settings.snapshot_folder) / name
    return Snapshots(folder, settings.snapshot_every, owner, subject.announce)


def fit_layers(
    subject: Subject, settings: FitSettings, *, targets: str = "all"
) -> tuple[dict[tuple[int, int], Linear], int]:
    """Fits `mat` from every layer to `all` later layers, or only to the `final` one.

    Returns:
      Maps by source and target layer, and the number of tokens that they were fitted
      on.
    """
    fitting: Keywords = {
        "targets": targets,
        "intercept": settings.intercept,
        "progress": subject.bar("fit"),
    }
    L = subject.model.config.layers
    statistics = read_statistics(subject, settings, jump_pairs(L, targets=targets))
    if isinstance(statistics, Moments):
        maps, solutions = fit_jumps_to_moments(statistics, L, **fitting)
    else:
        streams = [statistics[site] for site in stream_sites(L)]
        maps, solutions = fit_jumps(streams, solver=settings.solver, **fitting)
    announce_ranks(subject, solutions)
    return maps, solutions[0].n


def read_statistics(
    subject: Subject, settings: FitSettings, pairs: Sequence[Pair]
) -> Moments | dict[str, Float[ndarray, "N _"]]:
    """Returns the activations of all sites of the pairs at the tokens to fit on, or the
    moments of the pairs, as the route has it. All hosts take part.

    Streams are read all together, as other studies read them.
    """
    if _route(subject, settings, pairs) == "streaming":
        split = as_read(subject, settings.fit_tokens).fit
        batches = sentence_batches(subject, split, settings.fit_tokens, settings)
        bar, kept = subject.bar("read fit"), snapshots(subject, settings)
        return stream_moments(subject.model, batches, pairs, snapshots=kept, progress=bar)
    return subject.capture(
        fit_split(subject, settings),
        _sites(pairs, subject.model.config.layers),
        progress=subject.bar("capture fit"),
    )


def _sites(pairs: Sequence[Pair], layers: int) -> tuple[str, ...]:
    """Returns the sites of pairs, each once; all streams where there is one."""
    sites, streams = dict.fromkeys(site for pair in pairs for site in pair), stream_sites(layers)
    return tuple(dict.fromkeys((*streams, *sites))) if sites.keys() & set(streams) else (*sites,)


def fit_split(subject: Subject, settings: FitSettings) -> Split:
    """Returns the sentences, as the model reads them, with the tokens to fit on as
    examples.
    """
    split = as_read(subject, settings.fit_tokens).fit
    if settings.fit_tokens == "sampled":
        return split
    return split.with_examples(tokens_read(subject, split, "all", settings))


def announce_ranks(subject: Subject, solutions: Mapping[int, Solution]) -> None:
    """Prints where a fit was not determined by its data, and where there is little of it."""
    for layer, solution in solutions.items():
        if int(solution.rank) < solution.weights.shape[0]:
            subject.announce(f"layer {layer}: {solution.describe()}")
    width, n = next((s.weights.shape[0], s.n) for s in solutions.values())
    if width <= n < _FEW * width:
        subject.announce(
            f"{n} tokens are few to fit {width} dimensions on: maps get better with more text, or "
            "where all tokens are fitted on (fit_tokens=all)"
        )


def _route(subject: Subject, settings: FitSettings, pairs: Sequence[Pair]) -> str:
    """Returns the route of the settings, or for `auto` the better one, and prints it
    with the reason.
    """
    if settings.solver != "qr":
        subject.announce(f"route memory, which solver {settings.solver} needs")
        return "memory"
    if settings.route != "auto":
        subject.announce(f"route {settings.route}, as asked for")
        return settings.route
    split, config = subject.examples.fit, subject.model.config
    if settings.fit_tokens == "sampled":
        count = split.num_examples
    else:
        count = int(np.count_nonzero(tokens_read(subject, split, "all", settings)))
    sites = len(_sites(pairs, config.layers))
    activations = memory_of_activations(count, config.width, sites - 1)
    # every device has sums of its own
    sources = len({source for source, _ in pairs})
    moments = jax.local_device_count() * moments_bytes(config.width, sources, len(pairs), sites)
    route, why = choose_route(activations, moments)
    subject.announce(f"route {route}: {why}")
    return route
