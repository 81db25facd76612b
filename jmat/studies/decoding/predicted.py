"""The speed-up that follows from the costs of single passes, beside that of the clock."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int32
from numpy import ndarray

from jmat.decode.costs import DraftStep, measure_costs, speed_up
from jmat.decode.draft import Draft, words_of
from jmat.decode.lookup import Lookup
from jmat.models.family import Transformer
from jmat.report.rows import Row
from jmat.studies.decoding.measure import Written
from jmat.studies.decoding.methods import Method

PREDICTED = "predicted_speed_up"


def predicted_rows(
    model: Transformer,
    prompts: Sequence[Int32[ndarray, " _"]],
    methods: Sequence[Method],
    written: Mapping[str, Written],
    *,
    turns: int,
) -> list[Row]:
    """Returns `predicted_speed_up` of every draft: τ / (γ c + v), with τ the tokens that a
    check brought in the texts, γ the tokens of a draft, and c and v the measured costs of
    a drafted token and of a check, in steps of plain decoding (`jmat.decode.costs`).

    Args:
      model: that wrote the texts.
      prompts: their token ids.
      methods: ways to write; those without drafts are left out.
      written: texts by method.
      turns: how often each pass is timed.
    """
    drafting = {
        method.name: draft for method in methods if (draft := method.arguments.get("draft"))
    }
    if not drafting:
        return []
    steps = {
        name: DraftStep(draft.layer, draft.map, words_of(draft))
        for name, draft in drafting.items()
        if isinstance(draft, Draft)
    }
    longest = max(map(len, prompts))
    new = max(len(tokens) for name in drafting for tokens in written[name].texts.tokens)
    costs = measure_costs(
        model,
        steps,
        [_check(draft) for draft in drafting.values()],
        rows=len(prompts),
        length=longest + new // 2,
        room=longest + new,
        turns=turns,
    )
    rows: list[Row] = []
    for method in methods:
        if (draft := drafting.get(method.name)) is None:
            continue
        drafted = costs.drafts.get(method.name, 0.0) / costs.plain
        check = costs.checks[_check(draft)] / costs.plain
        value = speed_up(_per_check(written[method.name]), draft.tokens, drafted, check)
        costed = {"draft_cost": drafted, "check_cost": check}
        rows.append({**method.fields, "metric": PREDICTED, "value": value, **costed})
    return rows


def _check(draft: Draft | Lookup) -> tuple[int, int]:
    """Returns what a check costs depends on: the layer that drafted, and the tokens."""
    return (draft.layer if isinstance(draft, Draft) else 0), draft.tokens


def _per_check(written: Written) -> float:
    """Returns the tokens that a check brought; those that come with prompts not counted."""
    assert written.texts.drafts is not None
    tokens = sum(len(row) - 1 for row in written.texts.tokens)
    return float(tokens / np.asarray(written.texts.drafts.cycles).sum())
