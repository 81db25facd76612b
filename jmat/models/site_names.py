"""Names that other libraries have for sites: interp-engine, TransformerLens 4 and
nnterp.

`keep=` and `sites=` take them, too.
"""

import functools
import re

from jmat.models.config import ModelConfig

_STREAM, _BLOCK, _MID = "the stream into the block", "", "mid"
# A part of block i → its names, in the order of the libraries above.
TABLE: dict[str, tuple[str, ...]] = {
    _STREAM: ("resid_pre.{i}", "blocks.{i}.hook_resid_pre", "layers_input[{i}]"),
    "attn.in": ("attn_in.{i}", "blocks.{i}.attn.hook_in", "attentions_input[{i}]"),
    "attn.z": ("z.{i}", "blocks.{i}.attn.hook_z"),
    "attn.pattern": ("attn_probs.{i}", "blocks.{i}.attn.hook_pattern"),
    "attn": ("attn_out.{i}", "blocks.{i}.attn.hook_out", "attentions_output[{i}]"),
    _MID: ("resid_mid.{i}", "blocks.{i}.hook_resid_mid"),
    "ffn.in": ("mlp_in.{i}", "blocks.{i}.mlp.hook_in", "mlps_input[{i}]"),
    "ffn.hidden": ("mlp_act.{i}", "blocks.{i}.mlp.hook_post"),
    "ffn": ("mlp_out.{i}", "blocks.{i}.mlp.hook_out", "mlps_output[{i}]"),
    _BLOCK: ("resid_post.{i}", "blocks.{i}.hook_resid_post", "layers_output[{i}]"),
}
_PARTS = {name: part for part, names in TABLE.items() for name in names}
_NUMBERED = re.compile(r"([^0-9]+)(0|[1-9][0-9]{0,5})([^0-9]*)")


def site_of(name: str, config: ModelConfig) -> str:
    """Returns the site that another library's name means; any other name as it is.

    Raises:
      ValueError: the model has no such block, or nothing of this name in its blocks.
    """
    match = _NUMBERED.fullmatch(name)
    part = None if match is None else _PARTS.get(f"{match[1]}{{i}}{match[3]}")
    if match is None or part is None:
        return name
    i = int(match[2])
    if i >= config.layers:
        raise ValueError(
            f"unknown site {name!r}: the model has the blocks 0 .. {config.layers - 1}."
        )
    if not _has(part, config):
        raise ValueError(
            f"site {name!r} does not exist in this model: its blocks add attention and "
            "feed-forward to the stream at once, and there is no stream between the two."
        )
    return _site(part, i)


@functools.cache
def aliases(config: ModelConfig) -> dict[str, str]:
    """Returns the sites of a model by all names that other libraries have for them, in
    the order of computation.
    """
    return {
        name.format(i=i): _site(part, i)
        for i in range(config.layers)
        for part, names in TABLE.items()
        if _has(part, config)
        for name in names
    }


def _has(part: str, config: ModelConfig) -> bool:
    """Returns whether other libraries have a part in blocks of this wiring."""
    return part != _MID or not config.parallel


def _site(part: str, i: int) -> str:
    if part == _STREAM:
        return f"block.{i - 1}" if i else "embed"
    return f"block.{i}.{part}" if part else f"block.{i}"
