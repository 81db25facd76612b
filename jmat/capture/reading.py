"""The batches that a model reads: at the positions of examples, or whole sentences with their predictions."""

from jmat.data.batches import Batch, packed, padded_batches
from jmat.data.examples import Split
from jmat.data.text import Text
from jmat.models.config import ModelConfig

_LOGITS = 1 << 24  # scores held at once, for one model: 64 MB


def reading_batches(
    config: ModelConfig, split: Split, tokens_per_batch: int, *, row_multiple: int = 1, alone: bool = False
) -> list[Batch]:
    """Returns batches that hold what the model must see to be read at the examples' positions.

    A causal model never looks past the position that is read: the rest of the sentence is cut.

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


def text_batches(config: ModelConfig, text: Text, tokens_per_batch: int, *, row_multiple: int = 1) -> list[Batch]:
    """Returns batches of whole sentences, one a row, small enough for the scores of every token to be held."""
    most = _LOGITS // config.vocab_size if config.causal else tokens_per_batch
    return padded_batches(
        text.split,
        cut_after_position=False,
        tokens_per_batch=max(min(tokens_per_batch, most), 1),
        max_length=config.num_positions,
        row_multiple=row_multiple,
    )
