"""Makes what a model is trained with: its config, tokenizer, token rows and loss."""

import functools
import pathlib
import tempfile
from typing import Any

import numpy as np

from experiments import cli
from experiments.pretraining import tokenizers
from jmat.checkpoint.tokenizer import load_tokenizer
from jmat.data import encoding, packing
from jmat.data.encoding import Tokenizer
from jmat.runtime.annotations import JsonObject
from jmat.runtime.files import save_folder
from jmat.training import train as training
from jmat.training.penalties import Regularizer

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


Pairs = list[tuple[np.ndarray, np.ndarray]]


def hf_config(
    arch: str, vocab_size: int, layers: int, width: int, heads: int, length: int
) -> JsonObject:
    """Returns the config.json of a model to train, without dropout."""
    if arch == "gpt2":
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "activation_function": "gelu_new",
            "vocab_size": vocab_size,
            "n_layer": layers,
            "n_embd": width,
            "n_head": heads,
            "n_positions": length,
            "layer_norm_epsilon": 1e-5,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "resid_pdrop": 0.0,
        }
    return {
        "architectures": ["BertForMaskedLM"],
        "model_type": "bert",
        "hidden_act": "gelu",
        "vocab_size": vocab_size,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "max_position_embeddings": length,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


def prepare_tokenizer(
    arch: str, sentences: list[str], vocab_size: int, folder: pathlib.Path
) -> tuple[Any, dict[str, bytes]]:
    """Returns the tokenizer in `folder`, and no files; where there is no whole one, a
    new one and its files.
    """
    files = [folder / name for name in _TOKENIZER]
    if all(file.is_file() for file in files):
        try:
            return load_tokenizer(folder), {}
        except ValueError as error:
            cli.say(f"{error} It is trained anew, on the same text.")
    elif any(file.exists() for file in files):
        cli.say(
            f"half of the tokenizer in {folder} is missing: it is trained anew, on the same text"
        )
    train = tokenizers.train_bpe if arch == "gpt2" else tokenizers.train_wordpiece
    with tempfile.TemporaryDirectory() as made:
        train(sentences, vocab_size).save_pretrained(made)
        paths = sorted(pathlib.Path(made).iterdir(), key=lambda path: path.name == _TOKENIZER[-1])
        return load_tokenizer(pathlib.Path(made)), {path.name: path.read_bytes() for path in paths}


def save_tokenizer(folder: pathlib.Path, files: dict[str, bytes]) -> None:
    """Writes the files of a new tokenizer, tokenizer_config.json last, and empties
    `files`: it is written once.
    """
    save_folder(folder, files)
    files.clear()


def encode(arch: str, tokenizer: Tokenizer, sentences: list[str], length: int) -> Pairs:
    """Returns (inputs, targets) of sentences, to pack. BERT's are cut to `length` here,
    so that they end with [SEP].
    """
    special = encoding.special_tokens(tokenizer, masked=arch == "bert")
    most = length + (arch == "gpt2")  # whose last token predicts one more
    encoded = encoding.encode(sentences, tokenizer, most, special)
    ids = [tokens.tolist() for tokens in encoded if tokens is not None]
    if arch == "gpt2":
        return packing.next_tokens(ids, end=encoding.known_id(tokenizer, "eos"))
    return packing.same_tokens(ids, tokenizer.all_special_ids)


def language_model_loss(arch: str, tokenizer: Tokenizer, regularizer: Regularizer) -> training.Loss:
    """Returns the loss that `arch` is trained with."""
    if arch == "gpt2":
        return functools.partial(training.causal_lm_loss, regularizer=regularizer)
    return training.masked_lm_loss(encoding.known_id(tokenizer, "mask"), regularizer=regularizer)
