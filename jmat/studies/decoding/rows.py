"""Figures of the study as rows of results.json."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from jmat.decode.result import Generated
from jmat.metrics.bootstrap import bootstrap_counts, bootstrap_mean, bootstrap_ratio
from jmat.report.notes import estimate
from jmat.report.rows import Row
from jmat.studies.decoding.measure import Written
from jmat.studies.decoding.methods import PLAIN, Method

SPEED, SPEED_UP = "tokens_a_second", "speed_up"
SAME, UNTIL = "same_tokens", "until_difference"
_NO_DRAFT = "nothing was drafted"
ACCEPTED, PER_CHECK = "accepted", "tokens_a_check"


def method_rows(
    methods: Sequence[Method], written: Mapping[str, Written], *, seed: int
) -> list[Row]:
    """Returns the rows of every method.

    Args:
      methods: among them the plain one.
      written: texts and times by method.
      seed: of the resamples of prompts.
    """
    plain = written[PLAIN]
    rows: list[Row] = []
    for method in methods:
        texts = written[method.name].texts
        figures = [] if method.name == PLAIN else agreement_rows(texts, plain.texts, seed)
        if texts.drafts is not None:
            figures += _drafts(texts, seed)
        figures += _clock(written[method.name], plain)
        rows += [{**method.fields, **figure} for figure in figures]
    return rows


def agreement_rows(texts: Generated, plain: Generated, seed: int) -> list[Row]:
    """Returns how far texts are those of the whole model: the share of its tokens that
    stand at the same place, and the number of tokens before the first difference.
    """
    same, until, lengths = (np.zeros(len(plain)) for _ in range(3))
    for row, (mine, whole) in enumerate(zip(texts.tokens, plain.tokens, strict=True)):
        length = max(len(mine), len(whole))
        agrees = np.zeros(length, bool)
        shared = min(len(mine), len(whole))
        agrees[:shared] = mine[:shared] == whole[:shared]
        same[row], lengths[row] = agrees.sum(), length
        until[row] = length if agrees.all() else np.argmin(agrees)
    return [
        ratio_row(SAME, same, lengths, seed),
        {
            "metric": UNTIL,
            **estimate(*bootstrap_mean(until, seed=seed)),
            "n": len(until),
        },
    ]


def _drafts(texts: Generated, seed: int) -> list[Row]:
    """Returns the share of drafted tokens that are part of the text, and the new tokens
    that one check brings.
    """
    assert texts.drafts is not None
    cycles, drafted, accepted = (np.asarray(part, np.float64) for part in texts.drafts)
    # the first token of a text comes from reading its prompt, not from a check
    written = np.array([len(tokens) - 1 for tokens in texts.tokens], np.float64)
    return [
        ratio_row(ACCEPTED, accepted, drafted, seed, none=_NO_DRAFT),
        ratio_row(PER_CHECK, written, cycles, seed, none=_NO_DRAFT),
    ]


def _clock(own: Written, plain: Written) -> list[Row]:
    """Returns tokens a second in the fastest turn, and how many times as fast that is as
    the plain method. `low` and `high` are the extremes over turns.
    """
    if not own.seconds:
        return []
    count = sum(len(tokens) for tokens in own.texts.tokens)
    whole = sum(len(tokens) for tokens in plain.texts.tokens)
    rates = [count / seconds for seconds in own.seconds]
    rows: list[Row] = [_extremes(SPEED, rates, max(rates))]
    if own is not plain:
        base = [whole / seconds for seconds in plain.seconds]
        ratios = [mine / other for mine, other in zip(rates, base, strict=True)]
        rows.append(_extremes(SPEED_UP, ratios, max(rates) / max(base)))
    return rows


def _extremes(metric: str, turns: Sequence[float], value: float) -> Row:
    spread = {"low": min(turns), "high": max(turns), "n": len(turns)}
    return {"metric": metric, "value": value, "interval": "extremes over turns", **spread}


def ratio_row(
    metric: str,
    sums: Float[ndarray, " N"],
    counts: Float[ndarray, " N"],
    seed: int,
    *,
    none: str = "no token is of this kind",
) -> Row:
    """Returns Σ sums / Σ counts over prompts, with its interval.

    Args:
      metric: name of the figure.
      sums: of each prompt.
      counts: by which they are divided; prompts with 0 do not count.
      seed: of the resamples of prompts.
      none: note where no prompt counts.
    """
    there = counts > 0
    if not there.any():
        return {"metric": metric, "value": None, "n": 0, "note": none}
    sums, counts = sums[there], counts[there]
    found = bootstrap_ratio(sums, counts, bootstrap_counts(len(sums), seed=seed))
    return {"metric": metric, **estimate(*map(np.float64, found)), "n": len(sums)}
