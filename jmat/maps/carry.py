"""Carries: maps to the final stream of a token from a lower stream of that token and from
streams of the token before it.

A model that writes has computed h_L of each token but the last one. A map from h_k alone
leaves that out; a carry takes it: `h_L[t+1] ≈ h_k[t+1] W + h_L[t] U (+ h_k[t] V) + b`. It
is least squares over stacked inputs, in closed form, like any other affine map.

Where several tokens are drafted in a row, h_L[t] is exact for the first of them, and what
the map itself predicted for the others; h_k is exact for all. `rounds` above 1 fits the
map to such states, too.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpy import ndarray

from jmat.capture.activations import capture
from jmat.capture.moments import merge
from jmat.data.batches import Batch
from jmat.data.encoding import Tokenizer
from jmat.data.examples import Split
from jmat.data.reading import every_token
from jmat.maps.regression import Regression, pair_moments
from jmat.maps.solution import Solution
from jmat.models.cache import check_causal
from jmat.models.family import Transformer, check_model
from jmat.models.sites import stream_sites
from jmat.runtime.annotations import Leaf
from jmat.runtime.checks import check_choice, check_whole, whole
from jmat.runtime.pytrees import register_dataclass

BOTH, FINAL = "both", "final"


@register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Carry:
    """Computes `y = x @ W + final @ U (+ before @ V) + bias`, in the dtype of x.

    Attributes:
      W: [D, D], of the stream x = h_k[t+1].
      U: [D, D], of the final stream of the token before it, h_L[t].
      bias: [D].
      V: [D, D], of the stream of the token before it, h_k[t]; None: it is left out.
    """

    W: Leaf[Array | ndarray]
    U: Leaf[Array | ndarray]
    bias: Leaf[Array | ndarray]
    V: Leaf[Array | ndarray | None] = None

    def __call__(
        self,
        x: Float[Array | ndarray, "*batch D"],
        final: Float[Array | ndarray, "*batch D"],
        before: Float[Array | ndarray, "*batch D"],
    ) -> Float[Array, "*batch D"]:
        """Returns what the map takes h_L to be, from h_k, and from h_L and h_k of the
        token before.
        """
        parts = [(x, self.W), (final, self.U)] + ([] if self.V is None else [(before, self.V)])
        sums = [jnp.matmul(value, W.astype(value.dtype)) for value, W in parts]
        return functools.reduce(jnp.add, sums) + jnp.asarray(self.bias).astype(x.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class CarryFit:
    """Holds a carry and the statistics of its fit.

    Attributes:
      map: to be given to `jmat.Draft`.
      solution: rank, condition number and number of pairs of tokens of the fit; with
        several rounds, a pair counts once for each state that it was fitted with.
      layer: k, of the stream that the map reads.
      rounds: how often the map was solved for.
    """

    map: Carry
    solution: Solution
    layer: int
    rounds: int

    def __repr__(self) -> str:
        return f"Carry from layer {self.layer} to the last one: {self.solution.describe()}"


def fit_carry(
    model: Transformer,
    inputs: Sequence[str] | Split | Batch,
    layer: int,
    *,
    tokenizer: Tokenizer | None = None,
    earlier: str = BOTH,
    rounds: int = 1,
    progress: str | None = None,
) -> CarryFit:
    """Fits the affine map that predicts the final stream of a token best from the stream
    of a layer, and from streams of the token before it.

    All tokens of each text but the first are fitted on; a text's first token has none
    before it. Sums of products are in float64.

    Args:
      model: as `jmat.load` returns it; a causal one.
      inputs: texts, a batch or a `Split`, whose texts are read whole. Expect to need
        several times as many tokens as three times the model's width.
      layer: k, 1 .. L − 1.
      tokenizer: reads texts.
      earlier: the streams of the token before: `both`, h_L and h_k; or `final`, h_L
        alone.
      rounds: 1 fits the map to exact streams. Each round more drafts one token more with
        the map that was found, adds the pairs in which h_L of the token before is what
        the map makes of it, and solves again.
      progress: label of the progress bar; by default none is shown.

    Raises:
      ValueError: a masked model; a layer that is none of 1 .. L − 1; no text of two
        tokens; numbers out of range; as `jmat.capture`.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> texts = [f"Entry {i} holds a list of {i % 7} values." for i in range(40)]
      >>> fit = jmat.fit_carry(model, texts, layer=2, tokenizer=tokenizer)
      >>> draft = jmat.Draft(2, fit.map, tokens=2)
      >>> written = jmat.generate(
      ...     model, "Return a new", tokenizer=tokenizer, max_new_tokens=8, draft=draft
      ... )
    """
    check_model(model)
    check_causal(model.config)
    L = model.config.layers
    layer = whole("layer", layer)
    if not 1 <= layer < L:
        raise ValueError(f"a carry from layer {layer}: expected 1 to {L - 1}.")
    check_choice("earlier", earlier, (BOTH, FINAL))
    check_whole("rounds", rounds, 1)
    split = every_token(inputs, tokenizer)
    split = split.with_examples(np.ones(len(split.tokens), bool))
    later = np.flatnonzero(split.positions > 0)
    if not later.size:
        raise ValueError("no text has two tokens, of which a carry predicts the second.")
    sites = [stream_sites(L)[end] for end in (layer, L)]
    acts = capture(model, split, sites, progress=progress)
    stream, final = (acts[site] for site in sites)
    pair, stand_in = solve_carry(stream, final, later, both=earlier == BOTH, rounds=rounds)
    return CarryFit(stand_in, pair.solution(), layer, rounds)


def solve_carry(
    stream: Float[ndarray, "N D"],
    final: Float[ndarray, "N D"],
    later: Int[ndarray, " M"],
    *,
    both: bool = True,
    rounds: int = 1,
) -> tuple[Regression, Carry]:
    """Returns the regression of the last round and its map.

    Args:
      stream: h_k of all tokens, text behind text.
      final: h_L of them.
      later: the tokens that have one before them in their text.
      both: whether h_k of the token before is an input, too.
      rounds: how often to solve.
    """

    def inputs(state: Float[ndarray, "N D"]) -> Float[ndarray, "M F"]:
        """Returns the inputs of later tokens, with what is known of h_L."""
        parts = (stream[later], state[later - 1], *([stream[later - 1]] if both else []))
        return np.concatenate(parts, axis=1)

    target = final[later]
    exact = total = pair_moments(inputs(final), target)
    for number in range(rounds):
        pair = Regression(total)
        pair.check()
        weights = np.asarray(pair.affine, np.float32)
        bias = np.asarray(pair.bias(pair.affine), np.float32)
        total, state = exact, final
        for _ in range(number + 1 if number + 1 < rounds else 0):
            drafted = np.array(final)  # exact for the first token of a text
            drafted[later] = inputs(state) @ weights + bias
            state = drafted
            total = merge(total, pair_moments(inputs(state), target))
    W, U, *V = (jnp.asarray(part) for part in np.split(weights, 3 if both else 2))
    return pair, Carry(W, U, jnp.asarray(bias), *V)
