"""Names every intermediate value of a model, to be read (`keep=`) and changed
(`sites=`).

The names are the same for every architecture; `i` counts blocks from 0, `h` heads:

| site | value | what stands in for it gets, and gives the value |
|---|---|---|
| `embed` | h_0 [B, T, D], the stream that enters block 0 | tokens [B, T] |
| `block.{i}.ln_1`, `.ln_2` | output [B, T, D] of the first and second norm | the norm's input |
| `block.{i}.attn`, `.ffn` | output [B, T, D] of the part, before the residual add | its input |
| `block.{i}.attn.q` | queries [B, T, H, K], before norms and rotary positions | attention's input |
| `block.{i}.attn.k`, `.attn.v` | keys, values [B, T, G, K], G = `kv_heads` | attention's input |
| `block.{i}.attn.scores` | `scale · q kᵀ + bias` [B, H, T, T], unmasked | attention's input |
| `block.{i}.attn.pattern` | their softmax [B, H, T, T] (query, key) | the masked scores |
| `block.{i}.attn.z` | all heads' outputs [B, T, H, K], before projection | attention's input |
| `block.{i}.attn.head.{h}` | one head of `attn.z`, [B, T, K] | attention's input |
| `block.{i}.ffn.hidden` | neurons [B, T, F]: what the last projection of `ffn` reads | its input |
| `block.{i}.mid` | stream [B, T, D] after the attention add | (a sum: it is read only) |
| `block.{i}` | h_{i+1} [B, T, D], the stream after the block | h_i |
| `final_norm` | the stream [B, T, D] as the head reads it | h_L |
| `logits` | prediction scores [B, T, V], float32 | the output of `final_norm` |

`block.{i}.ln_1.in`, `.attn.in`, `.ln_2.in`, `.ffn.in` and `final_norm.in` are the
inputs of those parts; they are read only, too. `final_norm` is the identity where a
model has no final norm.

`sites=` takes edits, which compute the part and change its output (`jmat.Edit`, `Add`,
`Scale`, `At`; see `jmat.models.edits`), and any other callable pytree, which stands in
for the part: the part is not computed then, nor are the sites inside it, and to ask for
one of them is an error. Heads come before `attn.z`: what is done to a head shows there.
Masked places have ordinary scores, and the mask is applied after them: so no edit of
scores lets a token look where it may not. An edit of the pattern can.

In names, `*` stands for any characters but a dot, or for any at all at the beginning:
`block.*.attn`, `*.ffn.hidden`, `block.*` (the streams h_1 .. h_L). Of the sites that
exist, a pattern names those in the blocks that are run. A site that is named by itself
goes by that entry of `sites=`, whatever patterns match it too; two patterns that match
one site are an error. The names of interp-engine, TransformerLens and nnterp are taken,
too (`jmat.models.site_names`), and what is kept then has the name that was asked for.

The wiring decides the residual arithmetic:

- pre-norm (GPT-2, GPT-Neo, OPT, BLOOM, LLaMA and its relatives, NeoX where it is
  sequential): `mid = in + attn(ln_1(in))`, `out = mid + ffn(ln_2(mid))`;
- post-norm (BERT, RoBERTa, DistilBERT, OPT-350m):
  `mid = in + attn(in)`, `out = ln_2(ln_1(mid) + ffn(ln_1(mid)))`;
- parallel (NeoX, Pythia): `mid = in + attn(ln_1(in))`, `out = mid + ffn(ln_2(in))`;
- pre-norm with the residual from the norm (a BLOOM option):
  `mid = ln_1(in) + attn(ln_1(in))`, `out = ln_2(mid) + ffn(ln_2(mid))`.

`embed` is all that comes before block 0: positions where they are embedded, BERT's and
BLOOM's norm, Gemma's scale, OPT-350m's projection up to D. `logits` is all that comes
after the final norm: the unembedding, BERT's transform, OPT-350m's projection down.
`final_norm` is therefore D wide everywhere, and is the identity in post-norm models.
"""

import difflib
import functools
import re
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jmat.models.config import ModelConfig
from jmat.models.family import Transformer, check_model
from jmat.models.site_names import aliases, site_of

SUBMODULES = ("ln_1", "attn", "ln_2", "ffn")
_INSIDE = ("attn.q", "attn.k", "attn.v", "attn.scores", "attn.pattern", "attn.z", "ffn.hidden")
_CHANGEABLE = (*SUBMODULES, *_INSIDE)
_READABLE = (*_CHANGEABLE, "mid", *(f"{name}.in" for name in SUBMODULES))

# What stands in for a part, or edits its output: see `jmat.models.edits`.
Site = Callable[..., jax.Array]


@functools.cache
def readable(layers: int, heads: int) -> dict[str, None]:
    """Returns all names that `keep=` takes for a model of this many blocks and heads
    (an ordered set).
    """
    parts = (*_READABLE, *(f"attn.head.{h}" for h in range(heads)))
    blocks = [
        name
        for i in range(layers)
        for name in (*(f"block.{i}.{part}" for part in parts), f"block.{i}")
    ]
    return dict.fromkeys(["embed", *blocks, "final_norm.in", "final_norm", "logits"])


