"""Further wrong changes of code that prints figures, in the format of the other lists."""

from tests.mutation import Change

_EXIT = (
    "test_early_exit.py test_early_exit_rows.py test_intervals.py test_stopping.py "
    "test_wiring_early_exit.py"
)
_JUMPS = "test_jumps.py test_intervals.py test_reference.py test_wiring_jumps.py test_metrics.py"
_PRUNE = "test_prune.py test_prune_figures.py test_intervals.py test_wiring_rest.py"

CHANGES = [
    Change(
        "jmat/studies/evaluation.py",
        "columns, groups=groups, seed=seed), strict=True)",
        "columns, groups=groups, seed=0), strict=True)",
        "layer_jump intervals always with seed 0",
        _JUMPS,
    ),
    Change(
        "jmat/studies/evaluation.py",
        '"n": len(nats)}',
        '"n": len(nats) + 1}',
        "perplexity's n is one too many",
        _JUMPS + " test_wiring_parts.py",
    ),
    Change(
        "jmat/studies/r2.py",
        "Resampled(values[drawn.is_later], drawn.later)",
        "Resampled(values[~drawn.is_later], drawn.everywhere[:, ~drawn.is_later])",
        "r2 without the first position is that of the first position",
        "test_r2.py test_intervals.py test_wiring_jumps.py",
    ),
    Change(
        "jmat/metrics/r2.py",
        "spread <= OUTLIER * np.median(",
        "spread <= OUTLIER * np.mean(",
        "outlier coordinates judged by the mean spread",
        "test_r2.py test_intervals.py test_wiring_jumps.py",
    ),
    Change(
        "jmat/studies/early_exit/thresholds.py",
        "runs[:, l - 1] + 1, 0)",
        "runs[:, l - 1] + 1, 1)",
        "patience starts at 1",
        _EXIT,
    ),
    Change(
        "jmat/studies/early_exit/thresholds.py",
        "/ blocks, 12)",
        "/ (blocks + 1), 12)",
        "share saved of one block more",
        _EXIT,
    ),
    Change(
        "jmat/studies/early_exit/thresholds.py",
        'saved[f"{a} - {b}"] = saved[a] - saved[b]',
        'saved[f"{a} - {b}"] = saved[a] - saved[b][::-1]',
        "differences of unpaired resamples",
        _EXIT,
    ),
    Change(
        "jmat/data/text.py",
        "chosen = np.flatnonzero(split.lengths > 1)[:most]",
        "chosen = np.flatnonzero(split.lengths > 2)[:most]",
        "sentences of two tokens are not measured",
        _PRUNE,
    ),
    Change(
        "jmat/data/text.py",
        "chosen = np.arange(split.num_sentences)[:most]",
        "chosen = np.arange(split.num_sentences)[-(most or 0) :]",
        "the last sentences instead of the first",
        _PRUNE,
    ),
    Change(
        "jmat/metrics/predictions.py",
        '"max_probability": largest',
        '"max_probability": jnp.mean(p, axis=-1)',
        "mean probability as confidence",
        "test_metrics.py test_early_exit_rows.py",
    ),
    Change(
        "jmat/data/splitting.py",
        'key=lambda text: digest(f"{seed} {letters(text)}"))[:count]',
        'key=lambda text: _digest(f"{seed} {_letters(text)}"))[-count:]',
        "the last sentences of the draw instead of the first",
        "test_corpus.py",
    ),
    Change(
        "jmat/data/corpus.py",
        "draw(fit, num_fit, seed), draw(held_out, num_eval, seed)",
        "draw(fit, num_fit, seed), draw(held_out, num_eval, 0)",
        "the seed does not draw the evaluation sentences",
        "test_corpus.py test_wiring_jumps.py",
    ),
    Change(
        "jmat/data/sampling.py",
        "copies[key] += 1",
        "copies[key] = 1",
        "copies of a sentence have one position",
        "test_sampling.py",
    ),
    Change(
        "jmat/report/results.py",
        '"text": text,',
        '"text": None,',
        "results.json does not record the text",
        "test_results.py test_experiments.py test_wiring_jumps.py",
    ),
    Change(
        "jmat/report/environment.py",
        '"cpu": _cpu(),',
        '"cpu": "",',
        "results.json does not record the processor",
        "test_results.py test_experiments.py",
    ),
]
