"""Recognises examples that were made for another kind of model: causal for masked, or
the reverse.
"""

import numpy as np
from jaxtyping import Int
from numpy import ndarray

from jmat.data.encoding import Tokenizer, special_tokens
from jmat.data.examples import Examples, Split
from jmat.data.sampling import special_ids

_ENOUGH = 10  # sentences, of which all can begin and end alike by chance where there are fewer


def describe_kind(examples: Examples, tokenizer: Tokenizer, *, masked: bool) -> list[str]:
    """Returns sentences on prepared examples that are not as `make_examples` makes them
    for this model.

    A masked model's sentences stand between its special tokens, a causal model's do
    not, and most positions are those of ordinary tokens. None of this makes a figure
    wrong for sure: nothing is raised.

    Args:
      examples: as a file holds them.
      tokenizer: of transformers, of the model.
      masked: whether the model is a masked one.
    """
    special = special_tokens(tokenizer, masked=masked)
    ids = sorted(special_ids(tokenizer))
    remarks = []
    for name, split in (("fit", examples.fit), ("eval", examples.eval)):
        first, last = _ends(split)
        number = split.num_sentences
        if masked:
            framed = np.isin(first, special.before[:1]) & np.isin(last, special.after[-1:])
            if special.before and special.after and 2 * framed.sum() < number:
                remarks.append(
                    f"{number - framed.sum()} of {number} {name} sentences do not stand between "
                    "the special tokens of this masked model: were they made for a causal one?"
                )
        elif (
            number >= _ENOUGH
            and not special.before
            and len({*first}) == len({*last}) == 1
            and first[0] != last[0]
        ):
            remarks.append(
                f"all {number} {name} sentences begin with token {first[0]} and end with token "
                f"{last[0]}: were they made for a masked model, with its [CLS] and [SEP]?"
            )
        read = split.tokens[split.starts[split.rows] + split.positions]
        on_special = np.isin(read, ids)
        if 2 * on_special.sum() > len(read):
            remarks.append(
                f"{on_special.sum()} of {len(read)} {name} positions are those of special tokens."
            )
    return remarks


def _ends(split: Split) -> tuple[Int[ndarray, " S"], Int[ndarray, " S"]]:
    """Returns the first and the last token of every sentence."""
    return split.tokens[split.starts], split.tokens[split.starts + split.lengths - 1]
