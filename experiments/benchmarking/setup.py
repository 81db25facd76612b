"""Makes the inputs of a benchmark: a GPT-2 with random weights, sentences of random
tokens, and stored activations.
"""

import dataclasses
import pathlib
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Float
from numpy import ndarray

from jmat.capture.activations import capture
from jmat.checkpoint import load_model, save_model
from jmat.data.examples import Split
from jmat.models import build, config_from_hf
from jmat.models.config import ModelConfig
from jmat.models.family import Transformer
from jmat.models.sites import stream_sites

# n_layer, n_embd, n_head of the published checkpoints and of the bundled one; `tiny` is for tests.
SHAPES = {
    "tiny": (3, 32, 4),
    "gpt2-docs": (8, 192, 6),
    "gpt2": (12, 768, 12),
    "gpt2-medium": (24, 1024, 16),
    "gpt2-large": (36, 1280, 20),
    "gpt2-xl": (48, 1600, 25),
}
_VOCABULARIES = {"tiny": 211, "gpt2-docs": 4096}  # of the others: GPT-2's
# Of the lengths of the sentences of corpus `docs` in tokens: median, and the spread of their
# logarithms.
_MEDIAN_LENGTH, _LOG_SPREAD = 24.0, 0.55
_LONGEST = 256


@dataclasses.dataclass(frozen=True, eq=False)
class Bench:
    """One run of the benchmark.

    Attributes:
        model: as `jmat.load` gives it.
        folder: the same weights in Hugging Face format.
        dtype: of the model.
        fit: sentences to fit maps on.
        eval: other ones.
        num_fit: N, examples of stored activations.
        positions: tokens of the streaming pass.
        tokens_per_batch: padded tokens in one forward pass.
        sampled: pairs (of layers) on which a slow competitor is timed, to be
          extrapolated.
        repeats: turns of the contenders.
        peak: FLOP/s of the device in `dtype`, if it is known; else it is measured.
    """

    model: Transformer
    folder: pathlib.Path
    dtype: str
    fit: Split
    eval: Split
    num_fit: int
    positions: int
    tokens_per_batch: int
    sampled: int
    repeats: int
    peak: float | None = None

    @property
    def config(self) -> ModelConfig:
        """Returns the config of the model."""
        return self.model.config


def shape_config(shape: str) -> ModelConfig:
    """The config of a GPT-2 of one of `SHAPES`."""
    layers, width, heads = SHAPES[shape]
    vocabulary = _VOCABULARIES.get(shape, 50257)
    fields = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": vocabulary}
    fields |= {
        "n_layer": layers,
        "n_embd": width,
        "n_head": heads,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return config_from_hf(fields)


def random_model(shape: str, folder: pathlib.Path, *, dtype: str, seed: int = 0) -> Any:
    """A GPT-2 with weights as before training, saved to a Hugging Face folder in
    float32 and loaded from it.
    """
    save_model(folder, build(shape_config(shape), nnx.Rngs(seed)))
    return load_model(folder, dtype=dtype)


def random_sentences(count: int, vocab_size: int, seed: int) -> Split:
    """Random tokens, as many to a sentence as in English docstrings (log-normal), and
    one random position each.
    """
    rng = np.random.default_rng(seed)
    lengths = np.exp(np.log(_MEDIAN_LENGTH) + _LOG_SPREAD * rng.standard_normal(count))
    lengths = np.clip(np.rint(lengths), 1, _LONGEST).astype(np.int32)
    tokens = rng.integers(vocab_size, size=lengths.sum(), dtype=np.int32)
    return Split(tokens, lengths, rng.integers(lengths, dtype=np.int32))


def sentences_of(tokens: int, vocab_size: int, seed: int) -> Split:
    """As many sentences as hold so many tokens; the last one is cut."""
    split = random_sentences(max(tokens // 8, 1) + 1, vocab_size, seed)
    while split.lengths.sum() < tokens:
        split = random_sentences(2 * split.num_sentences, vocab_size, seed)
    ends = np.cumsum(split.lengths)
    count = int(np.searchsorted(ends, tokens)) + 1
    lengths = split.lengths[:count].copy()
    lengths[-1] -= ends[count - 1] - tokens
    return Split(split.tokens[:tokens], lengths, np.minimum(split.positions[:count], lengths - 1))


def random_streams(count: int, config: ModelConfig, seed: int) -> list[Float[ndarray, "N D"]]:
    """h_0 .. h_L as stored activations might be, float32: each layer adds a nonlinear
    function of a few directions.

    Two coordinates are a hundred times larger than the others, as in GPT-2. What the
    activations hold does not change how long a fit takes; drawing them is faster than
    running the model.
    """
    rng, D = np.random.default_rng(seed), config.width

    def draw(*shape: int) -> ndarray:
        return rng.standard_normal(shape, np.float32)

    x = draw(count, D)
    x[:, :2] *= 100
    streams = [x]
    rank = max(D // 8, 1)
    for _ in range(config.layers):
        x = x + np.tanh(x @ draw(D, rank) / np.float32(np.sqrt(D))) @ draw(rank, D) / np.float32(
            np.sqrt(rank)
        )
        streams.append(x)
    return streams


def streams_of(bench: Bench, split: Split) -> dict[str, Float[ndarray, "N D"]]:
    """Returns h_0 .. h_L at the examples, by site."""
    return capture(
        bench.model,
        split,
        stream_sites(bench.config.layers),
        tokens_per_batch=bench.tokens_per_batch,
    )
