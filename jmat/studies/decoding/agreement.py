"""How texts whose tokens left early agree with the whole model: as rows of figures, each
with an interval over prompts.
"""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from jmat.data.encoding import Tokenizer
from jmat.decode.exits import Exits
from jmat.decode.generate import generate
from jmat.decode.prompts import Prompts
from jmat.decode.replay import Replayed, replay
from jmat.decode.result import Generated
from jmat.metrics.bootstrap import bootstrap_counts, bootstrap_mean, bootstrap_ratio
from jmat.models.config import ModelConfig
from jmat.models.family import Transformer
from jmat.report.notes import estimate
from jmat.report.rows import Row
from jmat.runtime.annotations import Keywords
from jmat.runtime.progress import track
from jmat.studies.decoding.exit_work import blocks_run, full_flops, token_flops
from jmat.studies.decoding.methods import PLAIN
from jmat.studies.decoding.rows import agreement_rows, ratio_row

# Tokens since the last one that the whole model wrote; 0: it wrote this one.
DISTANCES = ((0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, 10**9))


def measure_exits(
    model: Transformer,
    prompts: Prompts,
    exits: Mapping[str, Exits],
    *,
    tokenizer: Tokenizer | None = None,
    max_new_tokens: int = 64,
    seed: int = 0,
    progress: str | None = None,
) -> list[Row]:
    """Writes texts greedily with each of several exits, and holds them against the whole
    model. No stop token ends a text.

    Args:
      model: a causal one, as `jmat.load` returns it.
      prompts: as `jmat.generate` takes them.
      exits: by the name that their rows have as `method`.
      tokenizer: reads texts.
      max_new_tokens: of each text.
      seed: of the resamples of prompts.
      progress: label of the progress bar; by default none is shown.

    Returns:
      Rows for each exits: `same_tokens`, the share of the whole model's tokens that
      stand at the same place; `until_difference`, tokens before the first difference;
      `rouge_l` of both texts' tokens; and of the text as it was written, read by the
      whole model: `precision@1` of tokens that left (1 where it is most likely there),
      `kl` (whole model ‖ exits) of all tokens and by `distance` in tokens from the last
      one that the whole model wrote, and `perplexity`. Then `layers`, at which tokens
      left, `blocks_run`, and `flops_ratio` to the whole model. The first token of a text
      comes with the prompt, and counts in the first three alone.

    Raises:
      ValueError: as `jmat.generate`.
    """
    options: Keywords = {
        "max_new_tokens": max_new_tokens,
        "stop_tokens": [],
        "tokenizer": tokenizer,
    }
    plain = generate(model, prompts, scores=True, **options)
    rows: list[Row] = [{"method": PLAIN, **plain_perplexity(plain, seed)}]
    for name, each in track(list(exits.items()), progress):
        found = generate(model, prompts, exits=each, **options)
        threshold: Row = {} if each.threshold is None else {"threshold": each.threshold}
        label = {"method": name, "fill": each.fill, "confidence": each.confidence, **threshold}
        figures = agreement_rows(found, plain, seed)
        figures += exit_rows(model, found, plain, each, seed)
        rows += [{**label, **figure} for figure in figures]
    return rows


def plain_perplexity(plain: Generated, seed: int) -> Row:
    """Returns the perplexity of texts that have the model's own log-probabilities."""
    assert plain.scores is not None
    return _perplexity([-row[1:].astype(np.float64) for row in plain.scores], seed)


def exit_rows(
    model: Transformer, found: Generated, plain: Generated, exits: Exits, seed: int
) -> list[Row]:
    """Returns the figures of texts whose tokens left early, but for those of
    `agreement_rows`; see `measure_exits`.
    """
    law = law_rows(found, replay(model, found, exits), seed)
    return [_rouge(found, plain, seed), *law, *work_rows(model.config, found, exits, seed)]


