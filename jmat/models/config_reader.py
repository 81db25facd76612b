"""Reads a config.json field by field, and refuses by name what would change the numbers
and is not implemented.
"""

import difflib
import json
import logging
import math
from collections.abc import Iterable, Mapping

import numpy as np

from jmat.models.transformers_fields import NOTHING_IF_NULL, known_to_transformers
from jmat.runtime.annotations import Fields, JsonObject, JsonValue
from jmat.runtime.errors import shortened, shortened_name

_MOST_BLOCKS = 1_000_000  # beyond any model, and a list of so many is still made at once
_LARGEST = 2**31 - 1  # of a size: what JAX can index
_MOST_LISTED = 20  # fields in one message
TINY, _HUGE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)

# Fields that never change a forward pass at inference: bookkeeping, generation defaults, dropout,
# other heads.
_NEUTRAL = frozenset(
    """
    architectures bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id mask_token_id
    unk_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id initializer_range
    initializer_factor model_type torch_dtype dtype transformers_version use_cache
    gradient_checkpointing id2label label2id num_labels problem_type finetuning_task
    task_specific_params output_attentions output_hidden_states output_scores output_past
    return_dict return_dict_in_generate torchscript use_bfloat16 tokenizer_class prefix language
    keys_to_ignore_at_inference do_sample early_stopping length_penalty max_length max_new_tokens
    min_length no_repeat_ngram_size encoder_no_repeat_ngram_size num_beams num_beam_groups
    num_return_sequences repetition_penalty temperature top_k top_p typical_p bad_words_ids
    begin_suppress_tokens suppress_tokens exponential_decay_length_penalty diversity_penalty
    remove_invalid_values tf_legacy_loss chunk_size_feed_forward classifier_dropout resid_pdrop
    embd_pdrop attn_pdrop hidden_dropout_prob attention_probs_dropout_prob name_or_path
    attn_implementation vocab_file jmat
    """.split()
)
# Fields that would change the numbers if they held anything else than this.
_FIXED: Mapping[str, tuple[object, ...]] = {
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "is_encoder_decoder": (False, None),
    "tie_encoder_decoder": (False, None),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "auto_map": (None,),
    "transformers_weights": (None,),
    "sparse_attention": (None,),
}


