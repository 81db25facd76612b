"""Shows a jmat model, with sites and an exit, to the LM Evaluation Harness. Needs the
extra `lm-eval`.

    from jmat.studies.tasks.harness import harness_model

    lm_eval.simple_evaluate(model=harness_model(model, tokenizer), tasks=["arc_easy"])

The tokens of a prompt and its continuation are those of the study `tasks`, so that the
harness finds the same accuracies as that study.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jmat.data.encoding import SpecialTokens, Tokenizer, special_tokens, text_tokens
from jmat.maps.shortcut import Shortcut
from jmat.maps.types import Identity
from jmat.models.family import Transformer, check_model
from jmat.models.site_checks import checked_sites
from jmat.models.sites import Site
from jmat.runtime.annotations import Fields
from jmat.runtime.checks import check_whole, whole
from jmat.runtime.mesh import usual_batch
from jmat.studies.tasks.answers import answers
from jmat.studies.tasks.scoring import (
    Passage,
    Scoring,
    check_causal,
    continued,
    greedy_log_likelihoods,
    log_likelihoods,
    warn_of_cuts,
)

HarnessLM = Any  # lm_eval.api.model.LM, of a package that may be missing


@runtime_checkable
class Request(Protocol):
    """Describes a request of the harness."""

    args: tuple[Any, ...]  # texts, and the options of an answer


@dataclasses.dataclass(frozen=True, eq=False)
class Scorer:
    """Scores texts by a causal model.

    Attributes:
      model: the model.
      tokenizer: the model's.
      sites: edits of parts, or what stands in for them.
      tokens_per_batch: padded tokens in one forward pass.
    """

    model: Transformer
    tokenizer: Tokenizer
    sites: Mapping[str, Site]
    tokens_per_batch: int

    def continuations(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Returns, for each context and continuation, the continuation's log-likelihood
        and whether it is greedy.

        The log-likelihood is in nats. A continuation is greedy where each of its tokens
        is the likeliest. An empty context counts as one BOS token, or EOS where the
        tokenizer has no BOS.

        Raises:
          ValueError: a continuation is too long for the model; an empty context, and a
            tokenizer with neither BOS nor EOS.
        """
        limit, special = (
            self.model.config.num_positions,
            special_tokens(self.tokenizer, masked=False),
        )
        passages = []
        for context, continuation in pairs:
            before = special if context.strip() else SpecialTokens(self._prefix(special))
            passages.append(continued(self.tokenizer, context, continuation, limit, before))
        warn_of_cuts(passages, limit)
        values, greedy = (
            greedy_log_likelihoods(self.model, passages, **self._settings())
            if passages
            else ((), ())
        )
        return [(float(value), bool(each)) for value, each in zip(values, greedy, strict=True)]

    def texts(self, texts: Sequence[str]) -> list[float]:
        """Returns the log-likelihood of each whole text in nats, its first token
        included, after BOS or EOS.

        A text longer than the model's positions is read in windows. Every token is
        scored once; the last window begins with as many tokens that are scored already
        as fit.

        Raises:
          ValueError: the tokenizer has neither BOS nor EOS.
        """
        limit, special = (
            self.model.config.num_positions,
            special_tokens(self.tokenizer, masked=False),
        )
        prefix = self._prefix(special)
        owners, passages = [], []
        for owner, own in enumerate(text_tokens(texts, self.tokenizer, special)):
            tokens, scored = np.asarray([*prefix, *own], np.int32), len(prefix)
            while scored < len(tokens):
                stop = min(limit if scored < limit else scored + limit - 1, len(tokens))
                start = max(stop - limit, 0)
                passages.append(Passage(tokens[start:stop], scored - start))
                owners.append(owner)
                scored = stop
        values = (
            log_likelihoods(self.model, passages, **self._settings()) if passages else np.zeros(0)
        )
        return np.bincount(np.asarray(owners, np.int64), values, minlength=len(texts)).tolist()

    def answers(self, requests: Sequence[tuple[str, Fields]]) -> list[str]:
        """Returns the text that the model writes behind each context, by the options
        beside it.

        Raises what `jmat.studies.tasks.answers.answers` does.
        """
        prefix = self._prefix(special_tokens(self.tokenizer, masked=False))
        return answers(
            self.model,
            self.tokenizer,
            requests,
            prefix,
            sites=self.sites,
            tokens_per_batch=self.tokens_per_batch,
        )

    def _settings(self) -> Scoring:
        return {"sites": self.sites, "tokens_per_batch": self.tokens_per_batch}

    def _prefix(self, special: SpecialTokens) -> tuple[int, ...]:
        """Returns the tokens that come before a text, so that its first token can be
        predicted.
        """
        named = (getattr(self.tokenizer, name, None) for name in ("bos_token_id", "eos_token_id"))
        prefix = special.before or tuple(token for token in named if token is not None)[:1]
        if not prefix:
            raise ValueError(
                "the tokenizer has neither BOS nor EOS, so nothing predicts the first token of a "
                "text."
            )
        return prefix


