"""From text to batches: corpora, tokenizers, examples and their files, padded batches,
packed rows.
"""

from jmat.data.batches import Batch, packed, padded_batches, padding_waste
from jmat.data.examples import Examples, Split, check_tokens, load_examples, save_examples
from jmat.data.sampling import PROTOCOLS, make_examples, tokenize

__all__ = [
    "PROTOCOLS",
    "Batch",
    "Examples",
    "Split",
    "check_tokens",
    "load_examples",
    "make_examples",
    "packed",
    "padded_batches",
    "padding_waste",
    "save_examples",
    "tokenize",
]
