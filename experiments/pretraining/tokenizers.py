"""Training the two tokenizers of the bundled models: byte-level BPE (GPT-2) and
WordPiece (BERT).
"""

from collections.abc import Iterable

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
BERT_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# The trainers reserve memory for as many tokens as are asked for; where there is not so much, the
# process aborts.
_LARGEST = 1_000_000


def train_bpe(sentences: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer as GPT-2 uses it: every text round-trips,
    nothing is unknown.

    `<|endoftext|>` (id 0) is at once the beginning, the end and the unknown token;
    encoding adds no special token. `vocab_size` counts it and the 256 bytes, so at
    least 257 is needed, and a million at most (ValueError).
    """
    _check(vocab_size, 257, "byte-level BPE: 256 bytes and <|endoftext|>")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
    )


def train_wordpiece(sentences: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Returns a WordPiece tokenizer as BERT uses it: `[CLS] text [SEP]`, word
    continuations marked with `##`.

    Case is kept: in docstrings `None`, `True` and `ValueError` are names, and
    lower-casing would merge them with words. The specials have ids 0..4 in the order of
    `BERT_SPECIALS`. A character absent from `sentences` becomes `[UNK]`. ValueError
    where `vocab_size` leaves no room beside the specials.
    """
    _check(vocab_size, len(BERT_SPECIALS) + 1, "WordPiece: five special tokens and some letters")
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=list(BERT_SPECIALS),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    ids = {token: tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]")}
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=list(ids.items()),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def _check(vocab_size: int, smallest: int, what: str) -> None:
    if vocab_size < smallest:
        raise ValueError(
            f"A vocabulary of {vocab_size} is too small for {what}: at least {smallest} is needed."
        )
    if vocab_size > _LARGEST:
        raise ValueError(
            f"A vocabulary of {vocab_size} is too large: at most {_LARGEST} can be trained."
        )
