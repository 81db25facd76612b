"""Calibrates the threshold of early exits on whole texts: Learn then Test (Angelopoulos et
al. 2021, arXiv 2110.01052).

A text fails where more than a share δ of its tokens differ from the whole model's. A
threshold is safe where a text fails with probability ε at most. Thresholds are tested
from the safest down, each with the exact p-value of the binomial law; the first that is
not shown to be safe ends the sequence. So a threshold that is not safe is chosen with
probability α at most, whatever the model and the prompts are.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import scipy.special
import scipy.stats
from jaxtyping import Float, Int32
from numpy import ndarray

from jmat.data.encoding import Tokenizer
from jmat.decode.exits import FIXED, Exits
from jmat.decode.generate import generate
from jmat.decode.prompts import Prompts, prompt_ids
from jmat.decode.replay import replay
from jmat.decode.result import Generated
from jmat.models.family import Transformer, check_model
from jmat.report.rows import Row
from jmat.runtime.annotations import Keywords
from jmat.runtime.checks import check_choice, check_several
from jmat.studies.early_exit.thresholds import fixed_sequence

TEXT, PREFIX = AGAINST = ("text", "prefix")


@dataclasses.dataclass(frozen=True, eq=False)
class Calibration:
    """Holds a threshold that was calibrated, and how it was tested.

    Attributes:
      exits: with the threshold; None where no threshold was shown to be safe.
      rows: of each threshold that was tested, and of the chosen one on the other
        prompts (`part` says which): the share of texts that failed (`failed`), of tokens
        that differ (`differ`), and the mean layer at which tokens left (`layers`).
    """

    exits: Exits | None
    rows: list[Row]

    def __repr__(self) -> str:
        if self.exits is None:
            return f"Calibration: none of {len(self.rows) // 3} thresholds was shown to be safe"
        last = {row["metric"]: row for row in self.rows[-3:]}
        return (
            f"Calibration: threshold {self.exits.threshold:g}; on other prompts "
            f"{last['failed']['value']:.3f} of {last['failed']['n']} texts failed, and tokens "
            f"left after {last['layers']['value']:.2f} blocks on average"
        )


def calibrate_exits(
    model: Transformer,
    prompts: Prompts,
    exits: Exits,
    thresholds: Sequence[float],
    *,
    delta: float = 0.05,
    epsilon: float = 0.1,
    alpha: float = 0.05,
    against: str = PREFIX,
    tokenizer: Tokenizer | None = None,
    max_new_tokens: int = 64,
) -> Calibration:
    """Returns the lowest threshold with which, for a new prompt, the share of tokens that
    differ from the whole model's is at most `delta` with probability 1 − `epsilon`.

    Texts are greedy. Prompts should be drawn as the later ones are: every second one
    calibrates, the others verify.

    Args:
      model: a causal one, as `jmat.load` returns it.
      prompts: as `jmat.generate` takes them.
      exits: whose threshold is chosen.
      thresholds: from which it is.
      delta: share of a text's tokens that may differ.
      epsilon: share of texts in which more may.
      alpha: chance that the calibration chooses a threshold that is not safe.
      against: what a token differs from. "prefix": the token that the whole model would
        write at this place of the same text. "text": the one at the same place of its own
        text, which is another text from the first difference on.
      tokenizer: reads texts.
      max_new_tokens: of each text.

    Raises:
      ValueError: shares out of range; no thresholds; too few prompts for any threshold
        to be shown safe; as `jmat.generate`.
    """
    check_model(model)
    if not isinstance(exits, Exits) or exits.confidence == FIXED:
        raise ValueError("exits: expected jmat.Exits with a confidence, whose threshold is chosen.")
    for name, share in (("delta", delta), ("epsilon", epsilon), ("alpha", alpha)):
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 <= share < 1:
            raise ValueError(f"{name}={share!r}: expected a share from 0 to below 1.")
    if not epsilon or not alpha:
        raise ValueError(f"epsilon={epsilon!r}, alpha={alpha!r}: expected shares above 0.")
    check_choice("against", against, AGAINST)
    check_several("thresholds", thresholds)
    tried = [dataclasses.replace(exits, threshold=each) for each in sorted(set(thresholds))]
    if not tried:
        raise ValueError("thresholds: expected one at least.")
    ids = prompt_ids(prompts, tokenizer, model.config)
    learned, other = ids[::2], ids[1::2]
    needed = math.ceil(math.log(alpha) / math.log1p(-epsilon))
    if len(learned) < needed or not other:
        raise ValueError(
            f"{len(ids)} prompts, every second of which calibrates: to show that a threshold is "
            f"safe with epsilon={epsilon:g} and alpha={alpha:g} takes {max(2 * needed - 1, 2)} at "
            "least."
        )
    options: Keywords = {"max_new_tokens": max_new_tokens, "stop_tokens": []}
    plain = [generate(model, part, **options) for part in (learned, other)]
    rows: list[Row] = []

    def measured(each: Exits, part: int) -> Float[ndarray, " n"]:
        found = generate(model, (learned, other)[part], exits=each, **options)
        differ = _differ(model, found, plain[part], each, against)
        rows.extend(_rows(found, differ, each, delta, ("calibration", "other prompts")[part]))
        return differ

    def p_value(k: int) -> float:
        failed = _failed(measured(tried[k], 0), delta)
        return float(scipy.special.bdtr(failed, len(learned), epsilon))

    chosen = fixed_sequence([float(each.threshold or 0) for each in tried], p_value, alpha)
    if chosen is None:
        return Calibration(None, rows)
    best = dataclasses.replace(exits, threshold=next(t for t in thresholds if t == chosen))
    measured(best, 1)
    return Calibration(best, rows)


def _differ(
    model: Transformer, found: Generated, plain: Generated, exits: Exits, against: str
) -> Float[ndarray, " n"]:
    """Returns which share of each text's tokens differ from the whole model's."""
    if against == TEXT:
        pairs = zip(found.tokens, plain.tokens, strict=True)
        return np.array([np.mean(one != other) for one, other in pairs])
    agrees = np.asarray(replay(model, found, exits).agrees, np.float64)
    # the first token is the whole model's
    agrees = np.concatenate([np.ones((len(agrees), 1)), agrees[:, 1:]], axis=1)
    return 1 - np.nanmean(agrees, axis=1)


def _failed(differ: Float[ndarray, " n"], delta: float) -> int:
    # a share of 0.05 is not above 0.05, by rounding either
    return int((differ > delta + 1e-9).sum())


def _rows(
    found: Generated, differ: Float[ndarray, " n"], exits: Exits, delta: float, part: str
) -> list[Row]:
    """Returns the figures of a threshold; the interval of `failed` is exact."""
    assert found.exits is not None
    n, failed = len(differ), _failed(differ, delta)
    low, high = exact_interval(failed, n)
    label = {"threshold": exits.threshold, "part": part, "n": n}
    layers: list[Int32[ndarray, " _"]] = [row[1:] for row in found.exits.layers]
    return [
        {**label, "metric": "failed", "value": failed / n, "low": low, "high": high},
        {**label, "metric": "differ", "value": float(differ.mean())},
        {**label, "metric": "layers", "value": float(np.concatenate(layers).mean())},
    ]


def exact_interval(count: int, n: int) -> tuple[float, float]:
    """Returns the exact 95 % interval of a share (Clopper and Pearson 1934)."""
    low = 0.0 if count == 0 else scipy.stats.beta.ppf(0.025, count, n - count + 1)
    high = 1.0 if count == n else scipy.stats.beta.ppf(0.975, count + 1, n - count)
    return float(low), float(high)
