"""Costs of a map: its parameters, its memory, and its work for one token."""

import dataclasses
import math

import jax
import numpy as np

from jmat.maps.compact import Hadamard, Map, is_quantised, rotation_flops
from jmat.maps.types import Constant


@dataclasses.dataclass(frozen=True)
class MapCost:
    """Holds what a map costs.

    Attributes:
      parameters: numbers that the map holds; the scales of int8 rows are none.
      bytes: of its arrays as they are.
      flops: floating-point operations for one token; a multiply-add is two.
    """

    parameters: int
    bytes: int
    flops: int


def map_cost(stand_in: Map) -> MapCost:
    """Returns what a map costs.

    A matrix takes two operations a weight, a vector one a coordinate, a rotation what
    `jmat.maps.compact.rotation_flops` says. The few of an activation are left out.
    """
    leaves = jax.tree.leaves(stand_in, is_leaf=is_quantised)
    sizes = [(len(leaf.shape), math.prod(leaf.shape)) for leaf in leaves]
    flops = sum(size * (2 if axes == 2 else 1) for axes, size in sizes)
    if isinstance(stand_in, Constant):
        flops = 0
    if isinstance(stand_in, Hadamard):
        flops += 2 * rotation_flops(len(stand_in.s))
    held = sum(
        np.dtype(leaf.dtype).itemsize * math.prod(leaf.shape) for leaf in jax.tree.leaves(stand_in)
    )
    return MapCost(sum(size for _, size in sizes), held, flops)
