"""Answers questions with given choices by the likelihood of each choice."""

from collections.abc import Sequence
from typing import Unpack

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from jmat.data.encoding import Tokenizer, special_tokens
from jmat.metrics.bootstrap import bootstrap_mean
from jmat.metrics.predictions import Predictions
from jmat.models.family import Transformer
from jmat.report.notes import estimate, noted, with_note
from jmat.report.rows import Row
from jmat.studies.tasks.questions import Question
from jmat.studies.tasks.scoring import Passage, Scoring, continued, log_likelihoods, warn_of_cuts


def task_rows(
    model: Transformer,
    tokenizer: Tokenizer,
    name: str,
    questions: Sequence[Question],
    *,
    seed: int = 0,
    **settings: Unpack[Scoring],
) -> list[Row]:
    """Returns `accuracy` and `accuracy_norm` with intervals over questions, and
    `chance`, that of guessing.

    Where k choices have the highest likelihood, each counts as 1/k of an answer.
    """
    predictions = Predictions()
    scores = choice_scores(model, tokenizer, questions, predictions=predictions, **settings)
    rows = []
    for metric, of_questions in zip(("accuracy", "accuracy_norm"), scores, strict=True):
        best = [best_choices(of_one) for of_one in of_questions]
        hits = [
            float(q.answer in chosen) / len(chosen)
            for chosen, q in zip(best, questions, strict=True)
        ]
        figure = estimate(*bootstrap_mean(np.array(hits), seed=seed))
        row = {"task": name, "metric": metric, **figure, "n": len(questions)}
        tied = sum(len(chosen) > 1 for chosen in best)
        note = (
            f"in {tied} of {len(questions)} questions the best of k choices are equally likely: "
            "each counts 1/k"
        )
        rows.append(with_note(row, note if tied else None))
    chance = float(np.mean([1 / len(q.choices) for q in questions]))
    return noted(
        [*rows, {"task": name, "metric": "chance", "value": chance, "n": len(questions)}],
        predictions.note(),
    )


def check_choices(model: Transformer, tokenizer: Tokenizer, questions: Sequence[Question]) -> None:
    """Raises ValueError for a choice that is too long for the model, before anything is
    computed.
    """
    _choice_passages(model, tokenizer, questions)


def _choice_passages(
    model: Transformer, tokenizer: Tokenizer, questions: Sequence[Question]
) -> list[Passage]:
    """Returns every choice after its prompt, in the questions' order."""
    limit, special = model.config.num_positions, special_tokens(tokenizer, masked=False)
    pairs = ((q.prompt.rstrip(), choice.strip()) for q in questions for choice in q.choices)
    return [continued(tokenizer, prompt, f" {choice}", limit, special) for prompt, choice in pairs]


def choice_scores(
    model: Transformer,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    *,
    predictions: Predictions | None = None,
    **settings: Unpack[Scoring],
) -> tuple[list[Float[ndarray, " K"]], list[Float[ndarray, " K"]]]:
    """Returns the log-likelihoods of every question's choices, in nats, and these per
    character of the choice.
    """
    passages = _choice_passages(model, tokenizer, questions)
    warn_of_cuts(passages, model.config.num_positions)
    scores = log_likelihoods(model, passages, predictions=predictions, **settings)
    sizes = np.array([len(choice.strip()) for q in questions for choice in q.choices], np.float64)
    ends = np.cumsum([len(q.choices) for q in questions])[:-1]
    return np.split(scores, ends), np.split(scores / sizes, ends)


def best_choices(scores: Float[ndarray, " K"]) -> Int[ndarray, " k"]:
    """Returns the choices of highest score, several where they are equal up to the
    rounding of float32.
    """
    return np.flatnonzero(scores >= scores.max() - 1e-6 * abs(scores.max()))
