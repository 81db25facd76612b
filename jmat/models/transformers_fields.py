"""Lists the fields of a config.json that transformers knows: only these can change what
it computes.
"""

import functools

from jmat.runtime.transformers_package import transformers_package

# Read by code of transformers that all models share, or by a model's own code, though no config
# class declares them; or popped from config.json before its class sees it.
# `tests/test_foreign_fields.py` holds this list against the source of the installed transformers.
READ_UNDECLARED = frozenset(
    """
    attention_chunk_size attribute_map chain_hidden_post_norm decoder device_map distributed_config
    dtype_plan embedding_size encoder experts_implementation fusion_config generator
    gradient_checkpointing head_dim hf_quantizer is_causal is_quantized kv_sharing_modes layer_types
    logits_mup_width_multiplier mtp_hidden_states_first mtp_layer_types mtp_mlp_layer_types
    mtp_per_layer_config n_embed num_mtp_layers original_max_position_embeddings
    partial_rotary_factor per_layer_config pruned_heads quant_method quantization_config
    rope_parameters rope_scaling rope_theta rotary_emb_base rotary_pct sliding_window text_config
    text_encoder tie_encoder_decoder tie_last_hidden_states tie_word_embeddings
    token_classification_bias torchscript transformers_weights unpadded_vocab_size
    use_bidirectional_attention vision_config weight_mapping
    """.split()
)
# Those that say nothing where they are null: the code asks for them with None as default.
NOTHING_IF_NULL = READ_UNDECLARED - {"is_causal"}


@functools.cache
def known_to_transformers(model_type: str) -> frozenset[str]:
    """Returns the fields that a config of this type declares, inherits, understands by
    another name, or reads.

    Imports transformers, which takes seconds where torch is installed: only asked where
    a config.json holds a field that jmat does not know.
    """
    config = transformers_package().CONFIG_MAPPING[model_type]
    return frozenset({*dir(config), *config.attribute_map, *READ_UNDECLARED})
