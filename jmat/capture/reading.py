"""Chooses where a model is read, and makes the batches: at the positions of examples,
or whole sentences.
"""

from collections.abc import Sequence

from jmat.data.batches import Batch, packed, padded_batches
from jmat.data.encoding import Tokenizer, special_id
from jmat.data.examples import Split
from jmat.data.reading import check_texts, every_token
from jmat.data.sampling import make_examples
from jmat.data.text import Text
from jmat.models.config import ModelConfig
from jmat.models.family import Transformer

_LOGITS = 1 << 24  # scores held at once, for one model: 64 MB


def mask_token_of(model: Transformer, tokenizer: Tokenizer | None) -> int | None:
    """Returns the id that hides a position from a masked model; None for a causal one.

    Raises:
      ValueError: the model is a masked one, and there is no tokenizer with a mask
        token.
    """
    if model.config.causal:
        return None
    mask_token = special_id(tokenizer, "mask")
    if mask_token is None:
        name = model.name or "the model"
        raise ValueError(
            f"{name} is a masked model, and needs a tokenizer (tokenizer=) that has a mask token."
        )
    return mask_token


def predictions_in(
    model: Transformer,
    inputs: Sequence[str] | Split | Batch,
    tokenizer: Tokenizer | None,
    *,
    seed: int,
) -> Split:
    """Returns the sentences, unmasked, whose examples are the positions at which the
    model predicts.

    A causal model predicts at every token. A masked one predicts at one position of
    each text, drawn by `seed`; `jmat.data.examples.mask_positions` masks it. A `Split`
    is returned as it is.

    Raises:
      ValueError: as `every_token`; a batch for a masked model; a text without tokens.
    """
    if model.config.causal or isinstance(inputs, Split):
        return every_token(inputs, tokenizer)
    if isinstance(inputs, Batch):
        raise ValueError(
            "a masked model predicts under a mask: give texts, or a Split that says which "
            "positions."
        )
    tokenizer, size = check_texts(inputs, tokenizer), model.config.num_positions
    split = make_examples(
        inputs, inputs, tokenizer, protocol="jmat", max_length=size, masked=True, seed=seed
    ).eval
    if split.num_sentences < len(inputs):
        raise ValueError(
            f"{len(inputs) - split.num_sentences} of {len(inputs)} texts have no tokens: leave "
            "them out."
        )
    return split


def reading_batches(
    config: ModelConfig,
    split: Split,
    tokens_per_batch: int,
    *,
    row_multiple: int = 1,
    alone: bool = False,
) -> list[Batch]:
    """Returns batches that hold what the model must see to be read at the examples'
    positions.

    A causal model never looks past the position that is read: the rest of the sentence
    is cut.

    Args:
      config: of the model.
      split: sentences and positions.
      tokens_per_batch: padded tokens in one batch.
      row_multiple: rows of a batch are a multiple of this: the number of devices.
      alone: whether each sentence has a row to itself; by default several share one.
    """
    batches = padded_batches if alone else packed
    return batches(
        split,
        cut_after_position=config.causal,
        max_length=config.num_positions,
        tokens_per_batch=tokens_per_batch,
        row_multiple=row_multiple,
    )


def text_batches(
    config: ModelConfig, text: Text, tokens_per_batch: int, *, row_multiple: int = 1
) -> list[Batch]:
    """Returns batches of whole sentences, one a row, small enough for the scores of
    every token to be held.
    """
    most = _LOGITS // config.vocab_size if config.causal else tokens_per_batch
    return padded_batches(
        text.split,
        cut_after_position=False,
        tokens_per_batch=max(min(tokens_per_batch, most), 1),
        max_length=config.num_positions,
        row_multiple=row_multiple,
    )
