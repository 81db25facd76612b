"""Fits a map between two layers, or any two sites, on texts: the project's core task in
one call.
"""

import dataclasses
from collections.abc import Sequence

from jmat.capture.activations import capture
from jmat.capture.future import future_sums
from jmat.capture.pullback import check_sites
from jmat.capture.reading import mask_token_of, predictions_in
from jmat.data.batches import Batch
from jmat.data.encoding import Tokenizer
from jmat.data.examples import Split, mask_positions
from jmat.data.reading import every_token
from jmat.maps.compact import Map, quantised
from jmat.maps.jacobian import Jacobian, mean_jacobians
from jmat.maps.kinds import AFFINE, MAT, Kind, derive_kind, fit_kind, parse_kind, train_kind
from jmat.maps.least_squares import lstsq
from jmat.maps.lens import Lesson
from jmat.maps.metric import head_metric
from jmat.maps.plain import SOLVERS, plain_lstsq
from jmat.maps.regression import Regression
from jmat.maps.solution import Solution
from jmat.maps.types import Linear
from jmat.maps.weighting import EQUAL, WEIGHTS, weigh, weighed_moments
from jmat.models.family import Transformer, check_model
from jmat.models.site_names import site_of
from jmat.models.sites import check_names, stream_sites, width
from jmat.runtime.checks import check_choice, check_flag, check_seed, whole

TOKENS = ("predicted", "all")


@dataclasses.dataclass(frozen=True, eq=False)
class Fit:
    """Holds a map and the statistics of its fit.

    Attributes:
      map: `y = x @ weights (+ bias)`, or what the kind makes of it.
      solution: rank, condition number and number of tokens of the fit; of kinds beside
        `mat` and `affine`, those of the affine map from the same tokens.
      source: site that the map reads.
      target: site that it predicts.
      kind: of the map, such as `mat` or `rank:64`.
      jacobian: the mean Jacobian of which a kind is derived, with its error; None for
        other kinds.
    """

    map: Map
    solution: Solution
    source: str
    target: str
    kind: str = MAT
    jacobian: Jacobian | None = None

    def __repr__(self) -> str:
        name = "Linear map" if self.kind == MAT else f"Map {self.kind}"
        if self.jacobian is not None:
            return f"{name}: {self.jacobian!r}"
        return f"{name} from {self.source} to {self.target}: {self.solution.describe()}"


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
    kind: str = MAT,
    solver: str = "qr",
    weights: str = EQUAL,
    progress: str | None = None,
) -> Fit:
    """Fits the map that predicts one site from another best; by default a linear one,
    by least squares (QR).

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
        unmasked. Kinds such as `jacobian` read texts whole, as prompts.
      seed: draws the masked positions, and the order in which a kind is trained, or in
        which prompts are read.
      intercept: fit `y = x @ W + b` instead of `y = x @ W`, as `kind="affine"` does.
      kind: of the map, such as `ridge:1e-2`, `rank:64`, `diag` or `mat+int8`
        (`jmat.maps.kinds`).
      solver: `qr`, or `lstsq` for `jnp.linalg.lstsq(x, y, rcond=0)`, of the kinds
        `mat` and `affine`.
      weights: of the tokens in a closed form: `equal`, `norms` or `cosine`
        (`jmat.maps.weighting`).
      progress: label of the progress bar; by default none is shown.

    Raises:
      ValueError: a layer or site that the model does not have, or a site such as
        `attn.q` that has more than a vector at a token; an unknown kind, or one that
        does not fit the sites; as `jmat.capture`.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> texts = [f"Entry {i} holds a list of {i % 7} values." for i in range(40)]
      >>> fit = jmat.fit_map(model, texts, source=1, target=8, tokenizer=tokenizer)
      >>> shortcut = jmat.Shortcut(1, 8, fit.map)
      >>> batch = jmat.encode(tokenizer, texts[:2])
      >>> x, _ = jmat.run(model, batch, sites=shortcut)
    """
    check_model(model)
    check_seed(seed)
    check_flag("intercept", intercept)
    wanted = parse_kind(kind)
    sites = [_site(name, model) for name in (source, target)]
    _check_kind(wanted, model, sites, intercept, solver)
    _check_weights(weights, wanted, solver)
    found = None
    if wanted.entry.derive is not None:
        found = mean_jacobians(
            model,
            inputs,
            sites[:1],
            sites[1],
            tokenizer=tokenizer,
            error=wanted.wanted_error,
            seed=seed,
            progress=progress,
        )[sites[0]]
    split = _positions(model, inputs, tokenizer, tokens, seed)
    acts = capture(model, split, dict.fromkeys(sites), progress=progress)
    X, Y = (acts[site] for site in sites)
    if wanted.entry.sums_future:
        Y = future_sums(model, split, sites[1], progress=progress)
    fitted = dataclasses.replace(wanted, name=AFFINE) if intercept else wanted
    if fitted.name in (MAT, AFFINE) and weights == EQUAL:
        solve = lstsq if solver == "qr" else plain_lstsq
        solution = solve(X, Y, intercept=fitted.name == AFFINE)
        linear = Linear(solution.weights, solution.bias)
        return Fit(
            quantised(linear) if wanted.int8 else linear, solution, sites[0], sites[1], str(wanted)
        )
    metric = head_metric(model, Y.mean(0)) if wanted.entry.needs_head and wanted.entry.fit else None
    pair = Regression(weighed_moments(X, weigh(weights, X, Y)), metric)
    if found is not None:
        stand_in = derive_kind(wanted, found, pair)
    elif wanted.entry.train is not None:
        stand_in = train_kind(wanted, Lesson(model, X, Y, seed=seed))
    else:
        stand_in = fit_kind(fitted, pair)
    return Fit(stand_in, pair.solution(), sites[0], sites[1], str(wanted), found)


