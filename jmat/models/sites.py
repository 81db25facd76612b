"""Sites: the names under which every intermediate value of a model is read (`keep=`) and replaced (`sites=`).

The names are the same for every architecture; `i` counts blocks from 0:

| site | value | replaced: a callable stands in for |
|---|---|---|
| `embed` | h_0, the stream that enters block 0 | tokens → h_0 |
| `block.{i}.ln_1`, `block.{i}.ln_2` | output of a block's first and second norm | the norm |
| `block.{i}.attn`, `block.{i}.ffn` | output of attention, feed-forward, before the residual add | the sub-module |
| `block.{i}.attn.head.{h}` | output [B, T, K] of one head, before the output projection | the head (attn's input → K) |
| `block.{i}.mid` | stream after the attention add | block input → mid |
| `block.{i}` | h_{i+1}, stream after the block | the whole block |
| `final_norm` | the stream as the head reads it | the norm (the identity where a model has none) |
| `logits` | prediction scores, float32 | the head |

`block.{i}.ln_1.in`, `.attn.in`, `.ln_2.in`, `.ffn.in` and `final_norm.in` are the inputs of those parts; they can be
kept, not replaced.

What the residual arithmetic is, by wiring:
- pre-norm (GPT-2, GPT-Neo, OPT, BLOOM, LLaMA and its relatives, NeoX where it is sequential):
  `mid = in + attn(ln_1(in))`, `out = mid + ffn(ln_2(mid))`;
- post-norm (BERT, RoBERTa, DistilBERT, OPT-350m):
  `mid = in + attn(in)`, `out = ln_2(ln_1(mid) + ffn(ln_1(mid)))`;
- parallel (NeoX, Pythia): `mid = in + attn(ln_1(in))`, `out = mid + ffn(ln_2(in))`;
- pre-norm with the residual from the norm (a BLOOM option):
  `mid = ln_1(in) + attn(ln_1(in))`, `out = ln_2(mid) + ffn(ln_2(mid))`.

`embed` is all that comes before block 0: positions where they are embedded, BERT's and BLOOM's norm, Gemma's scale,
OPT-350m's projection up to D. `logits` is all that comes after the final norm: the unembedding, BERT's transform,
OPT-350m's projection down. `final_norm` is therefore D wide everywhere, and is the identity in post-norm models.
"""

import difflib
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jmat.models.config import ModelConfig
from jmat.runtime.errors import first_line

SUBMODULES = ("ln_1", "attn", "ln_2", "ffn")
_REPLACEABLE = (*SUBMODULES, "mid")
_READABLE = (*_REPLACEABLE, *(f"{name}.in" for name in SUBMODULES))

Site = Callable[[jax.Array], jax.Array]


@functools.cache
def readable(layers: int, heads: int) -> dict[str, None]:
    """All names that `keep=` takes for a model of this many blocks and heads (an ordered set)."""
    parts = (*_READABLE, *(f"attn.head.{h}" for h in range(heads)))
    blocks = [name for i in range(layers) for name in (*(f"block.{i}.{part}" for part in parts), f"block.{i}")]
    return dict.fromkeys(["embed", *blocks, "final_norm.in", "final_norm", "logits"])


@functools.cache
def replaceable(layers: int, heads: int) -> dict[str, None]:
    """All names that `sites=` takes for a model of this many blocks and heads (an ordered set)."""
    return dict.fromkeys(name for name in readable(layers, heads) if not name.endswith(".in"))


def width(site: str, config: ModelConfig) -> int:
    """The last axis of a site's values: D, V of `logits`, K of a single head."""
    if site == "logits":
        return config.vocab_size
    return config.head_width if ".attn.head." in site else config.width


