"""Holds the claims of both papers, and says of each whether a model bears it out.

Din et al. 2023: arXiv 2303.09435. Razzhigaev et al. 2024: arXiv 2405.12250.
"""

from collections.abc import Callable
from typing import NamedTuple

from jmat.studies.overview import rules

HOLDS, DOES_NOT_HOLD, NOT_TESTED = "holds", "does not hold", "not tested"
DIN, RAZZHIGAEV = "Din et al. 2023", "Razzhigaev et al. 2024"


class Claim(NamedTuple):
    """Holds a claim of a paper.

    Attributes:
      paper: its authors and year.
      statement: what it claims.
      published: its own figures.
      rule: when the claim holds here.
      decide: returns whether it does, and the figures here; raises
        `rules.NotTestedError`.
    """

    paper: str
    statement: str
    published: str
    rule: str
    decide: Callable[[rules.Evidence], rules.Decision]


class Verdict(NamedTuple):
    """Holds what became of a claim: `holds`, `does not hold` or `not tested`, and the
    figures that decide it.
    """

    paper: str
    statement: str
    published: str
    rule: str
    verdict: str
    figures: str


def verdicts(seen: rules.Evidence) -> list[Verdict]:
    """Returns the verdict on every claim."""
    decided = []
    for claim in CLAIMS:
        try:
            holds, figures = claim.decide(seen)
            verdict = HOLDS if holds else DOES_NOT_HOLD
        except rules.NotTestedError as reason:
            verdict, figures = NOT_TESTED, str(reason)
        decided.append(Verdict(*claim[:-1], verdict, figures))
    return decided


CLAIMS = (
    Claim(
        DIN,
        "A linear map reads the prediction off an earlier layer better than the logit lens does.",
        "At most layers of GPT-2 and BERT.",
        "precision@1 of the map is above that of the logit lens, the intervals apart, at more than "
        "half of the layers.",
        rules.map_is_better,
    ),
    Claim(
        DIN,
        "The advantage of the map is large.",
        "GPT-2: 15 to 40 points of precision@1 at most layers. BERT: more than 17 points on "
        "average.",
        "Causal models: 15 points or more at more than half of the layers. Masked models: more "
        "than 17 on average.",
        rules.map_is_much_better,
    ),
    Claim(
        DIN,
        "Early layers already hold much of the prediction.",
        "GPT-2: precision@1 0.28 to 0.45, @5 0.52 to 0.74, @10 0.62 to 0.82.",
        "At every layer of the first half but the embedding, no figure is below the lowest "
        "published one.",
        rules.early_layers,
    ),
    Claim(
        DIN,
        "A linear map of a layer explains more of a later layer than the layer itself does.",
        "Heat maps of all pairs of layers.",
        "Held-out r2 of the map is above that of the identity, the intervals apart, for every pair "
        "of layers.",
        rules.map_explains_more,
    ),
    Claim(
        DIN,
        "Early exit by the map saves more blocks than by the logit lens, at 95 % of the accuracy.",
        "GPT-2 (24 blocks): 7.9 % of the blocks more. BERT (24 blocks): 5.4 %.",
        "The interval of the paired difference lies above 0.",
        rules.exits_save_more,
    ),
    Claim(
        DIN,
        "Of the sub-modules, attention bears linear replacement best.",
        "GPT-2: 2 to 4 points lost; the feed-forward part and the layer norms lose more.",
        "precision@1, averaged over the layers from which on the part is replaced, is highest for "
        "attention.",
        rules.attention_is_most_linear,
    ),
    Claim(
        DIN,
        "Maps fitted on one text serve on another.",
        "Wikipedia and news.",
        "A map of one corpus loses little on the other; experiments.cross_corpus measures it.",
        rules.needs("cross_corpus", "It takes two corpora"),
    ),
    Claim(
        RAZZHIGAEV,
        "The step from a layer to the next is nearly linear.",
        "A score of 0.99.",
        "The in-sample score, with the residual, is at least 0.99 on average over the steps.",
        rules.steps_are_linear,
    ),
    Claim(
        RAZZHIGAEV,
        "Without the residual stream, the steps are less linear.",
        "Lower at the layers of all models.",
        "The held-out score without the residual is below the one with it, the intervals apart, at "
        "every step.",
        rules.residual_makes_linear,
    ),
    Claim(
        RAZZHIGAEV,
        "A block adds little to the stream, which makes the step linear.",
        "A low norm of the blocks' contributions.",
        "The norm of what a block adds, relative to the stream's, is below 1 at every step, its "
        "interval included.",
        rules.blocks_add_little,
    ),
    Claim(
        RAZZHIGAEV,
        "The most linear blocks can be replaced by linear maps at little cost.",
        "The loss hardly changes.",
        "Perplexity on held-out text rises by at most 5 % where the map replaces the blocks.",
        rules.most_linear_can_go,
    ),
    Claim(
        RAZZHIGAEV,
        "A linear map in the place of a block loses less than removal does.",
        "Curves of perplexity.",
        "KL to the whole model is lower with the map, the intervals apart, for the same blocks.",
        lambda seen: rules.cheaper(seen, "map", "delete"),
    ),
    Claim(
        RAZZHIGAEV,
        "Distillation of the maps wins back more of the loss.",
        "Curves of perplexity.",
        "KL to the whole model is lower with the distilled map, the intervals apart, for the same "
        "blocks.",
        rules.distillation_helps,
    ),
    Claim(
        RAZZHIGAEV,
        "A regulariser that makes steps alike in pretraining improves the model and lowers "
        "linearity.",
        "TinyStories 4.86 to 5.44, SuperGLUE 41.10 to 42.78.",
        "The score rises, and linearity without the residual falls at every layer, from the same "
        "start.",
        rules.needs("regularizer_study", "It takes pretraining"),
    ),
    Claim(
        RAZZHIGAEV,
        "Linearity falls in the course of pretraining.",
        "Checkpoints of Pythia, BLOOM, OPT and TinyLlama.",
        "The held-out score falls from the first checkpoint to the last.",
        rules.needs("linearity --revisions=A,B", "It takes earlier checkpoints"),
    ),
    Claim(
        RAZZHIGAEV,
        "Linearity rises in fine-tuning.",
        "On all tasks.",
        "The difference to the model before fine-tuning is above 0, its interval included.",
        rules.needs("linearity --against=MODEL", "It takes a fine-tuned model"),
    ),
)
