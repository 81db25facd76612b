"""Rotary position embedding (RoPE; Su et al. 2021) and the ways in use to stretch it to
longer texts.
"""

import dataclasses
import math
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jmat.models.config import Rotary
from jmat.models.config_reader import TINY, ConfigReader, is_number
from jmat.runtime.annotations import Fields
from jmat.runtime.errors import shortened

_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
_NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
# What `rope_scaling` or `rope_parameters` may hold; a kind ignores what only others use.
_WORDS = {"rope_type": str, "type": str, "truncate": bool}
_NUMBERS = frozenset(
    """
    rope_theta factor original_max_position_embeddings low_freq_factor high_freq_factor beta_fast
    beta_slow attention_factor mscale mscale_all_dim partial_rotary_factor
    """.split()
)


def rotate(
    x: Float[Array, "B T H K"], positions: Int[Array, "B T"], rotary: Rotary
) -> Float[Array, "B T H K"]:
    """Turns coordinates (c, c + R/2) of the first R of K by `position · frequency[c]`,
    in float32.
    """
    frequency = frequencies(rotary)
    half = len(frequency)
    angle = positions[:, :, None, None].astype(jnp.float32) * frequency
    cos, sin = rotary.amplitude * jnp.cos(angle), rotary.amplitude * jnp.sin(angle)
    wide = x.astype(jnp.float32)
    a, b, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1).astype(x.dtype)


def frequencies(rotary: Rotary) -> Float[np.ndarray, " pairs"]:
    """Returns the radians by which each pair turns from one position to the next:
    `theta^(−2c/R)`, scaled.

    `linear` slows every pair by `factor`. `llama3` (Llama 3.1) and `yarn` (Peng et al.
    2023, section 3.2) slow pairs that turn rarely, leave those that turn often, and
    ramp in between: llama3 over the number of turns, yarn over the index of the pair.
    """
    R, factor = rotary.width, np.float32(rotary.factor)
    exponent = np.arange(0, R, 2, dtype=np.float32) / np.float32(R)
    # The power is rounded once; its reciprocal is taken in float32, as transformers does.
    plain = np.float32(1) / (np.float64(rotary.theta) ** exponent.astype(np.float64)).astype(
        np.float32
    )
    if rotary.kind == "linear":
        return plain / factor
    if rotary.kind == "llama3":
        turns = rotary.trained_positions * plain / np.float32(2 * math.pi)
        keep = (turns - rotary.slow_turns) / (rotary.fast_turns - rotary.slow_turns)
    elif rotary.kind == "yarn":
        first, last = (
            _pair_that_turns(rotary, rotary.fast_turns),
            _pair_that_turns(rotary, rotary.slow_turns),
        )
        if rotary.whole_pairs:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, R - 1)
        keep = 1 - (np.arange(len(plain)) - first) / ((last - first) or 1e-3)
    else:
        return plain
    keep = np.clip(keep, 0, 1).astype(np.float32)
    return (1 - keep) * (plain / factor) + keep * plain


def _pair_that_turns(rotary: Rotary, turns: float) -> float:
    """Returns the index (not whole) of the pair that turns so often over
    `trained_positions`.
    """
    return (
        rotary.width
        * math.log(rotary.trained_positions / (2 * math.pi * turns))
        / (2 * math.log(rotary.theta))
    )


