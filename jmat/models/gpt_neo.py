"""GPT-Neo (Black et al. 2021; the TinyStories models): GPT-2 whose blocks may look back
over a short window only.
"""

from jmat.models.config import ModelConfig
from jmat.models.config_reader import ConfigReader
from jmat.models.family import TRANSPOSED, Family, Key, dense_keys, norm_keys
from jmat.models.gpt2 import Block, Embed
from jmat.models.layers import ACTIVATIONS, Head, LayerNorm
from jmat.runtime.errors import shortened


def read_config(read: ConfigReader) -> ModelConfig:
    """Reads the config.json of GPT-Neo. Raises ValueError for fields that jmat does not
    implement.
    """
    width = read.size("hidden_size", 2048)
    heads = read.size("num_heads", 16)
    layers = read.blocks("num_layers", 24)
    num_positions = read.size("max_position_embeddings", 2048)
    vocab_size = read.size("vocab_size", 50257)
    read.require(width % heads == 0, f"hidden_size={width} is not a multiple of num_heads={heads}")
    kinds = _attention_kinds(read, layers)
    window = {"global": num_positions, "local": read.size("window_size", 256)}
    config = ModelConfig(
        family="gpt_neo",
        vocab_size=vocab_size,
        type_vocab_size=vocab_size,  # type ids are read from the token table
        num_positions=num_positions,
        width=width,
        layers=layers,
        heads=heads,
        head_width=width // heads,
        ffn_width=read.size("intermediate_size", 4 * width),
        activation=read.choice("activation_function", "gelu_new", ACTIVATIONS),
        norm_eps=read.positive("layer_norm_epsilon", 1e-5),
        causal=True,
        tied_head=read.flag("tie_word_embeddings", True),
        scale_attention=False,
        windows=tuple(window[kind] for kind in kinds),
        qkv_bias=False,
        init_std=read.number("initializer_range", 0.02),
        hf=read.to_json(),
    )
    summary = ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")
    neutral = [
        "embed_dropout",
        "resid_dropout",
        "attention_dropout",
        *(f"summary_{name}" for name in summary),
    ]
    read.finish(neutral=neutral, fixed={"attention_layers": (kinds,)})
    return config


def _attention_kinds(read: ConfigReader, layers: int) -> list[str]:
    """Returns `global` or `local` for each block, from [[[kind, …], times], …]."""
    types = read.get("attention_types", [[["global", "local"], layers // 2]])
    kinds: list[str] = []
    try:
        for pattern, times in types:
            # Before the list is made: a number of times may be anything.
            if not isinstance(pattern, list) or len(kinds) + times * len(pattern) > layers:
                kinds = []
                break
            kinds += pattern * times
        sound = len(kinds) == layers and set(kinds) <= {"global", "local"}
    except (TypeError, ValueError, OverflowError):
        sound = False
    if sound:
        return kinds
    read.require(
        False,
        f"attention_types={shortened(types)} should name global or local for each of {layers} "
        "blocks",
    )
    return ["global"] * layers


def keys(config: ModelConfig) -> list[Key]:
    """Returns the checkpoint's tensors. Unlike GPT-2's, its kernels are [out, in], and
    q, k and v are apart.
    """
    table = [
        Key("wte.weight", ("embed.tokens.table",)),
        Key("wpe.weight", ("embed.positions.table",)),
        *norm_keys("ln_f", "final_norm"),
    ]
    if config.has_head and not config.tied_head:
        table.append(Key("lm_head.weight", ("head.out.kernel",), TRANSPOSED))
    for i in range(config.layers):
        file, ours = f"h.{i}", f"blocks.{i}"
        for part in "qkv":
            table += dense_keys(
                f"{file}.attn.attention.{part}_proj", f"{ours}.attn.{part}", bias=False
            )
        table += [
            *norm_keys(f"{file}.ln_1", f"{ours}.ln_1"),
            *dense_keys(f"{file}.attn.attention.out_proj", f"{ours}.attn.o"),
            *norm_keys(f"{file}.ln_2", f"{ours}.ln_2"),
            *dense_keys(f"{file}.mlp.c_fc", f"{ours}.ffn.up"),
            *dense_keys(f"{file}.mlp.c_proj", f"{ours}.ffn.down"),
        ]
    return table


FAMILY = Family(
    config=read_config,
    aliases={"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
    embed=Embed,
    block=Block,
    final_norm=LayerNorm,
    head=Head,
    keys=keys,
    prefixes=("transformer.",),
    head_prefixes=("lm_head.",),
    tied=("lm_head.weight", "wte.weight"),
    # Causal-mask buffers of old files.
    ignored=(r"h\.\d+\.attn\.attention\.(bias|masked_bias)",),
)
