"""Says on what a figure was measured: versions, processor and devices."""

import os
import pathlib
import platform
from collections import Counter

import jax

from jmat.runtime.annotations import Fields
from jmat.runtime.versions import package_version

_PACKAGES = ("jmat", "jax", "jaxlib", "flax", "numpy", "transformers")


def environment() -> Fields:
    """Returns the versions that figures depend on, the processor, and the devices by
    kind.
    """
    versions = {package: package_version(package) for package in _PACKAGES}
    devices = Counter(device.device_kind for device in jax.devices())
    return versions | {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "devices": [f"{count} x {kind}" for kind, count in devices.items()],
    }


def timed_on() -> str:
    """Returns a sentence on which machine a clock is of."""
    machine = environment()
    return (
        f"timed on {machine['cpu']} ({', '.join(machine['devices'])}): another machine's clock "
        "differs"
    )


def _cpu() -> str:
    """Returns the processor's model name and number of cores."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        model = next(
            line.partition(":")[2].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, ValueError, StopIteration):  # not Linux, or not x86
        model = platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} cores"
