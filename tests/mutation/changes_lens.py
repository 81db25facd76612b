"""Wrong changes of mean Jacobians: the program, its sums, their error, and the kinds."""

from tests.mutation import Change

_PASS, _KINDS, _FUTURE = "test_jacobian.py", "test_jacobian_kinds.py", "test_future.py"
_PULL, _SUMS, _MAP = (
    "jmat/capture/pullback.py",
    "jmat/capture/jacobians.py",
    "jmat/maps/jacobian.py",
)

CHANGES = [
    Change(
        _PULL,
        'summed = jnp.einsum("bt,bte->be", counted,',
        'summed = jnp.einsum("bt,bte->be", segments.astype(jnp.float32),',
        "targets are all tokens, not those that count",
        _PASS,
    ),
    Change(
        _PULL,
        "share = counted / jnp.maximum(counted.sum(1, keepdims=True), 1)",
        "share = counted / counted.shape[1]",
        "the mean over positions divides by the row's length",
        _PASS,
    ),
    Change(
        _PULL,
        "            segments=segments,\n",
        "",
        "padding is seen by a masked model",
        _PASS,
    ),
    Change(
        _PULL,
        "squares = {site: sums[0][site] + jnp.square(J[site]).sum((0, 2))",
        "squares = {site: jnp.square(J[site]).sum((0, 2))",
        "squares hold the last rows alone",
        _PASS,
    ),
    Change(
        _SUMS,
        "variance = max(float(np.mean(squares)) - mean, 0.0) * n / (n - 1)",
        "variance = max(float(np.mean(squares)) - mean, 0.0)",
        "the variance of one prompt is biased",
        _PASS,
    ),
    Change(
        _SUMS,
        "if real.sum() < _FEWEST:",
        "if real.sum() < 2:",
        "a pass may end after two prompts",
        _PASS,
    ),
    Change(
        _SUMS,
        "settings = (tuple(sources), target,",
        "settings = (target,",
        "snapshots of other sources are gone on from",
        _PASS,
    ),
    Change(
        _SUMS,
        "on_devices(mine[done:],",
        "on_devices(mine,",
        "a pass that goes on begins with the first batch",
        _PASS,
    ),
    Change(
        _SUMS,
        "mine = hosts.share(plan)",
        "mine = plan",
        "every process reads all prompts",
        _PASS,
    ),
    Change(
        "jmat/capture/prompts.py",
        "counted[row, skip_first : size - 1] = 1",
        "counted[row, skip_first:size] = 1",
        "the last token counts",
        _PASS,
    ),
    Change(
        "jmat/capture/prompts.py",
        "planned.sort(key=lambda each: each[:2])",
        "planned.sort(key=lambda each: each[1])",
        "short prompts come first",
        _PASS,
    ),
    Change(
        _MAP,
        "self.target_mean - self.source_mean @ W",
        "self.target_mean - self.source_mean @ W.T",
        "the bias is of the transposed weights",
        _PASS,
    ),
    Change(
        _MAP,
        "return 1.0 if distance <= noise else noise / distance",
        "return noise / distance",
        "shrinkage goes beyond the closed form",
        _PASS,
    ),
    Change(
        _MAP,
        "return len(self.matrix) * self.alpha**2 / self.square",
        "return self.alpha**2 / self.square",
        "the identity share lacks the width",
        _PASS,
    ),
    Change(
        "jmat/runtime/compiling.py",
        "    return _WITHOUT_FUSED_SUMS",
        "    return {}",
        "XLA fuses sums, and gets them wrong",
        "test_compiling.py",
    ),
    Change(
        "jmat/maps/kinds.py",
        "return self.parameter if isinstance(self.parameter, float) else ERROR",
        "return ERROR",
        "the wanted error is ignored",
        _KINDS,
    ),
    Change(
        "jmat/maps/fit.py",
        "            error=wanted.wanted_error,",
        "            error=0.05,",
        "fit_map ignores the wanted error",
        _KINDS,
    ),
    Change(
        "jmat/capture/future.py",
        "jnp.cumsum(real[:, ::-1], axis=1)[:, ::-1]",
        "jnp.cumsum(real, axis=1)",
        "sums run over earlier tokens",
        _FUTURE,
    ),
    Change(
        "jmat/capture/future.py",
        "cut_after_position=False,",
        "cut_after_position=True,",
        "later tokens are cut",
        _FUTURE,
    ),
    Change(
        "jmat/studies/map_zoo/fits.py",
        "fit_kind(kind, later if kind.entry.sums_future else pair)",
        "fit_kind(kind, later)",
        "all kinds of a zoo with future_sum are fitted to sums",
        _FUTURE,
    ),
]