def read_rotary(
    read: ConfigReader,
    head_width: int,
    num_positions: int,
    *,
    theta: float | None = None,
    fraction: float = 1.0,
) -> Rotary:
    """Reads `rope_parameters`, or the older `rope_theta` and `rope_scaling`; notes what
    is not implemented, by name.

    Args:
      read: the config.json.
      head_width: K.
      num_positions: what `original_max_position_embeddings` defaults to.
      theta: where the parameters give none; by default `rope_theta`.
      fraction: of a head's coordinates that are turned, where the parameters do not
        say.
    """
    theta = read.number("rope_theta", 10000.0) if theta is None else theta
    scaling = _scaling(read)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    read.require(
        kind in _KINDS,
        f"rope_type={shortened(kind)} is not implemented (implemented: {', '.join(_KINDS)})",
    )
    width = int(head_width * scaling.get("partial_rotary_factor", fraction))
    paired = width + width % 2
    read.require(
        0 < paired <= head_width,
        f"rotary parameters turn {paired} of a head's {head_width} coordinates",
    )
    theta = scaling.get("rope_theta", theta)
    least = "above 1" if kind == "yarn" else "at least 1"  # YaRN divides by its logarithm
    read.require(
        theta > 1 or (theta == 1 and kind != "yarn"), f"rope_theta={theta!r} should be {least}"
    )
    plain = Rotary(width=width, theta=theta)
    trained = int(scaling.get("original_max_position_embeddings", num_positions))
    given = {"factor": num_positions / trained, **scaling} if kind == "yarn" else scaling
    missing = [name for name in _NEEDED.get(kind, ()) if name not in given]
    read.require(not missing, f"rope_type={kind!r} needs {' and '.join(missing)}")
    # `dynamic` changes nothing up to max_position_embeddings, and longer texts are refused.
    if missing or kind not in _NEEDED:
        return plain
    plain = dataclasses.replace(plain, kind=kind, factor=given["factor"], trained_positions=trained)
    if kind == "llama3":
        slow, fast = given["low_freq_factor"], given["high_freq_factor"]
        read.require(
            slow < fast, f"low_freq_factor={slow!r} should be below high_freq_factor={fast!r}"
        )
        return dataclasses.replace(
            plain, slow_turns=given["low_freq_factor"], fast_turns=given["high_freq_factor"]
        )
    if kind == "yarn":
        return dataclasses.replace(
            plain,
            slow_turns=given.get("beta_slow", 1.0),
            fast_turns=given.get("beta_fast", 32.0),
            whole_pairs=given.get("truncate", True),
            amplitude=_yarn_amplitude(given),
        )
    return plain


def _scaling(read: ConfigReader) -> Fields:
    old, new = read.get("rope_scaling", {}), read.get("rope_parameters", {})
    scaling = old or new
    if not isinstance(scaling, Mapping) or any(
        isinstance(value, Mapping) for value in scaling.values()
    ):
        shown = shortened(scaling)
        read.require(
            False,
            f"rotary parameters {shown} are not implemented (implemented: one flat set of fields)",
        )
        return {}
    unknown = sorted(map(str, set(scaling) - _NUMBERS - _WORDS.keys()))
    read.require(
        not unknown, f"rotary parameters {shortened(', '.join(unknown))} are not implemented"
    )
    given = {
        name: value for name, value in scaling.items() if value is not None and name not in unknown
    }
    for name, kind in _WORDS.items():
        if name in given and not isinstance(given[name], kind):
            expected = "true or false" if kind is bool else "text"
            read.require(
                False, f"rotary parameter {name}={shortened(given.pop(name))} should be {expected}"
            )
    bad = [
        name
        for name in sorted(_NUMBERS & given.keys())
        if not (is_number(given[name]) and given[name] >= TINY)
    ]
    read.require(
        not bad, f"rotary parameters {', '.join(bad)} should be numbers above 0, in float32"
    )
    return {
        name: float(value) if name in _NUMBERS else value
        for name, value in given.items()
        if name not in bad
    }


def _yarn_amplitude(given: Fields) -> float:
    """Returns YaRN's `0.1 ln(factor) + 1` (section 3.4), or what the file says instead."""

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(given["factor"]) + 1 if given["factor"] > 1 else 1.0

    if "attention_factor" in given:
        return given["attention_factor"]
    if given.get("mscale") and given.get("mscale_all_dim"):
        return grown(given["mscale"]) / grown(given["mscale_all_dim"])
    return grown(1.0)
