"""The Jacobian lens: a map whose weights are the mean derivative of a later stream by
an earlier one, with its error.

`lens(h) = head(norm(h Jᵀ))`, with J the mean over prompts of
`jmat.capture.pullback`. A map to compare with others has the bias `ȳ − x̄ Jᵀ`, too:
without it the lens is off wherever the streams' means are not zero.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Unpack

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy import ndarray

from jmat.capture.jacobians import JacobianSums, Pass, jacobian_sums, relative_error
from jmat.data.batches import Batch
from jmat.data.encoding import Tokenizer
from jmat.data.examples import Split
from jmat.data.reading import every_token
from jmat.maps.regression import Regression
from jmat.maps.types import Linear
from jmat.metrics.bootstrap import bootstrap_counts, percentiles
from jmat.models.family import Transformer, check_model

ERROR = 0.05  # relative, at which a pass ends where no other is asked for


@dataclasses.dataclass(frozen=True, eq=False)
class Jacobian:
    """Holds the mean Jacobian of a target by a source, float64, and what its error is
    read off.

    Attributes:
      source: site.
      target: site.
      matrix: J; row i is the derivative of the target's coordinate i.
      squares: squared norm of each prompt's Jacobian.
      sketches: of each prompt's Jacobian; their products estimate those of the
        Jacobians.
      source_mean: x̄, over prompts and the positions that count.
      target_mean: ȳ.
    """

    source: str
    target: str
    matrix: Float[ndarray, "E W"]
    squares: Float[ndarray, " n"]
    sketches: Float[ndarray, "n m"]
    source_mean: Float[ndarray, " W"]
    target_mean: Float[ndarray, " E"]

    def __repr__(self) -> str:
        low, high = self.interval
        return (
            f"Jacobian of {self.target} by {self.source}: {self.prompts} prompts, relative error "
            f"{self.error:.3f} [{low:.3f}, {high:.3f}], identity share {self.identity_share:.2f}"
            if self.is_square
            else f"Jacobian of {self.target} by {self.source}: {self.prompts} prompts, relative "
            f"error {self.error:.3f} [{low:.3f}, {high:.3f}]"
        )

    @property
    def prompts(self) -> int:
        """Returns the number of prompts n."""
        return len(self.squares)

    @functools.cached_property
    def square(self) -> float:
        """Returns ‖J‖²."""
        return float(np.square(self.matrix).sum())

    @property
    def error(self) -> float:
        """Returns `√(V / n) / ‖J‖`, with V the variance of one prompt's Jacobian: how
        far J is from that of endless text, relative to its norm.
        """
        return relative_error(self.square * self.prompts**2, self.squares)

    @functools.cached_property
    def interval(self) -> tuple[float, float]:
        """Returns (low, high): between them lies, in 95 % of cases, the distance of J
        from that of endless text, over the norm of J.

        A bootstrap over prompts of the distance and, by other draws, of V. NaN for
        equal prompts.
        """
        n = self.prompts
        drawn, others = np.split(bootstrap_counts(n, samples=2000), 2)
        centred = self.sketches - self.sketches.mean(0)
        distance = np.square((drawn / n) @ centred).sum(1)
        spread = self.squares - 2 * self.sketches @ self.sketches.mean(0)
        spread = np.maximum(spread - spread.mean() + n * self.error**2 * self.square, 0)
        with np.errstate(all="ignore"):
            factor = distance / distance.mean() * ((others / n) @ spread) / spread.mean()
        return percentiles(self.error * np.sqrt(factor), drawn)

    @property
    def is_square(self) -> bool:
        """Returns whether source and target are equally wide."""
        return self.matrix.shape[0] == self.matrix.shape[1]

    @property
    def alpha(self) -> float:
        """Returns `α = tr J / D`: the multiple of the identity nearest to J."""
        return float(np.trace(self.matrix)) / len(self.matrix)

    @property
    def identity_share(self) -> float:
        """Returns `D α² / ‖J‖²`: the share of J's energy that lies in αI."""
        return len(self.matrix) * self.alpha**2 / self.square

    @property
    def without_identity(self) -> Float[ndarray, "E W"]:
        """Returns `J − αI`, whose spectrum says what J does besides passing on."""
        return self.matrix - self.alpha * np.eye(*self.matrix.shape)

    def shrinkage(self, closed_form: Float[Array | ndarray, "W E"]) -> float:
        """Returns `λ = min(1, (V / n) / ‖B − J‖²)`, with B the transposed weights of a
        closed form.

        J has an error, which grows as text gets scarce; so far it is pulled to B.
        """
        distance = float(np.square(np.asarray(closed_form, np.float64).T - self.matrix).sum())
        noise = self.error**2 * self.square
        return 1.0 if distance <= noise else noise / distance

    def map(self, *, bias: bool = True) -> Linear:
        """Returns the lens `y = x Jᵀ (+ ȳ − x̄ Jᵀ)`, float32."""
        return self._map(self.matrix.T, bias)

    def shrunk(self, closed_form: Float[Array | ndarray, "W E"]) -> Linear:
        """Returns the lens of `J + λ (B − J)` with its bias, with λ of `shrinkage`."""
        share = self.shrinkage(closed_form)
        W = self.matrix.T + share * (np.asarray(closed_form, np.float64) - self.matrix.T)
        return self._map(W, bias=True)

    def _map(self, W: Float[ndarray, "W E"], bias: bool) -> Linear:
        b = jnp.asarray((self.target_mean - self.source_mean @ W).astype(np.float32))
        return Linear(jnp.asarray(W.astype(np.float32)), b if bias else None)


