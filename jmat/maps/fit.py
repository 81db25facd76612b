"""Fits a linear map between two layers, or any two sites, on texts: the project's core task in one call."""

import dataclasses
from collections.abc import Sequence

from jmat.capture.activations import capture
from jmat.data.batches import Batch
from jmat.data.encoding import Tokenizer
from jmat.data.examples import Split
from jmat.maps.least_squares import Solution, lstsq
from jmat.maps.types import Linear
from jmat.models.family import Transformer
from jmat.models.sites import stream_sites


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
    intercept: bool = False,
    progress: str | None = None,
) -> Fit:
    """Fits the linear map that predicts one site from another best, by least squares (QR).

    Args:
      model: as `jmat.load` returns it.
      inputs: texts or a batch, of which every token is fitted on; or a `Split`, of which the
        examples are. Expect to need several times as many tokens as the model is wide.
      source: layer number l for the stream h_l (0: the embedding), or the name of a site.
      target: likewise; L is the last layer.
      tokenizer: reads texts.
      intercept: fit `y = x @ W + b` instead of `y = x @ W`.
      progress: label of the progress bar; by default none is shown.

    Raises:
      ValueError: a layer or site that the model does not have; as `jmat.capture`.

    Example:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> texts = [f"The function number {i} returns a list of {i % 7} values." for i in range(100)]
      >>> fit = jmat.fit_map(model, texts, source=1, target=8, tokenizer=tokenizer)
      >>> x, _ = jmat.run(model, jmat.encode(tokenizer, texts[:2]), sites=jmat.Shortcut(1, 8, fit.map))
    """
    sites = [_site(name, model) for name in (source, target)]
    acts = capture(model, inputs, dict.fromkeys(sites), tokenizer=tokenizer, progress=progress)
    solution = lstsq(acts[sites[0]], acts[sites[1]], intercept=intercept)
    return Fit(Linear(solution.weights, solution.bias), solution, *sites)


def _site(name: int | str, model: Transformer) -> str:
    """Returns the site of a layer, or the name itself."""
    if isinstance(name, str):
        return name
    if not 0 <= name <= model.config.layers:
        raise ValueError(f"layer {name} is not one of 0 .. {model.config.layers}, the layers of this model.")
    return stream_sites(model.config.layers)[name]
