"""DistilBERT (Sanh et al. 2019): BERT with half the blocks and without token types."""

from jmat.models.bert import Block, Embed, MaskedHead
from jmat.models.config import ModelConfig
from jmat.models.config_reader import ConfigReader
from jmat.models.family import TRANSPOSED, Family, Key, dense_keys, norm_keys
from jmat.models.layers import ACTIVATIONS, NoNorm


def read_config(read: ConfigReader) -> ModelConfig:
    """Reads the config.json of DistilBERT. Raises ValueError for fields that jmat does
    not implement.
    """
    width, heads = read.size("dim", 768), read.size("n_heads", 12)
    read.require(width % heads == 0, f"dim={width} is not a multiple of n_heads={heads}")
    config = ModelConfig(
        family="distilbert",
        vocab_size=read.size("vocab_size", 30522),
        num_positions=read.size("max_position_embeddings", 512),
        width=width,
        layers=read.blocks("n_layers", 6),
        heads=heads,
        head_width=width // heads,
        ffn_width=read.size("hidden_dim", 3072),
        activation=read.choice("activation", "gelu", ACTIVATIONS),
        norm_eps=1e-12,
        causal=False,
        pre_norm=False,
        tied_head=read.flag("tie_word_embeddings", True),
        init_std=read.number("initializer_range", 0.02),
        hf=read.to_json(),
    )
    # Sinusoidal positions are stored like learned ones.
    neutral = ["dropout", "attention_dropout", "qa_dropout", "seq_classif_dropout"]
    read.finish(neutral=[*neutral, "sinusoidal_pos_embds", "tie_weights_"])
    return config


def keys(config: ModelConfig) -> list[Key]:
    """Returns the checkpoint's tensors."""
    table = [
        Key("embeddings.word_embeddings.weight", ("embed.tokens.table",)),
        Key("embeddings.position_embeddings.weight", ("embed.positions.table",)),
        *norm_keys("embeddings.LayerNorm", "embed.norm"),
    ]
    for i in range(config.layers):
        file, ours = f"transformer.layer.{i}", f"blocks.{i}"
        table += [
            *dense_keys(f"{file}.attention.q_lin", f"{ours}.attn.q"),
            *dense_keys(f"{file}.attention.k_lin", f"{ours}.attn.k"),
            *dense_keys(f"{file}.attention.v_lin", f"{ours}.attn.v"),
            *dense_keys(f"{file}.attention.out_lin", f"{ours}.attn.o"),
            *norm_keys(f"{file}.sa_layer_norm", f"{ours}.ln_1"),
            *dense_keys(f"{file}.ffn.lin1", f"{ours}.ffn.up"),
            *dense_keys(f"{file}.ffn.lin2", f"{ours}.ffn.down"),
            *norm_keys(f"{file}.output_layer_norm", f"{ours}.ln_2"),
        ]
    if config.has_head:
        table += [
            *dense_keys("vocab_transform", "head.dense"),
            *norm_keys("vocab_layer_norm", "head.norm"),
            Key("vocab_projector.bias", ("head.bias",)),
        ]
        if not config.tied_head:
            table.append(Key("vocab_projector.weight", ("head.out.kernel",), TRANSPOSED))
    return table


FAMILY = Family(
    config=read_config,
    aliases={
        "hidden_size": "dim",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    },
    embed=Embed,
    block=Block,
    final_norm=NoNorm,
    head=MaskedHead,
    keys=keys,
    prefixes=("distilbert.",),
    head_prefixes=("vocab_",),
    tied=("vocab_projector.weight", "embeddings.word_embeddings.weight"),
    ignored=(r"embeddings\.position_ids",),
)
