"""Reads mean Jacobians of the targets of jumps for kinds of maps that are derived from
them.
"""

import time
from collections.abc import Mapping, Sequence

from jmat.maps.jacobian import Jacobian, mean_jacobians
from jmat.maps.kinds import Kind
from jmat.models.sites import stream_sites
from jmat.report.notes import estimate
from jmat.report.rows import Row
from jmat.studies.fitting import FitSettings, snapshots
from jmat.studies.map_zoo.fits import Jacobians
from jmat.studies.map_zoo.jumps import Jump
from jmat.studies.settings import Subject


def read_jacobians(
    subject: Subject, settings: FitSettings, kinds: Sequence[Kind], jumps: Sequence[Jump]
) -> tuple[dict[float, dict[Jump, Jacobian]], dict[str, float]]:
    """Returns the mean Jacobian of every jump, by wanted error; and the seconds that
    each kind takes for one jump, those of compiling included.

    One pass serves all jumps to one layer, and all kinds that want one error. The
    sentences to fit on are its prompts, read whole and unmasked.

    Raises ValueError where too few sentences are long enough.
    """
    read: dict[float, dict[Jump, Jacobian]] = {}
    taken: dict[str, float] = {}
    for kind in kinds:
        error = kind.wanted_error
        if kind.entry.derive is None:
            continue
        if error not in read:
            began = time.perf_counter()
            read[error] = {}
            for target in dict.fromkeys(jump.target for jump in jumps):
                to_target = [jump for jump in jumps if jump.target == target]
                read[error] |= _one_pass(subject, settings, error, to_target)
            seconds = (time.perf_counter() - began) / len(jumps)
            _announce(subject, error, read[error])
        taken[str(kind)] = seconds
    return read, taken


def _one_pass(
    subject: Subject, settings: FitSettings, error: float, jumps: Sequence[Jump]
) -> dict[Jump, Jacobian]:
    """Returns the mean Jacobians of jumps to one layer."""
    target = jumps[0].target
    is_final = target == stream_sites(subject.model.config.layers)[-1]
    name = f"jacobian-{error}" + ("" if is_final else f"-{target}")
    words = "" if is_final else f" of layer {jumps[0].end}"
    found = mean_jacobians(
        subject.model,
        subject.examples.fit,
        [jump.source for jump in jumps],
        target,
        error=error,
        seed=settings.seed,
        snapshots=snapshots(subject, settings, name),
        progress=subject.bar(f"derive{words}, until the error is {error:g}"),
    )
    return {jump: found[jump.source] for jump in jumps}


def _announce(subject: Subject, error: float, found: Mapping[Jump, Jacobian]) -> None:
    """Prints how exact the Jacobians are, and where the text was too short."""
    jump, worst = max(found.items(), key=lambda each: each[1].error)
    low, high = worst.interval
    words = f"relative error {worst.error:.3f} [{low:.3f}, {high:.3f}] at layer {jump.layer}"
    short = f", above {error:g}: there is no more text" if worst.error > error > 0 else ""
    subject.announce(f"Jacobians of {worst.prompts} prompts: {words}{short}")


def jacobian_rows(jacobians: Jacobians, kinds: Sequence[Kind]) -> list[Row]:
    """Returns rows of the relative error and of the identity share of each Jacobian, by
    kind and jump; n counts prompts.
    """
    rows: list[Row] = []
    for kind in kinds:
        if kind.entry.derive is None or kind.int8:
            continue
        for jump, found in jacobians[kind.wanted_error].items():
            label = {"map": str(kind), **jump.label, "n": found.prompts}
            fields = {
                "relative_error": estimate(found.error, *found.interval),
                "identity_share": {"value": found.identity_share},
            }
            rows += [{**label, "metric": metric, **field} for metric, field in fields.items()]
    return rows