@functools.cache
def replaceable(layers: int, heads: int) -> dict[str, None]:
    """Returns all names that `sites=` takes for a model of this many blocks and heads
    (an ordered set).
    """
    return dict.fromkeys(
        name for name in readable(layers, heads) if not name.endswith((".in", ".mid"))
    )


def place_shape(site: str, config: ModelConfig, length: int | None = None) -> tuple[int, ...]:
    """Returns the shape of a site's values at one token: (D,), (V,) for `logits`, (H,
    K) for `attn.q`, ….

    For `attn.scores` and `attn.pattern`, (H, T): a token's row of T = `length` keys for
    each head. Raises ValueError where these are asked for without a length.
    """
    H, K, G = config.heads, config.head_width, config.kv_heads or config.heads
    if site == "logits":
        return (config.vocab_size,)
    if ".attn.head." in site:
        return (K,)
    part = site.partition(".attn.")[2]
    if part in ("q", "z"):
        return (H, K)
    if part in ("k", "v"):
        return (G, K)
    if is_square(site):
        if length is None:
            raise ValueError(
                f"site {site!r} has a value for every key: its shape depends on the length of the "
                "rows."
            )
        return (H, length)
    return (config.ffn_width,) if site.endswith(".ffn.hidden") else (config.width,)


def width(site: str, config: ModelConfig) -> int:
    """Returns the length of a site's vectors: D, V of `logits`, F of `ffn.hidden`, K of
    a head.

    Raises ValueError for a site that has more than a vector at a token, such as
    `attn.q`.
    """
    if is_square(site) or len(place_shape(site, config)) > 1:
        head = site.rpartition(".")[0] + ".head.0"
        raise ValueError(
            f"site {site!r} has more than a vector at each token; expected one such as {head!r}."
        )
    return place_shape(site, config)[0]


def is_square(site: str) -> bool:
    """Returns whether a site's values are [B, H, T, T], queries by keys; all others are
    [B, T, …].
    """
    return site.endswith(("attn.scores", "attn.pattern"))


# --- names and patterns ---------------------------------------------------------------------------


def check_names(names: Iterable[str], config: ModelConfig, *, replace: bool) -> None:
    """Raises ValueError for names that are not sites of the model, with the nearest
    valid ones and a summary of all.
    """
    L, H = config.layers, config.heads
    valid = replaceable(L, H) if replace else readable(L, H)
    unknown = [name for name in names if name not in valid]
    if not unknown:
        return
    name = unknown[0]
    if replace and name in readable(L, H):
        if name.endswith(".mid"):
            raise ValueError(
                f"site {name!r} is a sum: it can be kept, not replaced; change "
                f"{name[:-3] + 'attn'!r}, which is added there, or {name[:-4]!r}, the whole block, "
                "instead."
            )
        raise ValueError(
            f"site {name!r} is an input: it can be kept, not replaced; replace {name[:-3]!r} "
            "instead."
        )
    block, number, *_ = [*str(name).split("."), ""]
    if block == "block" and number.isdecimal() and int(number) >= L:
        raise ValueError(f"unknown site {name!r}: the model has the blocks 0 .. {L - 1}.")
    near = difflib.get_close_matches(str(name), valid, n=3)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    parts = ", ".join(f"block.{{i}}.{part}" for part in (_CHANGEABLE if replace else _READABLE))
    raise ValueError(
        f"unknown site {name!r}.{hint} Valid for this model: embed, {parts}, "
        "block.{i}.attn.head.{h}, block.{i} "
        f"(i = 0..{L - 1}, h = 0..{H - 1}), "
        f"{'' if replace else 'final_norm.in, '}final_norm, logits."
    )


def kept_names(
    keep: str | Iterable[str], config: ModelConfig, start: int, stop: int
) -> dict[str, str]:
    """Returns the sites that `keep=` names, by the names asked for, in their order.

    Those that one pattern matches come in the order of computation. Raises ValueError
    for names that are no sites of the model, and for patterns that match none in blocks
    `start` .. `stop − 1`.
    """
    if not isinstance(keep, Iterable):
        raise ValueError(
            f"keep is {type(keep).__name__}; expected the name of a site, or several names."
        )
    asked = (keep,) if isinstance(keep, str) else tuple(keep)
    names: dict[str, str] = {}
    for name in asked:
        if _is_pattern(name):
            names |= _matching(name, config, start, stop, replace=False)
        else:
            names[name] = _site_of(name, config)
    check_names(names.values(), config, replace=False)
    return names