def _check_kind(
    kind: Kind, model: Transformer, sites: Sequence[str], intercept: bool, solver: str
) -> None:
    """Raises ValueError for a kind that two sites cannot have, before anything is read."""
    check_choice("solver", solver, SOLVERS)
    kind.check_width(*(width(site, model.config) for site in sites))
    if intercept and kind.name not in (MAT, AFFINE):
        raise ValueError(f"intercept=True makes {AFFINE} of {MAT}; kind {str(kind)!r} has its own.")
    if solver != "qr" and kind.name not in (MAT, AFFINE):
        raise ValueError(f"solver={solver!r} fits the kinds {MAT} and {AFFINE}, not {str(kind)!r}.")
    if kind.entry.derive is not None:
        check_sites(model.config, sites[:1], sites[1])
    if kind.entry.is_pooled:
        raise ValueError(
            f"kind {str(kind)!r} is one map for all layers: jmat.studies.map_zoo fits it."
        )
    if kind.entry.needs_head and (
        sites[1] != stream_sites(model.config.layers)[-1] or model.head is None
    ):
        raise ValueError(
            f"kind {str(kind)!r} leads to the final stream of a model with a head, not to "
            f"{sites[1]}."
        )


def _check_weights(weights: str, kind: Kind, solver: str) -> None:
    """Raises ValueError for weights that a kind, or a solver, does not have."""
    check_choice("weights", weights, WEIGHTS)
    if weights == EQUAL:
        return
    if solver != "qr":
        raise ValueError(f"weights={weights!r} has a solver of its own: leave out {solver!r}.")
    if kind.entry.fit is None:
        how = "trained" if kind.entry.train else "derived from gradients"
        raise ValueError(f"weights={weights!r} is of closed forms; kind {str(kind)!r} is {how}.")


def _positions(
    model: Transformer,
    inputs: Sequence[str] | Split | Batch,
    tokenizer: Tokenizer | None,
    tokens: str,
    seed: int,
) -> Split:
    """Returns the sentences with the positions to fit on, masked where the model
    predicts under a mask.
    """
    check_choice("tokens", tokens, TOKENS)
    if tokens == "all":
        return every_token(inputs, tokenizer)
    return mask_positions(
        predictions_in(model, inputs, tokenizer, seed=seed), mask_token_of(model, tokenizer)
    )


def _site(name: int | str, model: Transformer) -> str:
    """Returns the site of a layer, or the name itself."""
    if isinstance(name, str):
        site = site_of(name, model.config)
        check_names([site], model.config, replace=False)
        return site
    layer = whole("layer", name)
    if not 0 <= layer <= model.config.layers:
        raise ValueError(
            f"layer {layer} is not one of 0 .. {model.config.layers}, the layers of this model."
        )
    return stream_sites(model.config.layers)[layer]
