"""Measures what pruning costs and saves: perplexity, KL and agreement on held-out text;
parameters, FLOPs, time.

Values are summed sentence by sentence, so that intervals can be bootstrapped over
sentences, the same resamples for every pruned model.
"""

from collections.abc import Collection, Hashable, Mapping
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpy import ndarray

from jmat.capture.reading import text_batches
from jmat.capture.sweep import sweep
from jmat.checkpoint import parameters
from jmat.data.batches import Batch
from jmat.data.examples import check_tokens
from jmat.data.text import Text, following_tokens
from jmat.forward import logits, run
from jmat.maps.types import Linear
from jmat.metrics.bootstrap import bootstrap_counts, bootstrap_ratio
from jmat.metrics.predictions import Predictions, compare, cross_entropy
from jmat.models.family import Transformer
from jmat.models.flops import block_flops, head_flops
from jmat.models.sites import Site, gather, stream_sites
from jmat.report.notes import estimate
from jmat.report.rows import Row
from jmat.runtime.mesh import local_mesh, place, replicate
from jmat.runtime.timing import Work, medians
from jmat.studies.prune.stand_ins import Stretch, first_changed

Key = TypeVar("Key", bound=Hashable)

_TIMED_TOKENS = 1024


class Sums(NamedTuple):
    """Holds sums over a sentence's predictions."""

    predictions: Float[ndarray, " S"]  # how many
    nats: Float[ndarray, " S"]  # −ln p(the text's own token)
    kl: Float[ndarray, " S"]  # KL(whole ‖ pruned), in nats
    agree: Float[ndarray, " S"]  # both models' top token is the same


def compare_on_text(
    model: Transformer,
    text: Text,
    pruned: Mapping[Key, Mapping[str, Site]],
    *,
    tokens_per_batch: int = 4096,
    predictions: Predictions | None = None,
    progress: str | None = None,
) -> dict[Key, Sums]:
    """Holds pruned models, each given by its `sites`, against the whole model on every
    prediction in the text.

    The whole model runs once a batch; each pruned one from its first changed block on.
    `predictions` collects what the whole model predicts, to tell whether that depends
    on the text.
    """
    check_tokens(text.split.tokens, model.config.vocab_size)
    L, mesh = model.config.layers, local_mesh()
    model = place(model, mesh)
    placed = replicate(mesh, [dict(sites) for sites in pruned.values()])

    def compare_batch(given: tuple[Batch, Array]) -> Array:
        batch, targets = given
        streams = list(run(model, batch.tokens, keep=stream_sites(L), **batch.where)[1].values())

        def predict(x: Array) -> Array:
            return logits(model, x if text.targets is None else gather(x, batch.read_at))

        whole = predict(streams[L])
        if predictions is not None:
            predictions.add(whole, targets >= 0)
        values = []
        for sites in placed:
            start = first_changed(sites, L)
            x = (
                run(model, streams[start], start=start, sites=sites, **batch.where)[0]
                if sites
                else streams[L]
            )
            values.append(_sums(whole, predict(x) if sites else whole, targets))
            # no more than two pruned models' scores are in memory
            jax.block_until_ready(values[-2:-1])
        return jnp.stack(values, axis=1)[:, None]  # one example a row

    plan = text_batches(model.config, text, tokens_per_batch, row_multiple=mesh.size)
    inputs = lambda batch: (batch, _targets(batch, text))  # noqa: E731
    values = sweep(plan, compare_batch, inputs=inputs, mesh=mesh, progress=progress).astype(
        np.float64
    )
    if predictions is not None:
        predictions.meet_hosts()
    return {key: Sums(*of_key.T) for key, of_key in zip(pruned, values.swapaxes(0, 1), strict=True)}


def _targets(batch: Batch, text: Text) -> Int[ndarray, "B P"]:
    """Returns the token to predict at each place whose scores are read; −1 where there
    is none.
    """
    if text.targets is None:
        return following_tokens(batch)
    return np.where(batch.examples >= 0, text.targets[batch.examples], -1).astype(np.int32)


