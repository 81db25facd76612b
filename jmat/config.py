"""What a model's numbers depend on: one frozen `ModelConfig` for every architecture, read from a config.json."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary position embedding: pairs of coordinates of queries and keys are turned by position · frequency.

    `jmat.rotary` says how the frequencies follow from these.
    """

    width: int  # coordinates of a head that are turned; the rest of them pass unchanged
    theta: float = 10000.0
    kind: str = "default"  # how frequencies are scaled: default, linear, llama3 or yarn
    factor: float = 1.0  # how much longer than in training texts may be
    trained_positions: int = 0  # longest text in training, before the scaling
    slow_turns: float = 1.0  # pairs that turn less often than this over `trained_positions` are slowed by `factor`
    fast_turns: float = 1.0  # those that turn more often stay; in between is a ramp
    whole_pairs: bool = True  # (yarn) the ramp starts and ends at whole pairs
    amplitude: float = 1.0  # of cosine and sine


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape and the arithmetic of one model.

    Axis letters used throughout jmat: B batch, T length, D model width, H heads, K head width, F feed-forward width,
    V vocabulary, L blocks, N examples.
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
    windows: tuple[int, ...] = ()  # per block: a token sees the last so many tokens, itself included; (): all
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
    residual_from_norm: bool = False  # the residual adds start from the norm's output instead of its input
    embed_width: int | None = None  # of the token table; D by default
    embed_scale: float = 1.0
    init_std: float = 0.02
    # The config.json that this was read from: what a saved copy of the model starts from.
    hf: str = dataclasses.field(default="{}", repr=False, compare=False)

    def to_hf(self) -> dict[str, Any]:
        """The Hugging Face config.json of this model."""
        return json.loads(self.hf)


# Fields that never change a forward pass at inference: bookkeeping, generation defaults, dropout, other heads.
_NEUTRAL = frozenset(
    """
    architectures bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id mask_token_id unk_token_id
    decoder_start_token_id forced_bos_token_id forced_eos_token_id initializer_range initializer_factor
    model_type torch_dtype dtype transformers_version use_cache gradient_checkpointing id2label label2id
    num_labels problem_type finetuning_task task_specific_params output_attentions output_hidden_states
    output_scores output_past return_dict return_dict_in_generate torchscript use_bfloat16 tokenizer_class
    prefix language keys_to_ignore_at_inference do_sample early_stopping length_penalty max_length
    max_new_tokens min_length no_repeat_ngram_size encoder_no_repeat_ngram_size num_beams num_beam_groups
    num_return_sequences repetition_penalty temperature top_k top_p typical_p bad_words_ids
    begin_suppress_tokens suppress_tokens exponential_decay_length_penalty diversity_penalty
    remove_invalid_values tf_legacy_loss chunk_size_feed_forward classifier_dropout resid_pdrop embd_pdrop
    attn_pdrop hidden_dropout_prob attention_probs_dropout_prob name_or_path attn_implementation vocab_file
    jmat
    """.split()
)
# Fields that would change the numbers if they held anything else than this.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "is_encoder_decoder": (False, None),
    "tie_encoder_decoder": (False, None),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "auto_map": (None,),
    "sparse_attention": (None,),
}


class ConfigReader:
    """Reads a config.json field by field; `finish` refuses by name what was not read and is not known to be neutral.

    All problems are collected and raised together, as one ValueError.
    """

    def __init__(self, hf: Mapping[str, Any], *, ignore: Iterable[str] = ()):
        self._hf = hf
        self._seen = set(ignore)
        self._problems: list[str] = []

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field that may be absent."""
        self._seen.add(name)
        value = self._hf.get(name)
        return default if value is None else value

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number above zero."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self._problems.append(f"{name}={value!r} should be a whole number above 0")
            return 1
        return value

    def number(self, name: str, default: float) -> float:
        """A finite number."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not -1e300 < value < 1e300:  # NaN fails too
            self._problems.append(f"{name}={value!r} should be a finite number")
            return default
        return float(value)

    def positive(self, name: str, default: float) -> float:
        """A number above 0."""
        value = self.number(name, default)
        if value <= 0:
            self._problems.append(f"{name}={value!r} should be above 0")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """A boolean."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            self._problems.append(f"{name}={value!r} should be true or false")
            return default
        return value

    def choice(self, name: str, default: str, choices: Iterable[str]) -> str:
        """One of the choices that jmat implements."""
        value = self.get(name, default)
        if not isinstance(value, str) or value not in set(choices):
            self._problems.append(f"{name}={value!r} is not implemented (implemented: {', '.join(sorted(choices))})")
            return default
        return value

    def require(self, condition: bool, problem: str) -> None:
        """Notes a problem that involves several fields, if each of them was sound by itself."""
        malformed = [found.partition("=")[0] for found in self._problems]
        if not condition and not any(f"{name}=" in problem for name in malformed):
            self._problems.append(problem)

    def finish(self, *, neutral: Iterable[str] = (), fixed: Mapping[str, tuple[Any, ...]] | None = None) -> None:
        """Raises ValueError if a field was malformed, holds a value that is not implemented, or is unknown to jmat."""
        fixed = {**_FIXED, **(fixed or {})}
        known = _NEUTRAL.union(neutral, self._seen)
        for name, value in self._hf.items():
            if name in known or name.startswith("_"):
                continue
            if name not in fixed:
                self._problems.append(
                    f"{name}={value!r} is a field that jmat does not know "
                    f"(if it does not change the numbers, load with ignore_config=({name!r},))"
                )
            elif value not in fixed[name]:
                self._problems.append(f"{name}={value!r} is not implemented (implemented: {fixed[name][0]!r})")
        if self._problems:
            family = self._hf.get("model_type", "unknown")
            raise ValueError(f"cannot load this {family} config.json: " + "; ".join(self._problems) + ".")
