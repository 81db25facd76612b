"""Fits a linear map between two layers, or any two sites, on texts: the project's core task in one call."""

import dataclasses
from collections.abc import Sequence

from jmat.capture.activations import capture
from jmat.capture.reading import mask_token_of, predictions_in
from jmat.data.batches import Batch
from jmat.data.encoding import Tokenizer
from jmat.data.examples import Split, mask_positions
from jmat.data.reading import every_token
from jmat.maps.least_squares import Solution, lstsq
from jmat.maps.types import Linear
from jmat.models.family import Transformer, check_model
from jmat.models.sites import check_names, stream_sites, width
from jmat.runtime.checks import check_choice

TOKENS = ("predicted", "all")


@dataclasses.dataclass(frozen=True, eq=False)
class Fit:
    """Holds a map and the statistics of its fit.

    Attributes:
      map: `y = x @ weights (+ bias)`.
      solution: rank, condition number and number of tokens of the fit.
      source: site that the map reads.
      target: site that it predicts.
    """

    map: Linear
    solution: Solution
    source: str
    target: str

    def __repr__(self) -> str:
        return f"Linear map from {self.source} to {self.target}: {self.solution.describe()}"


def fit_map(
    model: Transformer,
    inputs: Sequence[str] | Split | Batch,
    source: int | str,
    target: int | str,
    *,
    tokenizer: Tokenizer | None = None,
    tokens: str = "predicted",
    seed: int = 0,
    intercept: bool = False,
    progress: str | None = None,
) -> Fit:
    """Fits the linear map that predicts one site from another best, by least squares
    (QR).

    Args:
      model: as `jmat.load` returns it.
      inputs: texts, a batch, or a `Split` with the positions to fit on. Expect to need
        several times as many positions as the model is wide.
      source: layer number l for the stream h_l (0: the embedding), or the name of a
        site.
      target: likewise; L is the last layer.
      tokenizer: reads texts; masked models need it.
      tokens: which tokens of texts are fitted on. `predicted`: those at which the model
        predicts, as in `jmat.evaluate`: every token for a causal model; for a masked
        one, one of each text under its mask, drawn by `seed`. `all`: every token,
        unmasked.
      seed: draws the masked positions.
      intercept: fit `y = x @ W + b` instead of `y = x @ W`.
      progress: label of the progress bar; by default none is shown.

    Raises:
      ValueError: a layer or site that the model does not have, or a site such as
        `attn.q` that has more than a vector at a token; as `jmat.capture`.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> texts = [f"Entry {i} holds a list of {i % 7} values." for i in range(40)]
      >>> fit = jmat.fit_map(model, texts, source=1, target=8, tokenizer=tokenizer)
      >>> x, _ = jmat.run(model, jmat.encode(tokenizer, texts[:2]), sites=jmat.Shortcut(1, 8, fit.map))
    """
    check_model(model)
    sites = [_site(name, model) for name in (source, target)]
    for site in sites:
        width(site, model.config)
    split = _positions(model, inputs, tokenizer, tokens, seed)
    acts = capture(model, split, dict.fromkeys(sites), progress=progress)
    solution = lstsq(acts[sites[0]], acts[sites[1]], intercept=intercept)
    return Fit(Linear(solution.weights, solution.bias), solution, *sites)


def _positions(
    model: Transformer, inputs: Sequence[str] | Split | Batch, tokenizer: Tokenizer | None, tokens: str, seed: int
) -> Split:
    """Returns the sentences with the positions to fit on, masked where the model predicts under a mask."""
    check_choice("tokens", tokens, TOKENS)
    if tokens == "all":
        return every_token(inputs, tokenizer)
    return mask_positions(predictions_in(model, inputs, tokenizer, seed=seed), mask_token_of(model, tokenizer))


def _site(name: int | str, model: Transformer) -> str:
    """Returns the site of a layer, or the name itself."""
    if isinstance(name, str):
        check_names([name], model.config, replace=False)
        return name
    if not 0 <= name <= model.config.layers:
        raise ValueError(f"layer {name} is not one of 0 .. {model.config.layers}, the layers of this model.")
    return stream_sites(model.config.layers)[name]