@jax.jit
def _sums(
    whole: Float[Array, "B P V"], pruned: Float[Array, "B P V"], targets: Int[Array, "B P"]
) -> Float[Array, "B 4"]:
    V = whole.shape[-1]
    values = compare(whole.reshape(-1, V), pruned.reshape(-1, V), ks=(1,))
    per_token = [
        cross_entropy(pruned, targets),
        *(values[m].reshape(targets.shape) for m in ("kl", "precision@1")),
    ]
    counts = targets >= 0
    summed = [jnp.where(counts, value, 0).sum(1) for value in per_token]
    return jnp.stack([counts.astype(jnp.float32).sum(1), *summed], axis=1)


# --- rows -----------------------------------------------------------------------------------------


def quality_rows(
    sums: Mapping[Key, Sums], labels: Mapping[Key, Row], *, seed: int = 0
) -> list[Row]:
    """Returns `perplexity`, `kl` (nats) and `precision@1` (top-1 agreement) with 95 %
    bootstrap intervals over sentences.

    `n` counts predictions, `sentences` the sentences that are resampled. A pruned model
    whose scores are not finite has rows without a value, and a note.
    """
    rows: list[Row] = []
    drawn = None
    for key, of in sums.items():
        drawn = bootstrap_counts(len(of.predictions), seed=seed) if drawn is None else drawn
        about = {**labels[key], "n": int(of.predictions.sum()), "sentences": len(of.predictions)}
        for metric, values in (("perplexity", of.nats), ("kl", of.kl), ("precision@1", of.agree)):
            if not np.isfinite(values).all():
                note = "the pruned model's scores are not finite"
                rows.append({**about, "metric": metric, "value": None, "note": note})
                continue
            figures = np.array(bootstrap_ratio(values, of.predictions, drawn))
            with np.errstate(over="ignore"):
                figures = np.exp(figures) if metric == "perplexity" else figures
            rows.append({**about, "metric": metric, **estimate(*figures)})
    return rows


def cost(
    model: Transformer,
    method: str,
    removed: Collection[int],
    maps: Mapping[Stretch, Linear],
    context: float,
) -> dict:
    """Returns `parameters`, and `flops` a token that looks at `context` tokens: blocks,
    maps and head.

    Merged maps cost nothing: the projection they are folded into is there already.
    """
    own = {path: int(np.prod(value.shape)) for path, value in parameters(model).items()}
    gone = tuple(f"blocks.{i}." for i in removed)
    size = sum(count for path, count in own.items() if not path.startswith(gone))
    flops = (model.config.layers - len(removed)) * block_flops(
        model.config, 1, context
    ) + head_flops(model.config)
    if method != "merge":
        size += sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(dict(maps)))
        flops += sum(2 * linear.W.shape[0] * linear.W.shape[1] for linear in maps.values())
    return {"parameters": size, "flops": float(flops)}


def time_per_token(
    model: Transformer,
    text: Text,
    pruned: Mapping[Key, tuple[Transformer, Mapping[str, Site]]],
    *,
    repeats: int = 5,
) -> dict[Key, float]:
    """Returns the median wall-clock microseconds a token of a forward pass with its
    predictions, compilation left out.

    All are run in turn on one batch of at most 1,024 tokens, padding included in the
    time and left out of the count.

    Args:
      model: the whole model, for its sizes.
      text: its longest sentences are run.
      pruned: the (model, sites) to run.
      repeats: passes of each.
    """
    batch = text_batches(model.config, text, _TIMED_TOKENS)[0]
    tokens, mask = jnp.asarray(batch.tokens), jnp.asarray(batch.segments > 0)
    real = int(batch.lengths.sum())

    def timed(which: Transformer, sites: Mapping[str, Site]) -> Work:
        return lambda: jax.block_until_ready(
            logits(which, run(which, tokens, sites=sites, mask=mask)[0])
        )

    seconds = medians({str(key): timed(*which) for key, which in pruned.items()}, repeats=repeats)
    return {key: 1e6 * seconds[str(key)] / real for key in pruned}
