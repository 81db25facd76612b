"""Wrong changes of the cache and of generation."""

from tests.mutation import Change

_CACHE = "test_cache.py"
_WRITES = "test_generate.py test_sample.py test_writing.py"

CHANGES = [
    Change(
        "jmat/models/attention.py",
        "    allowed = distance >= 0\n",
        "    allowed = distance > 0\n",
        "with a cache a token does not see itself",
        _CACHE,
    ),
    Change(
        "jmat/models/attention.py",
        "allowed if window is None else allowed & (distance < window)",
        "allowed if window is None else allowed & (distance <= window)",
        "with a cache windows are a token longer",
        _CACHE,
    ),
    Change(
        "jmat/models/attention.py",
        "if tap.touches(*inside) or context.memory is not None  # which holds all heads",
        "if tap.touches(*inside)",
        "keys of replaced heads are left out of the cache",
        _CACHE,
    ),
    Change(
        "jmat/models/cache.py",
        "return positions if segments is None else jnp.where(segments > 0, positions, NOWHERE)",
        "return positions",
        "padding enters the cache",
        _CACHE,
    ),
    Change(
        "jmat/models/cache.py",
        "longer = jnp.where((block >= start) & (block < stop), lengths",
        "longer = jnp.where(block < stop, lengths",
        "blocks that did not run count the new tokens, too",
        _CACHE,
    ),
    Change(
        "jmat/models/cache.py",
        "    before = lengths[start]  # of",
        "    before = lengths[0]  # of",
        "positions of a later stretch are those of block 0",
        _CACHE,
    ),
    Change(
        "jmat/models/cache.py",
        "    if total[row] > cache.room:\n",
        "    if total[row] > cache.room + 1:\n",
        "a cache that is one token too short is taken",
        _CACHE,
    ),
    Change(
        "jmat/models/stack.py",
        "return x, tap.finish(), memory.kept",
        "return x, tap.finish(), kept",
        "the cache stays empty",
        _CACHE,
    ),
    Change(
        "jmat/decode/passes.py",
        "state.going & ~stops & (written < rules.most)",
        "state.going & (written < rules.most)",
        "stop tokens end no text",
        _WRITES,
    ),
    Change(
        "jmat/decode/passes.py",
        "here = sites_here(sites, context.positions, segments)",
        "here = dict(sites)",
        "positions of At count within a step",
        _WRITES,
    ),
    Change(
        "jmat/decode/passes.py",
        "jnp.where((column >= 0)[:, None], value, before)",
        "value",
        "prompts that end in an early piece are read at a later one",
        _WRITES,
    ),
    Change(
        "jmat/decode/passes.py",
        "rules, state.cache.lengths[-1][:, None] - 1)",
        "rules, state.cache.lengths[-1][:, None])",
        "edits at the end apply a token too early",
        _WRITES,
    ),
    Change(
        "jmat/decode/passes.py",
        "seen = seen | (jnp.arange(seen.shape[1]) == token[:, None])",
        "seen = seen",
        "the penalty is for the prompt's tokens alone",
        _WRITES,
    ),
    Change(
        "jmat/decode/sample.py",
        "jnp.where(kept | (p == p.max(-1, keepdims=True)), logits, _NEVER)",
        "jnp.where(kept, logits, _NEVER)",
        "a small top-p leaves no token",
        _WRITES,
    ),
    Change(
        "jmat/decode/sample.py",
        "jnp.where(logits < 0, logits * penalty, logits / penalty)",
        "logits / penalty",
        "the penalty makes unlikely tokens likelier",
        _WRITES,
    ),
    Change(
        "jmat/decode/sample.py",
        "jax.random.fold_in(jax.random.fold_in(key, row), step)",
        "jax.random.fold_in(key, row)",
        "all steps of a row draw alike",
        _WRITES,
    ),
    Change(
        "jmat/decode/text.py",
        "end -= len(self.text) - len(self.text.rstrip(_HALF))",
        "end -= 0",
        "halves of characters are handed on",
        _WRITES,
    ),
    Change(
        "jmat/decode/text.py",
        "step = 1 if self._stop_strings else max(len(new), 1)",
        "step = max(len(new), 1)",
        "tokens behind a stop string are kept",
        _WRITES,
    ),
    Change(
        "jmat/decode/options.py",
        "if longest + max_new_tokens > most:",
        "if longest + max_new_tokens > most + 1:",
        "a text may be one token longer than the positions",
        _WRITES,
    ),
]
