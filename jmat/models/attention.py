"""Attention: multi-head self-attention, its mask and its biases; queries, keys, values,
scores and pattern are sites.

Axes: B batch, T length (of queries; S of keys), H heads, G heads of keys and values, K
head width. Scores and softmax are computed in float32 whatever the dtype of the stream.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jmat.models.config import ModelConfig
from jmat.models.context import Context, IgnoresPadding, NeedsContext
from jmat.models.layers import Dense, RMSNorm
from jmat.models.rotary import rotate
from jmat.models.tap import UNTAPPED, Tap


class Attention(nnx.Module, NeedsContext, IgnoresPadding):
    """Computes multi-head self-attention: [B, T, D] → [B, T, D], before the residual
    add.
    """

    def __init__(self, config: ModelConfig, *, out_std: float, rngs: nnx.Rngs):
        D, K, std, bias = config.width, config.head_width, config.init_std, config.qkv_bias
        kv_heads = config.kv_heads or config.heads
        self.q = Dense(D, config.heads * K, std=std, rngs=rngs, bias=bias)
        self.k = Dense(D, kv_heads * K, std=std, rngs=rngs, bias=bias)
        self.v = Dense(D, kv_heads * K, std=std, rngs=rngs, bias=bias)
        self.o = Dense(config.heads * K, D, std=out_std, rngs=rngs, bias=config.out_bias)
        self.q_norm = RMSNorm(config, K) if config.qk_norm else None
        self.k_norm = RMSNorm(config, K) if config.qk_norm else None
        self.config = config

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, tap: Tap = UNTAPPED
    ) -> Float[Array, "B T D"]:
        shape = (*x.shape[:2], self.config.heads, self.config.head_width)
        z = tap("attn.z", self.outputs, x, context, tap, shape=shape)
        return self.o(z.reshape(*x.shape[:2], -1))

    def outputs(
        self, x: Float[Array, "B T D"], context: Context, tap: Tap
    ) -> Float[Array, "B T H K"]:
        """Returns the outputs of all heads: those that are computed, and what stands in
        for the others.
        """
        H = self.config.heads
        if not tap.touches("attn.head"):
            return self.computed(x, context, tap, tuple(range(H)))
        inside = ("attn.q", "attn.k", "attn.v", "attn.scores", "attn.pattern")
        replaced = (
            set()
            if tap.touches(*inside) or context.memory is not None  # which holds all heads
            else {h for h in range(H) if tap.replaces(f"attn.head.{h}")}
        )
        heads = tuple(h for h in range(H) if h not in replaced)
        outputs = dict(
            zip(heads, jnp.moveaxis(self.computed(x, context, tap, heads), 2, 0), strict=True)
        )
        shape = (*x.shape[:2], self.config.head_width)
        heads_after = [
            tap(f"attn.head.{h}", lambda _, h=h: outputs[h], x, shape=shape) for h in range(H)
        ]
        return jnp.stack(heads_after, axis=2)

    def computed(
        self, x: Float[Array, "B T D"], context: Context, tap: Tap, heads: tuple[int, ...]
    ) -> Float[Array, "B T h K"]:
        """Returns the outputs of some heads, all by default; the sites inside attention
        are of all of them.
        """
        c, (B, T, _) = self.config, x.shape
        # query heads that share one head of keys and values
        group = c.heads // (c.kv_heads or c.heads)
        kv_heads = tuple(dict.fromkeys(h // group for h in heads))

        def project(part: Dense, heads: tuple[int, ...]) -> Float[Array, "B T h K"]:
            return part.columns(x, _columns(heads, c.head_width)).reshape(
                B, T, len(heads), c.head_width
            )

        q = tap(
            "attn.q", lambda _: project(self.q, heads), x, shape=(B, T, len(heads), c.head_width)
        )
        k = tap(
            "attn.k",
            lambda _: project(self.k, kv_heads),
            x,
            shape=(B, T, len(kv_heads), c.head_width),
        )
        v = tap(
            "attn.v",
            lambda _: project(self.v, kv_heads),
            x,
            shape=(B, T, len(kv_heads), c.head_width),
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if c.rotary is not None:
            q, k = rotate(q, context.positions, c.rotary), rotate(k, context.positions, c.rotary)
        S, keys_at = T, context.positions
        if context.memory is not None:
            k, v = context.memory.extend(k, v)
            S = k.shape[2]
            keys_at = jnp.arange(S, dtype=jnp.int32)[None]
        elif group > 1:
            of_query = np.searchsorted(kv_heads, np.asarray(heads) // group)
            k, v = k[:, :, of_query], v[:, :, of_query]

        scale = jnp.float32(1 / math.sqrt(c.head_width) if c.scale_attention else 1)
        if c.scale_attention_by_layer:
            scale = scale / (context.layer + 1).astype(jnp.float32)
        bias = (
            alibi_bias(context.positions, alibi_slopes(c.heads)[list(heads)], keys_at)
            if c.alibi
            else None
        )
        # The window of the block is looked up by its traced index: all blocks share one program.
        window = jnp.asarray(c.windows)[context.layer] if c.windows and min(c.windows) < S else None
        if context.memory is None:
            allowed = attention_mask(context.segments, T, c.causal, window)
        else:
            allowed = attention_mask_by_position(context.positions, keys_at, window)

        square = {"shape": (B, len(heads), T, S)}
        scores = tap(
            "attn.scores",
            lambda _: (
                attention_scores(q, k, scale, bias)
                if context.memory is None
                else grouped_scores(q, k, scale, bias)
            ),
            x,
            **square,
            dtype=jnp.float32,
        )
        scores = masked(scores, allowed)
        pattern = tap(
            "attn.pattern",
            lambda scores: attention_pattern(scores, v.dtype),
            scores,
            **square,
            dtype=v.dtype,
        )
        if context.memory is not None:
            return grouped_outputs(pattern, v)
        return jnp.einsum("BHTS,BSHK->BTHK", pattern, v)


def depends_on_block(part: NeedsContext) -> bool:
    """Returns whether attention in a part depends on the index of its block, by windows
    or by scale.
    """
    if not isinstance(part, nnx.Module):
        return False
    configs = [module.config for _, module in nnx.iter_graph(part) if isinstance(module, Attention)]
    return any(
        config.scale_attention_by_layer or len(set(config.windows)) > 1 for config in configs
    )


def _columns(heads: tuple[int, ...], head_width: int) -> slice | Int[np.ndarray, " n"]:
    """Returns the columns of a projection that belong to these heads; a slice where
    they are neighbours.
    """
    first, last = min(heads, default=0), max(heads, default=-1)
    if len(heads) == last + 1 - first:
        return slice(first * head_width, (last + 1) * head_width)
    return (np.asarray(heads)[:, None] * head_width + np.arange(head_width)).ravel()


# --- pure functions -------------------------------------------------------------------------------


def attention_mask(
    segments: Int[Array, "B T"] | None,
    length: int,
    causal: bool,
    window: Int[Array, ""] | None = None,
) -> Bool[Array, "#B T T"]:
    """Returns which token (axis 1) may look at which (axis 2): the same text, never
    padding, nothing later if causal.

    With a window, a token sees only the last `window` tokens, itself included. Padding
    looks at itself alone, so its values do not depend on how much of it there is.
    """
    allowed = jnp.ones((1, length, length), bool)
    if causal:
        allowed = jnp.tril(allowed)
    if window is not None:
        index = jnp.arange(length)
        allowed &= index[:, None] - index < window
    if segments is not None:
        is_real = segments[:, None, :] > 0
        allowed &= jnp.where(
            is_real, segments[:, :, None] == segments[:, None, :], jnp.eye(length, dtype=bool)
        )
    return allowed


def attention_mask_by_position(
    queries_at: Int[Array, "B T"],
    keys_at: Int[Array, "#B S"],
    window: Int[Array, ""] | None = None,
) -> Bool[Array, "B T S"]:
    """Returns which token (axis 1) of a text may look at which key (axis 2): at nothing
    later, and with a window only at the last `window` tokens, itself included.
    """
    distance = queries_at[:, :, None] - keys_at[:, None, :]
    allowed = distance >= 0
    return allowed if window is None else allowed & (distance < window)


def attention_scores(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S H K"],
    scale: Float[Array, ""],
    bias: Float[Array, "B H T S"] | None = None,
) -> Float[Array, "B H T S"]:
    """Returns `scale · q kᵀ + bias` for each head, in float32."""
    scores = jnp.einsum("BTHK,BSHK->BHTS", q, k, preferred_element_type=jnp.float32) * scale
    return scores if bias is None else scores + bias


def grouped_scores(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B G S K"],
    scale: Float[Array, ""],
    bias: Float[Array, "B H T S"] | None = None,
) -> Float[Array, "B H T S"]:
    """Returns what `attention_scores` does, for keys that lie head by head, of which
    neighbouring queries share one: no key is copied.
    """
    B, T, H, K = q.shape
    G, S = k.shape[1:3]
    grouped = q.reshape(B, T, G, H // G, K)
    scores = jnp.einsum("BTGRK,BGSK->BGRTS", grouped, k, preferred_element_type=jnp.float32)
    scores = scores.reshape(B, H, T, S) * scale
    return scores if bias is None else scores + bias


def grouped_outputs(
    pattern: Float[Array, "B H T S"], v: Float[Array, "B G S K"]
) -> Float[Array, "B T H K"]:
    """Returns the heads' sums of values, which lie as the keys of `grouped_scores`."""
    B, H, T, S = pattern.shape
    G, K = v.shape[1], v.shape[3]
    outputs = jnp.einsum("BGRTS,BGSK->BTGRK", pattern.reshape(B, G, H // G, T, S), v)
    return outputs.reshape(B, T, H, K)


def masked(
    scores: Float[Array, "B H T S"], allowed: Bool[Array, "#B T S"]
) -> Float[Array, "B H T S"]:
    """Returns the scores with the least float32 where a token must not look."""
    return jnp.where(allowed[:, None], scores, jnp.finfo(jnp.float32).min)


def attention_pattern(scores: Float[Array, "B H T S"], dtype: jnp.dtype) -> Float[Array, "B H T S"]:
    """Returns the softmax of masked scores over keys, computed in float32, in the dtype
    of the values.
    """
    return jax.nn.softmax(scores, axis=-1).astype(dtype)


def alibi_slopes(heads: int) -> Float[np.ndarray, " H"]:
    """Returns `2^(−8h/H)` for head h = 1 .. H (ALiBi; Press et al. 2022).

    Where H is not a power of two, the slopes of the next smaller one, then every second
    one of its double.
    """
    power = 2 ** int(math.log2(heads))
    slopes = 2.0 ** (-8 / power * np.arange(1, power + 1))
    between = 2.0 ** (-4 / power * np.arange(1, 2 * power + 1, 2))
    return np.concatenate([slopes, between])[:heads].astype(np.float32)


def alibi_bias(
    positions: Int[Array, "B T"],
    slopes: Float[np.ndarray, " H"],
    keys_at: Int[Array, "#B S"],
) -> Float[Array, "B H T S"]:
    """Returns `−slope · distance` between the token that looks (axis 2), at
    `positions`, and the one that is looked at (axis 3).
    """
    distance = keys_at[:, None, None, :] - positions[:, None, :, None]
    return jnp.asarray(slopes)[:, None, None] * distance.astype(jnp.float32)
