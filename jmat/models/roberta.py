"""RoBERTa (Liu et al. 2019), XLM-RoBERTa and CamemBERT: BERT whose positions start
after the padding id.
"""

import functools

from jmat.models.bert import Block, Embed, MaskedHead, decoder_keys, encoder_keys
from jmat.models.config import ModelConfig
from jmat.models.config_reader import ConfigReader
from jmat.models.family import Family, Key, dense_keys, norm_keys
from jmat.models.layers import ACTIVATIONS, NoNorm


def read_config(read: ConfigReader) -> ModelConfig:
    """Reads the config.json of RoBERTa. Raises ValueError for fields that jmat does not
    implement.
    """
    family = read.hf["model_type"]
    width, heads = read.size("hidden_size", 768), read.size("num_attention_heads", 12)
    read.require(
        width % heads == 0, f"hidden_size={width} is not a multiple of num_attention_heads={heads}"
    )
    offset = 1 + read.size("pad_token_id", 1, least=0)
    rows = read.size("max_position_embeddings", 512)
    read.require(
        rows > offset,
        f"max_position_embeddings={rows} leaves no position after pad_token_id={offset - 1}",
    )
    config = ModelConfig(
        family=family,
        vocab_size=read.size("vocab_size", 50265 if family == "roberta" else 30522),
        num_positions=max(rows - offset, 1),
        position_offset=offset,
        type_vocab_size=read.size("type_vocab_size", 2),
        width=width,
        layers=read.blocks("num_hidden_layers", 12),
        heads=heads,
        head_width=width // heads,
        ffn_width=read.size("intermediate_size", 3072),
        activation=read.choice("hidden_act", "gelu", ACTIVATIONS),
        norm_eps=read.positive("layer_norm_eps", 1e-12),
        causal=read.flag("is_decoder", False),
        pre_norm=False,
        tied_head=read.flag("tie_word_embeddings", True),
        init_std=read.number("initializer_range", 0.02),
        hf=read.to_json(),
    )
    read.finish(fixed={"position_embedding_type": ("absolute",)})
    return config


def keys(config: ModelConfig) -> list[Key]:
    """Returns the checkpoint's tensors."""
    table = encoder_keys(config)
    if config.has_head:
        table += [
            *dense_keys("lm_head.dense", "head.dense"),
            *norm_keys("lm_head.layer_norm", "head.norm"),
        ]
        table += decoder_keys(config, "lm_head.bias", "lm_head.decoder")
    return table


FAMILY = Family(
    config=read_config,
    embed=Embed,
    block=Block,
    final_norm=NoNorm,
    head=functools.partial(MaskedHead, activation="gelu"),  # whatever the blocks use
    keys=keys,
    prefixes=("roberta.",),
    head_prefixes=("lm_head.",),
    tied=("lm_head.decoder.weight", "embeddings.word_embeddings.weight"),
    ignored=(r"embeddings\.(position_ids|token_type_ids)", r"pooler\..*"),
)
