"""Scores how much a block, or a stretch of blocks, does to the stream: the order of
removal.

With h = h_i the stream before block i, and h' = h_j the stream after block j − 1 (j = i
+ 1 for one block):

| score | | removed first |
|---|---|---|
| `kl` | KL(whole ‖ without these blocks), in nats a token, measured | the lowest |
| `block_influence` | `1 − E cos(h, h')` (ShortGPT; Men et al. 2024) | the lowest |
| `angular` | `E arccos(cos(h, h')) / π` (Gromov et al. 2024) | the lowest |
| `linearity` | `1 − min ‖H A − H'‖²`, centred, of norm 1 (Razzhigaev et al. 2024) | the highest |
| `linearity_without_residual` | the same between H and H' − H; an order of our own | the highest |

Razzhigaev et al. 2024 order blocks by `linearity`, and report the score without the
residual as a measurement. What a block adds can be linear in what it reads and yet be
needed: linearity alone does not say what removal costs.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from jmat.maps.least_squares import factorise_each
from jmat.studies.prune.stand_ins import Stretch

_HIGHEST_FIRST = ("linearity", "linearity_without_residual")
STREAM_SCORES = ("block_influence", "angular", *_HIGHEST_FIRST)  # read from the streams alone
SCORES = ("kl", *STREAM_SCORES)


def stretch_scores(
    score: str, streams: Sequence[Float[ndarray, "N D"]], candidates: Sequence[Stretch]
) -> dict[Stretch, float]:
    """Returns the score of each candidate, from h_0 .. h_L at the same examples; any
    but `kl`, which needs the model.

    Linearity is in-sample: for the order alone the bias, which is the same for all
    candidates, does not matter.
    """
    if score in _HIGHEST_FIRST:
        return _linearities(
            streams, candidates, without_residual=score == "linearity_without_residual"
        )
    cosines = {(i, j): _cosine(streams[i], streams[j]) for i, j in candidates}
    if score == "block_influence":
        return {stretch: float(1 - cosine.mean()) for stretch, cosine in cosines.items()}
    if score == "angular":
        return {
            stretch: float(np.arccos(cosine).mean() / np.pi) for stretch, cosine in cosines.items()
        }
    raise ValueError(
        f"score {score!r} is not read from the streams; choose from {', '.join(STREAM_SCORES)}."
    )


def in_order(score: str, scores: Mapping[Stretch, float]) -> list[Stretch]:
    """Returns the candidates, those to remove first first; of equal ones the earlier."""
    sign = -1 if score in _HIGHEST_FIRST else 1
    return sorted(scores, key=lambda stretch: (sign * scores[stretch], stretch))


def _linearities(
    streams: Sequence[Float[ndarray, "N D"]],
    candidates: Sequence[Stretch],
    *,
    without_residual: bool,
) -> dict[Stretch, float]:
    """Returns both linearities of every candidate. They have the same residual, that of
    affine least squares of h_j on h_i; only what it is held against differs. One
    factorisation serves all candidates that begin at the same block.
    """
    found, starts = {}, sorted({start for start, _ in candidates})
    sources = factorise_each([streams[i] for i in starts], intercept=True, condition=False)
    for i, factors in zip(starts, sources, strict=True):
        stops = [stop for start, stop in candidates if start == i]
        for j in stops:
            # The block's own contribution: h_i would be fitted exactly anyway, and hides small
            # residuals by its size.
            contribution = streams[j] - streams[i]
            own = _centred_energy(contribution)
            residual = (1 - factors.explained(contribution)) * own
            energy = own if without_residual else _centred_energy(streams[j])
            # what does not vary is linear
            found[i, j] = float(1 - residual / energy) if energy > 0 else 1.0
    return found


def _centred_energy(values: Float[ndarray, "N D"]) -> float:
    wide = values.astype(np.float64)
    return float(np.square(wide - wide.mean(0)).sum())


def _cosine(x: Float[ndarray, "N D"], y: Float[ndarray, "N D"]) -> Float[ndarray, " N"]:
    """Returns the cosine between the rows; 1 where one of them is zero, and so has no
    direction.
    """
    wide, other = x.astype(np.float64), y.astype(np.float64)
    norms = np.linalg.norm(wide, axis=1) * np.linalg.norm(other, axis=1)
    products = np.einsum("nd,nd->n", wide, other)
    return np.where(norms > 0, np.clip(products / np.where(norms > 0, norms, 1), -1, 1), 1.0)
