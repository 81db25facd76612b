"""Wrong changes of what departs from the papers: scores and estimators by name, pieces
of text, the cost of an exit.
"""

from tests.mutation import Change

CHANGES = [
    Change(
        "jmat/models/flops.py",
        "blocks = exits * block_flops(config, 1, tokens)",
        "blocks = exits * block_flops(config, tokens, tokens)",
        "a generated token is charged its whole prefix",
        "test_early_exit.py test_early_exit_rows.py",
    ),
    Change(
        "jmat/models/flops.py",
        "checked = (exits > 0) & (exits % check_every == 0) & ~last",
        "checked = (exits > 0) & ~last",
        "an exit where nothing was checked is charged no head",
        "test_early_exit.py test_early_exit_rows.py",
    ),
    Change(
        "jmat/models/flops.py",
        "np.where(checked | last, 0, jump)",
        "np.where(checked, 0, jump)",
        "the end is charged a map",
        "test_early_exit.py test_early_exit_rows.py",
    ),
    Change(
        "jmat/studies/early_exit/rows.py",
        '"mapped": name != "id"',
        '"mapped": True',
        "id is charged a map",
        "test_early_exit_rows.py",
    ),
    Change(
        "jmat/studies/linearity/intrinsic.py",
        "kept = ratios[: int(n * (1 - DISCARDED))]",
        "kept = ratios[:-1]",
        "the linear fit discards nothing but the last",
        "test_linearity.py",
    ),
    Change(
        "jmat/studies/linearity/intrinsic.py",
        "share = (N - len(ratios) + np.arange(1, len(kept) + 1)) / N",
        "share = np.arange(1, len(kept) + 1) / len(ratios)",
        "public_code forgets repeated points",
        "test_linearity.py",
    ),
    Change(
        "jmat/studies/linearity/rows.py",
        '    "linear_fit": "intrinsic_dimension_fit",\n    "public_code": '
        '"intrinsic_dimension_public_code",',
        '    "public_code": "intrinsic_dimension_fit",\n    "linear_fit": '
        '"intrinsic_dimension_public_code",',
        "two estimators under each other's metric",
        "test_linearity.py",
    ),
    Change(
        "jmat/data/pieces.py",
        "rest = sorted(set(range(count)).difference(fit))",
        "rest = list(range(count))",
        "pieces to evaluate on are drawn from all",
        "test_pieces.py",
    ),
    Change(
        "jmat/data/pieces.py",
        "generator = random.Random(seed)",
        "generator = random.Random(0)",
        "the seed of pieces does nothing",
        "test_pieces.py",
    ),
    Change(
        "experiments/benchmarking/maps.py",
        "jnp.linalg.lstsq(x, y, rcond=0)",
        "jnp.linalg.lstsq(x, y)",
        "the row of rcond=0 has the default cut-off",
        "test_benchmark.py",
    ),
    Change(
        "experiments/benchmarking/maps.py",
        'worst[row["method"]] = max(worst.get(row["method"], 0.0), error)',
        'worst[row["method"]] = error',
        "the worst error is the last",
        "test_benchmark.py",
    ),
    Change(
        "jmat/studies/prune/heal.py",
        "error = error / jnp.float32(x.shape[-1])",
        "error = error / jnp.float32(1)",
        "the plain loss sums coordinates",
        "test_prune.py",
    ),
    Change(
        "jmat/studies/prune/rows.py",
        'dict.fromkeys(row["blocks"] for row in rows)',
        'dict.fromkeys(str(row["removed"]) for row in rows)',
        "prune.png: ticks are numbers of blocks",
        "test_prune.py",
    ),
    Change(
        "jmat/studies/prune/options.py",
        'score: str = "kl"',
        'score: str = "linearity_without_residual"',
        "pruning's default order in the library",
        "test_wiring_rest.py",
    ),
    Change(
        "jmat/studies/prune/study.py",
        "known=scores[options.score]",
        'known=scores["angular"]',
        "prune goes by another score than it says",
        "test_wiring_rest.py",
    ),
]
