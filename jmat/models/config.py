"""Defines `ModelConfig`: all that a model's numbers depend on, for every architecture,
from its config.json.
"""

import dataclasses
import json

from jmat.runtime.annotations import JsonObject


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Holds the parameters of rotary position embedding: pairs of coordinates of
    queries and keys are turned by position · frequency.

    `jmat.models.rotary` says how the frequencies follow from these.
    """

    width: int  # coordinates of a head that are turned; the rest of them pass unchanged
    theta: float = 10000.0
    kind: str = "default"  # how frequencies are scaled: default, linear, llama3 or yarn
    factor: float = 1.0  # how much longer than in training texts may be
    trained_positions: int = 0  # longest text in training, before the scaling
    # pairs that turn less often than this over `trained_positions` are slowed by `factor`
    slow_turns: float = 1.0
    fast_turns: float = 1.0  # those that turn more often stay; in between is a ramp
    whole_pairs: bool = True  # (yarn) the ramp starts and ends at whole pairs
    amplitude: float = 1.0  # of cosine and sine


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Holds the shape and the arithmetic of one model.

    Axis letters used throughout jmat: B batch, T length, D model width, H heads, K head
    width, F feed-forward width, V vocabulary, L blocks, N examples.
    """

    family: str  # Hugging Face's `model_type`
    vocab_size: int  # V
    num_positions: int  # longest text that the model can read
    width: int  # D
    layers: int  # L
    heads: int  # H
    head_width: int  # K
    ffn_width: int  # F
    activation: str
    norm_eps: float
    causal: bool
    tied_head: bool
    has_head: bool = True
    type_vocab_size: int = 0  # token types that the embedding knows; 0: none
    # What differs between families; the defaults are what most of them do.
    kv_heads: int | None = None  # heads that keys and values have; H by default
    scale_attention: bool = True  # by 1/sqrt(K)
    scale_attention_by_layer: bool = False  # by 1/(i + 1) in block i, besides
    # per block: a token sees the last so many tokens, itself included; (): all
    windows: tuple[int, ...] = ()
    rotary: Rotary | None = None  # rotary positions
    alibi: bool = False  # attention biased by distance
    position_offset: int = 0  # row of the position table that position 0 reads
    qkv_bias: bool = True
    out_bias: bool = True  # of the projection that ends attention
    ffn_bias: bool = True
    gated_ffn: bool = False  # activation(gate(x)) · up(x)
    qk_norm: bool = False  # each head's queries and keys are normed
    norm_affine: bool = True  # norms have parameters
    norm_scale_offset: float = 0.0  # what is added to the norms' stored scale
    pre_norm: bool = True
    final_norm: bool = True
    parallel: bool = False  # attention and feed-forward read the same stream
    # the residual adds start from the norm's output instead of its input
    residual_from_norm: bool = False
    embed_width: int | None = None  # of the token table; D by default
    embed_scale: float = 1.0
    init_std: float = 0.02
    # The config.json that this was read from: what a saved copy of the model starts from.
    hf: str = dataclasses.field(default="{}", repr=False, compare=False)

    def to_hf(self) -> JsonObject:
        """Returns the Hugging Face config.json of this model."""
        return json.loads(self.hf)
