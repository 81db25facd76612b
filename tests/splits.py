"""Splits of made-up sentences."""

import numpy as np

from jmat.data import Split


def make_split(lengths, positions=None, rows=None, seed=0):
    generator = np.random.default_rng(seed)
    lengths = np.asarray(lengths, np.int32)
    if positions is None:
        positions = generator.integers(0, lengths)
    tokens = generator.integers(1, 1000, lengths.sum()).astype(np.int32)
    rows = None if rows is None else np.asarray(rows, np.int32)
    return Split(
        tokens, lengths, np.asarray(positions, np.int32), *([] if rows is None else [rows])
    )


def realistic(num, mean=30, seed=0):
    lengths = np.random.default_rng(seed).lognormal(np.log(mean), 0.5, num)
    return make_split(np.clip(lengths, 3, 512).astype(np.int32))