def mean_jacobians(
    model: Transformer,
    inputs: Sequence[str] | Split | Batch,
    sources: Sequence[str],
    target: str,
    *,
    tokenizer: Tokenizer | None = None,
    error: float | int = ERROR,
    **settings: Unpack[Pass],
) -> dict[str, Jacobian]:
    """Returns the mean Jacobian of a target by each of several sources.

    In a causal model the derivatives of all tokens from p on count for position p; in a
    masked one those of all tokens of the text, which it reads unmasked.

    Args:
      model: as `jmat.load` returns it.
      inputs: the texts, each a prompt; of a split or a batch, its texts.
      sources: sites before the target: `embed`, streams, parts of blocks.
      target: such a site.
      tokenizer: reads texts.
      error: relative error of every source at which the pass ends; 0: at the end of the
        text.
      settings: `max_tokens`, `skip_first`, `rows`, `fewest`, `seed`, `devices`, `snapshots`
        and `progress` of `jmat.capture.jacobians.jacobian_sums`.

    Raises:
      ValueError: as `jacobian_sums`.

    Examples:
      >>> import jmat
      >>> from jmat.maps.jacobian import mean_jacobians
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> texts = [f"Entry {i} holds a list of {i % 7} values." * 3 for i in range(4)]
      >>> found = mean_jacobians(model, texts, ["block.5"], "block.7", tokenizer=tokenizer)
      >>> found["block.5"].prompts, found["block.5"].matrix.shape
      (4, (192, 192))
    """
    check_model(model)
    split = every_token(inputs, tokenizer)
    sums = jacobian_sums(model, split, sources, target, error=error, **settings)
    return {source: _estimate(sums, source, target) for source in sources}


def _estimate(sums: JacobianSums, source: str, target: str) -> Jacobian:
    n = sums.prompts
    return Jacobian(
        source,
        target,
        sums.total[source] / n,
        sums.squares[source],
        sums.sketches[source],
        sums.means[source] / n,
        sums.means[target] / n,
    )


# --- kinds of maps --------------------------------------------------------------------------------


def lens(found: Jacobian, pair: Regression) -> Linear:
    """Returns the Jacobian lens with its bias."""
    return found.map()


def lens_without_bias(found: Jacobian, pair: Regression) -> Linear:
    """Returns the Jacobian lens as it was published, without a bias."""
    return found.map(bias=False)


def shrunk_lens(found: Jacobian, pair: Regression) -> Linear:
    """Returns the Jacobian lens, pulled to the affine map of a pair as far as its error
    says.
    """
    return found.shrunk(pair.affine)