def scorer(
    model: Transformer,
    tokenizer: Tokenizer,
    *,
    sites: Mapping[str, Site] | None = None,
    exit_layer: int | None = None,
    tokens_per_batch: int | None = None,
) -> Scorer:
    """Returns what scores texts. Takes the arguments of `harness_model`, and raises
    what it does.
    """
    check_model(model)
    check_causal(model, tokenizer, model.name)
    if tokens_per_batch is not None:
        check_whole("tokens_per_batch", tokens_per_batch, 1)
    exit_layer = None if exit_layer is None else whole("exit_layer", exit_layer)
    layers = model.config.layers
    chosen = checked_sites(sites, model.config, 0, layers)
    if exit_layer is not None and not 0 <= exit_layer <= layers:
        raise ValueError(f"exit_layer={exit_layer}: expected a layer from 0 to {layers}, the last.")
    if exit_layer is not None and exit_layer < layers:
        left_out = Shortcut(exit_layer, layers, Identity())
        if both := sorted(left_out.keys() & chosen.keys()):
            raise ValueError(
                f"exit_layer={exit_layer} leaves out {both[0]}, which sites names, too: to exit by "
                f"a map, give sites=jmat.Shortcut({exit_layer}, {layers}, map) and no exit_layer."
            )
        chosen |= left_out
    return Scorer(model, tokenizer, chosen, tokens_per_batch or usual_batch())


def harness_model(
    model: Transformer,
    tokenizer: Tokenizer,
    *,
    sites: Mapping[str, Site] | None = None,
    exit_layer: int | None = None,
    tokens_per_batch: int | None = None,
) -> HarnessLM:
    """Returns a model of the LM Evaluation Harness, an `lm_eval.api.model.LM`.

    Args:
      model: a causal model.
      tokenizer: the model's.
      sites: edits of parts, or what stands in for them, such as a `jmat.Shortcut`.
      exit_layer: layer from 0 to L whose stream the head reads instead of the last
        one's; the blocks behind it are not computed. None: the last.
      tokens_per_batch: padded tokens in one forward pass; None: as suits the devices.

    Raises:
      ValueError: the extra `lm-eval` is not installed; the model is no causal one, or
        has no tokenizer; there is no such layer; `sites` names a block that
        `exit_layer` leaves out.
    """
    try:
        from lm_eval.api.model import LM
    except ImportError:
        raise ValueError(
            "the LM Evaluation Harness needs the extra `lm-eval`: pip install 'jmat[lm-eval]'."
        ) from None
    given = scorer(
        model, tokenizer, sites=sites, exit_layer=exit_layer, tokens_per_batch=tokens_per_batch
    )

    class HarnessModel(LM):
        """Answers the harness's requests, which hold their texts in `args`."""

        def loglikelihood(self, requests: Sequence[Request]) -> list[tuple[float, bool]]:
            return given.continuations([(request.args[0], request.args[1]) for request in requests])

        def loglikelihood_rolling(self, requests: Sequence[Request]) -> list[float]:
            return given.texts([request.args[0] for request in requests])

        def generate_until(self, requests: Sequence[Request]) -> list[str]:
            return given.answers([(request.args[0], request.args[1]) for request in requests])

    return HarnessModel()
