"""Reads mean Jacobians of the final layer for kinds of maps that are derived from them."""

import time
from collections.abc import Mapping, Sequence

from jmat.maps.jacobian import Jacobian, mean_jacobians
from jmat.maps.kinds import Kind
from jmat.models.sites import stream_sites
from jmat.report.notes import estimate
from jmat.report.rows import Row
from jmat.studies.fitting import FitSettings, snapshots
from jmat.studies.map_zoo.fits import Jacobians
from jmat.studies.settings import Subject


def read_jacobians(
    subject: Subject, settings: FitSettings, kinds: Sequence[Kind], layers: Sequence[int]
) -> tuple[dict[float, dict[int, Jacobian]], dict[str, float]]:
    """Returns the mean Jacobians of the final layer by others, by wanted error; and the
    seconds that each kind takes for one layer, those of compiling included.

    One pass serves all layers, and all kinds that want one error. The sentences to fit
    on are its prompts, read whole and unmasked.

    Raises ValueError where too few sentences are long enough.
    """
    names = stream_sites(subject.model.config.layers)
    sources, target = [names[layer] for layer in layers], names[-1]
    read: dict[float, dict[int, Jacobian]] = {}
    taken: dict[str, float] = {}
    for kind in kinds:
        error = kind.wanted_error
        if kind.entry.derive is None:
            continue
        if error not in read:
            began = time.perf_counter()
            found = mean_jacobians(
                subject.model,
                subject.examples.fit,
                sources,
                target,
                error=error,
                seed=settings.seed,
                snapshots=snapshots(subject, settings, f"jacobian-{error}"),
                progress=subject.bar(f"derive, until the error is {error:g}"),
            )
            seconds = (time.perf_counter() - began) / len(layers)
            read[error] = {layer: found[site] for layer, site in zip(layers, sources, strict=True)}
            _announce(subject, error, read[error])
        taken[str(kind)] = seconds
    return read, taken


def _announce(subject: Subject, error: float, found: Mapping[int, Jacobian]) -> None:
    """Prints how exact the Jacobians are, and where the text was too short."""
    layer, worst = max(found.items(), key=lambda each: each[1].error)
    low, high = worst.interval
    words = f"relative error {worst.error:.3f} [{low:.3f}, {high:.3f}] at layer {layer}"
    short = f", above {error:g}: there is no more text" if worst.error > error > 0 else ""
    subject.announce(f"Jacobians of {worst.prompts} prompts: {words}{short}")


def jacobian_rows(jacobians: Jacobians, kinds: Sequence[Kind], final: int) -> list[Row]:
    """Returns rows of the relative error and of the identity share of each Jacobian, by
    kind and layer; n counts prompts.
    """
    rows: list[Row] = []
    for kind in kinds:
        if kind.entry.derive is None or kind.int8:
            continue
        for layer, found in jacobians[kind.wanted_error].items():
            label = {"map": str(kind), "layer": layer, "target": final, "n": found.prompts}
            fields = {
                "relative_error": estimate(found.error, *found.interval),
                "identity_share": {"value": found.identity_share},
            }
            rows += [{**label, "metric": metric, **field} for metric, field in fields.items()]
    return rows
