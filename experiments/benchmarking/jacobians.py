"""Mean Jacobians of the final stream by all others, against a loop in torch."""

import numpy as np

from experiments.benchmarking import rivals
from experiments.benchmarking.maps import relative
from experiments.benchmarking.rows import Goal, Row, missing_row, paired_row, seconds_rows
from experiments.benchmarking.setup import Bench
from jmat.capture.jacobians import MAX_TOKENS, JacobianSums, jacobian_sums
from jmat.data.examples import Split
from jmat.models.sites import stream_sites
from jmat.runtime.annotations import Keywords
from jmat.runtime.timing import in_turn, seconds

JACOBIAN_GOAL = Goal(3)
_PROMPTS = 4
_AXES = 16  # of the target, in torch: it takes equally long for each


def jacobian_rows(bench: Bench) -> list[Row]:
    """Mean Jacobians of h_L by h_0 .. h_{L−1}, prompt by prompt: one backward pass for
    many coordinates in jmat, one for each in torch.

    A turn of jmat is four prompts, one of torch some coordinates of one prompt.
    """
    T, width = min(MAX_TOKENS, bench.config.num_positions), bench.config.width
    rng = np.random.default_rng(4)
    tokens = rng.integers(bench.config.vocab_size, size=(_PROMPTS, T), dtype=np.int32)
    *sources, target = stream_sites(bench.config.layers)

    def sums(prompts: int) -> JacobianSums:
        chosen = tokens[:prompts]
        lengths, nothing = np.full(prompts, T, np.int32), np.zeros(prompts, np.int32)
        split = Split(chosen.reshape(-1), lengths, nothing)
        return jacobian_sums(bench.model, split, sources, target, fewest=1)

    first, axes = seconds(lambda: sums(_PROMPTS)), min(_AXES, width)
    works: Keywords = {"jmat": lambda: sums(_PROMPTS)}
    if rivals.installed("torch"):
        import torch

        model = rivals.torch_causal_model(bench.folder, bench.dtype)
        ids = torch.from_numpy(tokens[:1]).long().to(model.device)
        works["torch"] = lambda: rivals.torch_jacobians(model, ids, axes=axes)
    taken = in_turn(works, bench.repeats)
    rows = seconds_rows("jacobian", {"jmat": taken["jmat"]}, prompts=_PROMPTS, tokens=T)
    compiling = max(first - min(taken["jmat"]), 0.0)
    rows.append({"map": "jacobian", "metric": "compile_seconds", "value": compiling})
    if "torch" not in works:
        return [*rows, missing_row("jacobian", "ratio", JACOBIAN_GOAL, "torch is not installed.")]
    rows += seconds_rows("jacobian", {"torch": taken["torch"]}, prompts=axes / width, tokens=T)
    words = f" ({_PROMPTS} prompts, from {axes} of {width} coordinates of one)"
    scale = _PROMPTS * width / axes
    rows.append(paired_row("jacobian", taken, "torch", JACOBIAN_GOAL, scale=scale, words=words))
    theirs = works["torch"]().numpy()
    ours = np.stack([sums(1).total[source][:axes] for source in sources])
    rows.append({"map": "jacobian", "metric": "difference", "value": relative(ours, theirs)})
    return rows
