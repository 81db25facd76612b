"""Holds what a least-squares fit finds: weights, and how well the data determine them."""

import dataclasses
import functools

import numpy as np
from jaxtyping import Array

from jmat.runtime.annotations import Leaf
from jmat.runtime.pytrees import register_dataclass


@functools.partial(
    register_dataclass,
    data_fields=["weights", "bias", "rank", "condition", "residual"],
    meta_fields=["n", "ridge"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Solution:
    """Holds the map `y = x @ weights (+ bias)` with the statistics of its fit.

    Attributes:
      weights: [D, R].
      bias: [R], or None without an intercept.
      rank: of X (centred, if there is an intercept), as the solver judged it; int32
        scalar.
      condition: largest over smallest singular value of X that counts; 1 where none
        does.
      residual: [R], the sum over examples of `(Y − prediction)²`, from the predictions
        themselves; None if it was not asked for.
      n: number of examples.
      ridge: the penalty.
    """

    weights: Leaf[Array | np.ndarray]
    bias: Leaf[Array | np.ndarray | None]
    rank: Leaf[Array | np.ndarray]
    condition: Leaf[Array | np.ndarray | None]
    residual: Leaf[Array | np.ndarray | None]
    n: int
    ridge: float

    def describe(self) -> str:
        """Returns one sentence on how well X determines the map, and what was done if
        it does not.
        """
        rank, dimensions = int(self.rank), self.weights.shape[0]
        if rank == dimensions:
            number = (
                "" if self.condition is None else f", condition number {float(self.condition):.1e}"
            )
            return f"full rank {dimensions} from {self.n} examples{number}"
        few = self.n - (self.bias is not None) < dimensions  # a bias takes one example
        cause = "fewer examples than dimensions" if few else "linearly dependent input coordinates"
        remedy = (
            f"ridge {self.ridge:g} makes it unique"
            if self.ridge
            else "the minimum-norm solution is used"
        )
        return f"rank {rank} of {dimensions}: {cause}; {remedy}"