def named_sites(
    sites: Mapping[str, Site] | None, config: ModelConfig, start: int, stop: int
) -> dict[str, Site]:
    """Returns `sites=` with a key for every site that its keys match.

    A key without `*` goes before any pattern. Raises ValueError for names that are no
    sites of the model or can only be read, for patterns that match none in blocks
    `start` .. `stop − 1`, and for two names or two patterns that match one site.
    """
    if sites is None:
        return {}
    if not isinstance(sites, Mapping):
        raise ValueError(
            f"sites is {type(sites).__name__}; expected a dict from names to edits or to what "
            "stands in for them."
        )
    exact: dict[str, str] = {}
    for name in sites:
        if _is_pattern(name):
            continue
        site = _site_of(name, config)
        if site in exact:
            raise ValueError(
                f"sites {exact[site]!r} and {name!r} are two names of one; leave one out."
            )
        exact[site] = name
    check_names(exact, config, replace=True)
    by_pattern: dict[str, str] = {}
    for pattern in sites.keys() - exact.values():
        for site in _matching(pattern, config, start, stop, replace=True).values():
            other = by_pattern.setdefault(site, pattern)
            if site not in exact and other != pattern:
                both = " and ".join(sorted(map(repr, (pattern, other))))
                raise ValueError(
                    f"sites {both} both match {site!r}; name that site by itself, or narrow one of "
                    "them."
                )
    return {site: sites[name] for site, name in (by_pattern | exact).items()}


def _site_of(name: str, config: ModelConfig) -> str:
    return site_of(name, config) if isinstance(name, str) else name


def _is_pattern(name: str) -> bool:
    return isinstance(name, str) and "*" in name


@functools.lru_cache(maxsize=1024)
def _matching(
    pattern: str, config: ModelConfig, start: int, stop: int, *, replace: bool
) -> dict[str, str]:
    """Returns the sites that a pattern matches in blocks `start` .. `stop − 1`, by the
    names that it matches: ours, or another library's where it matches none of ours.
    Raises ValueError where none does.
    """
    L, H = config.layers, config.heads
    valid = replaceable(L, H) if replace else readable(L, H)
    first, rest = (".*", pattern.lstrip("*")) if pattern.startswith("*") else ("", pattern)
    whole = re.compile(first + r"[^.]*".join(map(re.escape, rest.split("*"))))
    matching = {name: name for name in valid if whole.fullmatch(name)} or {
        name: site
        for name, site in aliases(config).items()
        if site in valid and whole.fullmatch(name)
    }
    reached = {name: site for name, site in matching.items() if is_reached(site, start, stop, L)}
    if reached:
        return reached
    if matching:
        raise ValueError(
            f"no site that {pattern!r} matches is reached when blocks {start} .. {stop - 1} of {L} "
            "are run."
        )
    # With the stars as numbers, the nearest names can be found.
    near = difflib.get_close_matches(pattern.replace("*", "0"), valid, n=3)
    hint = f" Near it are {' and '.join(map(repr, near))}." if near else ""
    raise ValueError(
        f"no site of this model that can be {'changed' if replace else 'kept'} matches "
        f"{pattern!r}.{hint}"
    )


def is_reached(name: str, start: int, stop: int, layers: int) -> bool:
    """Returns whether a site is computed when blocks `start` .. `stop − 1` are run."""
    kind, _, rest = name.partition(".")
    if kind == "block":
        return start <= int(rest.partition(".")[0]) < stop
    return start == 0 if kind == "embed" else stop == layers


def gather(x: jax.Array, read_at: jax.Array | np.ndarray | None, *, axis: int = 1) -> jax.Array:
    """Reads x [B, T, ...] at columns [B] → [B, ...], or [B, P] → [B, P, ...]; all of x
    where `read_at` is None.

    `axis` is that of the columns where it is not the second; it becomes the second.
    """
    return x if read_at is None else _gather(x, read_at, axis=axis)


@functools.partial(jax.jit, static_argnames=("axis",))
def _gather(x: jax.Array, read_at: jax.Array | np.ndarray, *, axis: int) -> jax.Array:
    # Row by row: the compiler then knows that a device needs no other device's rows.
    return jax.vmap(lambda row, at: row[at])(jnp.moveaxis(x, axis, 1), read_at)


def stream_sites(layers: int) -> tuple[str, ...]:
    """Returns the sites of h_0 .. h_L."""
    return ("embed", *(f"block.{i}" for i in range(layers)))


def streams(model: Transformer) -> tuple[str, ...]:
    """Returns the sites of h_0 .. h_L by layer: the embedding, then the stream after
    each block.

    `streams(model)[l]` is the site of layer l; layer 3 is `block.2`.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> jmat.streams(model)[3]
      'block.2'
    """
    check_model(model)
    return stream_sites(model.config.layers)


def sites(model: Transformer) -> tuple[str, ...]:
    """Returns all names that `keep=` takes for a model, in the order of computation.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> jmat.sites(model)[-2:]
      ('final_norm', 'logits')
    """
    check_model(model)
    return tuple(readable(model.config.layers, model.config.heads))
