"""Measures what a causal model can do: perplexity on a text, and multiple-choice tasks
from a local file or the hub.

A task is one of `jmat.data.hub_tasks` by name, or a JSONL file, one question a line:

    {"question": "What melts ice?", "choices": ["heat", "shade"], "answer": 0}
    {"context": "The lamp was on because", "choices": ["it was dark.", "it was day."], "answer": 0}

A `question` is asked as `Question: …\\nAnswer:`, a `context` is simply continued; a
space stands before each choice. The answer is the choice of highest log-likelihood, as
it is (`accuracy`), or per character (`accuracy_norm`), as in the LM Evaluation Harness.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from numpy import ndarray

from jmat.capture.reading import text_batches
from jmat.capture.sweep import sweep
from jmat.data.batches import Batch
from jmat.data.encoding import (
    SpecialTokens,
    Tokenizer,
    encode_pieces,
    ending,
    special_tokens,
    text_tokens,
)
from jmat.data.examples import Split, check_tokens
from jmat.data.text import Text, following_tokens
from jmat.forward import logits, run
from jmat.metrics.bootstrap import bootstrap_counts, bootstrap_ratio
from jmat.metrics.predictions import Predictions, cross_entropy
from jmat.models.family import Transformer
from jmat.models.sites import Site
from jmat.report.notes import estimate, noted
from jmat.report.rows import Row
from jmat.runtime.mesh import local_mesh, place, replicate


@dataclasses.dataclass(frozen=True, eq=False)
class Passage:
    """Holds tokens, of which those from `scored_from` on are predicted."""

    tokens: Int[ndarray, " T"]
    scored_from: int
    is_cut: bool = False  # whether a prompt lost its beginning


def check_causal(model: Transformer, tokenizer: Tokenizer | None, name: str) -> Tokenizer:
    """Returns the tokenizer.

    Raises:
      ValueError: a model that does not predict text from left to right, or has no
        tokenizer to read it.
    """
    if not model.config.causal or model.head is None:
        raise ValueError(
            f"{name} is no causal language model: it gives text no likelihood; choose one such as "
            "gpt2."
        )
    if tokenizer is None:
        raise ValueError(f"{name} has no tokenizer, so no text can be read.")
    return tokenizer


class Scoring(TypedDict, total=False):
    """Holds settings of `scored_tokens`."""

    sites: Mapping[str, Site] | None
    tokens_per_batch: int
    progress: str | None


def log_likelihoods(
    model: Transformer,
    passages: Sequence[Passage],
    *,
    sites: Mapping[str, Site] | None = None,
    tokens_per_batch: int = 4096,
    predictions: Predictions | None = None,
    progress: str | None = None,
) -> Float[ndarray, " N"]:
    """Returns Σ ln p(token | those before it) of each passage's scored tokens, in nats;
    the first token is never scored.

    Takes the arguments of `scored_tokens` but `measure`, and raises what it does.
    """
    given: Scoring = {"sites": sites, "tokens_per_batch": tokens_per_batch, "progress": progress}
    return scored_tokens(model, passages, _nats, predictions=predictions, **given)[:, 0]


def greedy_log_likelihoods(
    model: Transformer, passages: Sequence[Passage], **settings: Unpack[Scoring]
) -> tuple[Float[ndarray, " N"], Bool[ndarray, " N"]]:
    """Returns the log-likelihoods, and whether each scored token of a passage is the
    likeliest one in its place.

    Takes the arguments of `log_likelihoods`, and raises what it does.
    """
    totals = scored_tokens(model, passages, _nats_and_misses, **settings)
    return totals[:, 0], totals[:, 1] == 0


def scored_tokens(
    model: Transformer,
    passages: Sequence[Passage],
    measure: Callable[[Float[Array, "B T V"], Int[Array, "B T"]], Float[Array, "B K"]],
    *,
    sites: Mapping[str, Site] | None = None,
    tokens_per_batch: int = 4096,
    predictions: Predictions | None = None,
    progress: str | None = None,
) -> Float[ndarray, "N K"]:
    """Returns what a function measures at the scored tokens of each passage.

    Args:
      model: a causal model.
      passages: none longer than the model's positions.
      measure: returns K figures a row from logits and from the tokens to predict, −1
        where none is scored; the first figure must be finite.
      sites: what stands in for parts of the model, as for `jmat.run`.
      tokens_per_batch: padded tokens in one forward pass.
      predictions: collects what the model predicts, to tell whether that depends on the
        text.
      progress: what the progress bar says; None shows none.

    Raises:
      ValueError: nothing to score, a token id that the model does not have, a
        log-likelihood that is not finite.
    """
    if not passages:
        raise ValueError("there is no text to score.")
    lengths = np.array([len(passage.tokens) for passage in passages], np.int32)
    tokens = np.concatenate([passage.tokens for passage in passages]).astype(np.int32)
    check_tokens(tokens, model.config.vocab_size)
    first = np.array([passage.scored_from for passage in passages])
    mesh = local_mesh()
    model, sites = place(model, mesh), replicate(mesh, dict(sites or {}))
    plan = text_batches(
        model.config,
        Text(Split(tokens, lengths, lengths - 1), None),
        tokens_per_batch,
        row_multiple=mesh.size,
    )

    def scored(batch: Batch) -> tuple[Batch, Int[ndarray, "B T"]]:
        column = np.arange(1, batch.tokens.shape[1] + 1)  # of the token that is predicted
        return batch, np.where(
            column >= first[batch.examples], following_tokens(batch), np.int32(-1)
        )

    def score(given: tuple[Batch, Int[Array, "B T"]]) -> Float[Array, "B 1 K"]:
        batch, targets = given
        x, _ = run(model, batch.tokens, sites=sites, **batch.where)
        scores = logits(model, x)
        if predictions is not None:
            predictions.add(scores, targets >= 0)
        return measure(scores, targets)[:, None]  # one example a row

    totals = sweep(plan, score, inputs=scored, mesh=mesh, progress=progress).astype(np.float64)
    if predictions is not None:
        predictions.meet_hosts()
    if not np.isfinite(totals[:, 0]).all():
        raise ValueError(
            "the model's scores are not finite: the weights are damaged, or the dtype overflows."
        )
    return totals


@jax.jit
def _nats(scores: Float[Array, "B T V"], targets: Int[Array, "B T"]) -> Float[Array, "B 1"]:
    return -jnp.where(targets >= 0, cross_entropy(scores, targets), 0).sum(1, keepdims=True)


@jax.jit
def _nats_and_misses(
    scores: Float[Array, "B T V"], targets: Int[Array, "B T"]
) -> Float[Array, "B 2"]:
    misses = (targets >= 0) & (scores.argmax(-1) != targets)
    return jnp.concatenate(
        [_nats(scores, targets), misses.sum(1, keepdims=True).astype(jnp.float32)], 1
    )


def text_rows(
    model: Transformer,
    tokenizer: Tokenizer,
    name: str,
    lines: Sequence[str],
    *,
    seed: int = 0,
    **settings: Unpack[Scoring],
) -> list[Row]:
    """Returns `perplexity` of a text's tokens given those before them on the same line,
    with an interval over lines.

    A line longer than the model's positions is read in pieces. `n` counts the scored
    tokens: all but each piece's first, which is BOS where the tokenizer puts one in
    front of a text.
    """
    special = special_tokens(tokenizer, masked=False)
    encoded = encode_pieces(lines, tokenizer, model.config.num_positions, special)
    pieces = [(row, ids) for row, each in enumerate(encoded) for ids in each if len(ids) > 1]
    if cut := sum(len(each) > 1 for each in encoded):
        message = "%d of %d lines of %s are longer than %d tokens, and are read in pieces."
        logging.getLogger(__name__).warning(
            message, cut, len(encoded), name, model.config.num_positions
        )
    if not pieces:
        raise ValueError(f"{name} holds no line of two tokens: there is nothing to predict.")
    passages = [Passage(ids, 1) for _, ids in pieces]
    predictions = Predictions()
    nats = -log_likelihoods(model, passages, predictions=predictions, **settings)
    rows = np.array([row for row, _ in pieces])
    sums, counts = np.zeros(len(encoded)), np.zeros(len(encoded))
    np.add.at(sums, rows, nats)
    np.add.at(counts, rows, [len(ids) - 1 for _, ids in pieces])
    sums, counts = sums[counts > 0], counts[counts > 0]
    with np.errstate(over="ignore"):
        figures = np.exp(bootstrap_ratio(sums, counts, bootstrap_counts(len(sums), seed=seed)))
    row = {
        "text": name,
        "metric": "perplexity",
        **estimate(*figures),
        "n": int(counts.sum()),
        "lines": len(sums),
    }
    return noted([row], predictions.note())


def warn_of_cuts(passages: Sequence[Passage], limit: int) -> None:
    """Logs how many prompts lost their beginnings, because they do not fit into so many
    tokens.
    """
    if cut := sum(passage.is_cut for passage in passages):
        message = (
            "%d of %d prompts with a choice are longer than %d tokens: the prompts lost their "
            "beginnings."
        )
        logging.getLogger(__name__).warning(message, cut, len(passages), limit)


def continued(
    tokenizer: Tokenizer, prompt: str, choice: str, limit: int, special: SpecialTokens
) -> Passage:
    """Returns a prompt and a choice, of which the choice is scored; too long a prompt
    loses its beginning.

    The choice begins with the space that parts it from the prompt, if there is one.

    The scored tokens begin where they part from those of the prompt alone: a tokenizer
    may join the two. BOS, where the tokenizer puts one in front of a text, stays there;
    nothing is appended.
    """
    whole, prompt = prompt, ending(prompt, tokenizer, limit)
    alone, joined = text_tokens((prompt, prompt + choice), tokenizer, special)
    shared = 0
    while shared < min(len(alone), len(joined) - 1) and alone[shared] == joined[shared]:
        shared += 1
    before = special.before
    if (size := len(joined) - shared) > limit - max(len(before), 1):
        raise ValueError(
            f"the choice {choice.strip()[:40]!r}… has {size} tokens; the model reads {limit} in "
            "all."
        )
    cut = max(len(before) + len(joined) - limit, 0)
    tokens = np.asarray([*before, *joined[cut:]], np.int32)
    return Passage(
        tokens, max(len(before) + shared - cut, 1), is_cut=cut > 0 or len(prompt) < len(whole)
    )