def check_names(names: Iterable[str], config: ModelConfig, *, replace: bool) -> None:
    """Raises ValueError for names that are not sites of the model, with the nearest valid ones and a summary of all."""
    L, H = config.layers, config.heads
    valid = replaceable(L, H) if replace else readable(L, H)
    unknown = [name for name in names if name not in valid]
    if not unknown:
        return
    name = unknown[0]
    if replace and name in readable(L, H):
        raise ValueError(f"site {name!r} is an input: it can be kept, not replaced; replace {name[:-3]!r} instead.")
    near = difflib.get_close_matches(name, valid, n=3)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    parts = ", ".join(f"block.{{i}}.{part}" for part in (_REPLACEABLE if replace else _READABLE))
    raise ValueError(
        f"unknown site {name!r}.{hint} Valid for this model: embed, {parts}, block.{{i}}.attn.head.{{h}}, block.{{i}} "
        f"(i = 0..{L - 1}, h = 0..{H - 1}), {'' if replace else 'final_norm.in, '}final_norm, logits."
    )


def check_callables(sites: Mapping[str, Any]) -> None:
    """Raises ValueError for replacements that are not callable pytrees: a bare function would be traced each time."""
    for name, site in sites.items():
        leaves = jax.tree.leaves(site)
        if not callable(site) or any(leaf is site for leaf in leaves):
            raise ValueError(
                f"the replacement for site {name!r} is a {type(site).__name__}; expected a callable pytree such as "
                "jmat.Linear(W), a dataclass registered with JAX, or jax.tree_util.Partial(function)."
            )


class Tap:
    """Calls the parts of one block while it is traced: records what is kept, lets replacements stand in.

    `tap(name, part, x, *context)` is `part(x, *context)`, or `replacement(x)` where the site is replaced; the part is
    then never called and costs nothing. `width` is the part's output width where that is not its input's.
    """

    def __init__(self, sites: Mapping[str, Site], keep: tuple[str, ...], read_at: jax.Array | None):
        self._sites = sites
        self._keep = frozenset(keep)
        self._read_at = read_at
        self._kept: dict[str, jax.Array] = {}
        self._used: set[str] = set()

    def __call__(
        self, name: str, part: Callable[..., jax.Array], x: jax.Array, *context: Any, width: int | None = None
    ) -> jax.Array:
        self.read(f"{name}.in", x)
        with jax.named_scope(name):
            if name in self._sites:
                self._used.add(name)
                y = replace(f"block.{{i}}.{name}", self._sites[name], x, (*x.shape[:-1], width or x.shape[-1]))
            else:
                y = part(x, *context)
        return self.read(name, y)

    def touches(self, prefix: str) -> bool:
        """Returns whether any site that starts so is kept or replaced."""
        return any(name.startswith(prefix) for name in (*self._keep, *self._sites))

    def read(self, name: str, value: jax.Array) -> jax.Array:
        """Records the value if it is kept; returns it unchanged."""
        if name in self._keep:
            self._kept[name] = gather(value, self._read_at)
        return value

    def finish(self) -> dict[str, jax.Array]:
        """Returns the values that were kept, by name.

        Raises ValueError for a site inside a part that is replaced, which was never reached.
        """
        unreached = (self._keep - self._kept.keys()) | (self._sites.keys() - self._used)
        if unreached:
            raise ValueError(
                f"site 'block.{{i}}.{min(unreached)}' is never reached: the part of the block that holds it is "
                "replaced, and so not computed."
            )
        return self._kept


def replace(name: str, site: Site, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Applies a replacement. Raises ValueError if it does not return the shape of what it stands in for."""
    try:
        y = site(x)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the replacement for site {name!r} does not take its input {x.dtype} {list(x.shape)}: {first_line(error)}"
        ) from error
    if y.shape != shape:
        raise ValueError(
            f"the replacement for site {name!r} returned shape {y.shape} for an input of {x.shape}; expected {shape}."
        )
    return y.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else y


@jax.jit
def gather(x: jax.Array, read_at: jax.Array | None) -> jax.Array:
    """Reads x [B, T, ...] at positions [B] → [B, ...], or [B, P] → [B, P, ...]; all of x where `read_at` is None."""
    if read_at is None:
        return x
    # Row by row: the compiler then knows that a device needs no other device's rows.
    return jax.vmap(lambda row, at: row[at])(x, read_at)


def stream_sites(layers: int) -> tuple[str, ...]:
    """The sites of h_0 .. h_L."""
    return ("embed", *(f"block.{i}" for i in range(layers)))