class ConfigReader:
    """Reads a config.json field by field; `finish` judges the fields that were not
    read.

    A field that transformers' own config class does not know cannot change what
    transformers computes: it is logged and passed over. One that it knows, that was not
    read and that is not known to be neutral is refused by name. All problems are
    collected and raised together, as one ValueError.

    Attributes:
      hf: the fields, each under the name that jmat reads.

    Args:
      hf: the config.json.
      ignore: fields to pass over because they do not change the numbers.
      aliases: other names of fields → the names that jmat reads.
      foreign: whether fields unknown to transformers are passed over; else they are
        refused like all others.
    """

    def __init__(
        self,
        hf: Fields,
        *,
        ignore: Iterable[str] = (),
        aliases: Mapping[str, str] | None = None,
        foreign: bool = True,
    ):
        self._problems: list[str] = []
        self._ignored = tuple(ignore)
        self._foreign = foreign
        self._given = tuple(hf)
        self.hf = self._under_our_names(hf, aliases or {})
        self._seen = set(self._ignored)

    def to_json(self) -> str:
        """Returns the config.json, each field under the name that jmat reads."""
        return json.dumps(self.hf)

    def get(self, name: str, default: JsonValue = None) -> JsonValue:
        """Returns the value of a field that may be absent."""
        self._seen.add(name)
        value = self.hf.get(name)
        return default if value is None else value

    def size(
        self, name: str, default: int | None = None, *, least: int = 1, most: int = _LARGEST
    ) -> int:
        """Returns a whole number from `least` (by default 1) to `most`."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self._problems.append(
                f"{name}={shortened(value)} should be a whole number above {least - 1}"
            )
            return least
        if value > most:
            self._problems.append(
                f"{name}={shortened(value)} is too large: jmat reads models of up to {most}"
            )
            return least
        return value

    def blocks(self, name: str, default: int) -> int:
        """Returns the number of blocks."""
        return self.size(name, default, most=_MOST_BLOCKS)

    def number(self, name: str, default: float) -> float:
        """Returns a number that is finite in float32."""
        value = self.get(name, default)
        if not is_number(value):
            self._problems.append(f"{name}={shortened(value)} should be a finite number of float32")
            return default
        return float(value)

    def positive(self, name: str, default: float) -> float:
        """Returns a number that is above 0 and finite in float32."""
        value = self.number(name, default)
        if value <= 0:
            self._problems.append(f"{name}={value!r} should be above 0")
        elif value < TINY:
            self._problems.append(
                f"{name}={value!r} is 0 in float32; it should be at least {TINY:.2g}"
            )
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Returns a boolean."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            self._problems.append(f"{name}={shortened(value)} should be true or false")
            return default
        return value

    def choice(self, name: str, default: str, choices: Iterable[str]) -> str:
        """Returns one of the choices that jmat implements."""
        value = self.get(name, default)
        if not isinstance(value, str) or value not in set(choices):
            implemented = ", ".join(sorted(choices))
            self._problems.append(
                f"{name}={shortened(value)} is not implemented (implemented: {implemented})"
            )
            return default
        return value

    def require(self, condition: bool, problem: str) -> None:
        """Notes a problem that involves several fields, if each of them was sound by
        itself.
        """
        malformed = [found.partition("=")[0] for found in self._problems]
        if not condition and not any(f"{name}=" in problem for name in malformed):
            self._problems.append(problem)

    def finish(
        self, *, neutral: Iterable[str] = (), fixed: Mapping[str, tuple[object, ...]] | None = None
    ) -> None:
        """Judges the fields that were not read.

        Args:
          neutral: fields of this architecture that never change the numbers.
          fixed: fields that would change the numbers if they held anything else than
            these values.

        Raises:
          ValueError: a field was malformed, holds a value that is not implemented, or
            is known to transformers and not to jmat; or a field to ignore is not there.
        """
        fixed = {**_FIXED, **(fixed or {})}
        known = _NEUTRAL.union(neutral, self._seen)
        unread = {
            name: value
            for name, value in self.hf.items()
            if name not in known and not name.startswith("_")
        }
        for name in [name for name in unread if name in fixed]:
            if (value := unread.pop(name)) not in fixed[name]:
                self._problems.append(
                    f"{name}={shortened(value)} is not implemented (implemented: "
                    f"{fixed[name][0]!r})"
                )
        unread = {
            name: value
            for name, value in unread.items()
            if value is not None or name not in NOTHING_IF_NULL
        }
        foreign = {}
        if unread and self._foreign:
            declared = known_to_transformers(self.hf["model_type"])
            foreign = {name: value for name, value in unread.items() if name not in declared}
        self._problems += [
            f"{name}={shortened(value)} is a field that jmat does not know "
            f"(if it does not change the numbers, load with ignore_config=({name!r},))"
            for name, value in unread.items()
            if name not in foreign
        ]
        self._check_ignored()
        if self._problems:
            family = self.hf.get("model_type", "unknown")
            raise ValueError(
                f"cannot load this {family} config.json: " + "; ".join(self._problems) + "."
            )
        if foreign:
            listed = [
                f"{shortened_name(name)}={shortened(value, 40)}"
                for name, value in list(foreign.items())[:_MOST_LISTED]
            ]
            if len(foreign) > _MOST_LISTED:
                listed.append(f"and {len(foreign) - _MOST_LISTED} more")
            logging.getLogger(__name__).warning(
                "config.json holds fields that no %s model of transformers reads, passed over here "
                "too: %s.",
                self.hf["model_type"],
                ", ".join(listed),
            )

    def _check_ignored(self) -> None:
        for name in self._ignored:
            if name not in self._given:
                near = difflib.get_close_matches(name, self._given)
                advice = f"; there is {' and '.join(near)}" if near else ""
                self._problems.append(f"there is no field {name!r} to ignore{advice}")

    def _under_our_names(self, hf: Fields, aliases: Mapping[str, str]) -> JsonObject:
        """Renames fields, and notes two names of one field that differ: transformers
        would take the alias.
        """
        renamed = dict(hf)
        for alias, name in aliases.items():
            if alias not in renamed:
                continue
            value = renamed.pop(alias)
            if value is None or alias in self._ignored:
                continue
            if renamed.get(name) not in (None, value) and name not in self._ignored:
                self._problems.append(
                    f"{alias}={shortened(value)} and {name}={shortened(renamed[name])} are two "
                    f"names of one field: leave out the wrong one (transformers would take {alias})"
                )
            renamed[name] = value
        return renamed


def is_number(value: object) -> bool:
    """Returns whether a value is a number, not a boolean, that is finite in float32."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        # compared before it is converted, which a whole number of 400 digits is not
        and -_HUGE <= value <= _HUGE
        and math.isfinite(value)
    )