def law_rows(found: Generated, read: Replayed, seed: int) -> list[Row]:
    """Returns the figures of texts as the whole model reads them."""
    assert found.exits is not None
    L, layers = found.exits.blocks, found.exits.layers
    sizes = [len(row) for row in layers]
    kl, agrees, log_p = (
        [np.asarray(part)[row, 1:size].astype(np.float64) for row, size in enumerate(sizes)]
        for part in read
    )
    left = [row[1:] < L for row in layers]
    rows = [
        _mean("precision@1", agrees, left, seed),
        _mean("kl", kl, [np.ones(len(row), bool) for row in kl], seed),
    ]
    away = [distances(row, L)[1:] for row in layers]
    for low, high in DISTANCES:
        chosen = [(low <= row) & (row <= high) for row in away]
        words = str(low) if low == high else f"{low}-{high}" if high < 10**9 else f"{low} or more"
        rows.append({"distance": words, **_mean("kl", kl, chosen, seed)})
    return [*rows, _perplexity([-row for row in log_p], seed)]


def work_rows(config: ModelConfig, found: Generated, exits: Exits, seed: int) -> list[Row]:
    """Returns the figures of the work that texts took."""
    assert found.exits is not None
    layers = [row[1:].astype(np.int64) for row in found.exits.layers]
    context = [
        len(prompt) + np.arange(len(row)) for prompt, row in zip(found.prompts, layers, strict=True)
    ]
    counts = np.array([len(row) for row in layers], np.float64)
    flops = np.array(
        [
            token_flops(config, row, there + 1, exits).sum()
            for row, there in zip(layers, context, strict=True)
        ]
    )
    whole = np.array([full_flops(config, there + 1).sum() for there in context])
    run = np.array([blocks_run(row, exits.fill).sum() for row in layers], np.float64)
    return [
        ratio_row("layers", np.array([row.sum() for row in layers], np.float64), counts, seed),
        ratio_row("blocks_run", run, counts, seed),
        ratio_row("flops_ratio", flops, whole, seed),
    ]


def distances(layers: Int[ndarray, " n"], blocks: int) -> Int[ndarray, " n"]:
    """Returns how many tokens each one is behind the last one that the whole model
    wrote, itself included.
    """
    places = np.arange(len(layers))
    return places - np.maximum.accumulate(np.where(layers == blocks, places, 0))


def rouge_l(one: Int[ndarray, " n"], other: Int[ndarray, " m"]) -> float:
    """Returns ROUGE-L of two texts: the harmonic mean of the shares of their tokens that
    are part of the longest common subsequence; 1 for two empty ones.
    """
    if not len(one) or not len(other):
        return float(len(one) == len(other))
    longest = np.zeros(len(other) + 1, np.int64)
    for token in one:
        here = np.where(other == token, longest[:-1] + 1, longest[1:])
        longest[1:] = np.maximum.accumulate(here)
    return float(2 * longest[-1] / (len(one) + len(other)))


def _rouge(found: Generated, plain: Generated, seed: int) -> Row:
    values = np.array([rouge_l(*pair) for pair in zip(found.tokens, plain.tokens, strict=True)])
    figure = estimate(*bootstrap_mean(values, seed=seed))
    return {"metric": "rouge_l", **figure, "n": len(values)}


def _mean(
    metric: str,
    values: list[Float[ndarray, " n"]],
    chosen: list[ndarray],
    seed: int,
) -> Row:
    """Returns the mean of chosen tokens' values."""
    sums = np.array([row[mask].sum() for row, mask in zip(values, chosen, strict=True)])
    counts = np.array([mask.sum() for mask in chosen], np.float64)
    return {**ratio_row(metric, sums, counts, seed), "tokens": int(counts.sum())}


def _perplexity(nats: list[Float[ndarray, " n"]], seed: int) -> Row:
    sums, counts = (np.array([part(row) for row in nats], np.float64) for part in (np.sum, len))
    figure = bootstrap_ratio(sums, counts, bootstrap_counts(len(nats), seed=seed))
    return {"metric": "perplexity", **estimate(*np.exp(figure)), "n": len(nats)}
