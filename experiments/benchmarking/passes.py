"""Times passes over the model: reading activations, and statistics that stream by."""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Float
from numpy import ndarray

from experiments.benchmarking import memory, rivals
from experiments.benchmarking.peak import matmul_chain
from experiments.benchmarking.rows import (
    Goal,
    Row,
    duration,
    missing_row,
    paired_row,
    ratio_row,
    seconds_rows,
)
from experiments.benchmarking.setup import Bench, streams_of
from jmat.capture.reading import reading_batches
from jmat.capture.stream import stream_moments
from jmat.data.batches import Batch
from jmat.forward import run
from jmat.maps.jumps import fit_jumps_to_moments, jump_pairs
from jmat.models import cost
from jmat.models.config import ModelConfig
from jmat.models.family import Transformer
from jmat.models.flops import block_flops
from jmat.models.sites import stream_sites
from jmat.runtime.timing import Work, in_turn, seconds
from jmat.studies.routes import bytes_in_words

CAPTURE_GOAL, SHARE_GOAL = Goal(1.1), Goal(0.85)
MEMORY_GOAL = Goal(1, at_most=True)
_ALLOWED = 1.5e9  # bytes beside the weights


# --- reading activations --------------------------------------------------------------------------


def capture_rows(bench: Bench) -> list[Row]:
    """All streams at the sampled positions: against transformers with the same
    sentences cut at the same places, and against the rate of matrix products.

    `capture` packs sentences into rows; `same batches` gives jmat the padded batches
    that transformers gets. Only real tokens count: what padding, transfers and all that
    is no matrix product take is time lost.
    """
    config, split, size = bench.config, bench.eval, bench.tokens_per_batch
    batches = reading_batches(config, split, size, alone=True)
    tokens, flops = _real_work(config, batches)
    chain, chain_flops = matmul_chain(block_shapes(config, size), bench.dtype)
    works: dict[str, Work] = {
        "jmat": lambda: streams_of(bench, split),
        "jmat, padded": lambda: _padded(bench.model, batches),
        "matmul": chain,
    }
    first = seconds(works["jmat"])
    seconds(works["jmat, padded"])
    if rivals.installed("torch"):
        other, works[other] = _faster_attention(bench, batches)  # which also warms it up
        factors = rivals.torch_matmul_chain(block_shapes(config, size), bench.dtype)
        works["torch matmul"] = factors
    taken = in_turn(works, bench.repeats)
    best = min(taken["jmat"])
    peak = bench.peak or chain_flops / min(taken["matmul"] + taken.get("torch matmul", []))
    packed = sum(batch.tokens.size for batch in reading_batches(config, split, size))
    rows = seconds_rows("capture", taken, tokens=tokens)
    figures = {
        "compile_seconds": max(first - best, 0.0),
        "tokens_per_second": tokens / best,
        "padding_waste": 1 - tokens / packed,
        "padding_waste_padded": 1 - tokens / sum(batch.tokens.size for batch in batches),
    }
    rows += [
        {"map": "capture", "metric": name, "value": value, "n": tokens}
        for name, value in figures.items()
    ]
    where = f"peak {peak / 1e9:.4g} GFLOP/s {'given' if bench.peak else 'measured'}"
    share = flops / best / peak
    rows.append(
        ratio_row(
            "capture",
            "share of peak",
            share,
            f"{flops / best / 1e9:.4g} GFLOP/s",
            where,
            SHARE_GOAL,
        )
    )
    if not rivals.installed("torch"):
        return [*rows, missing_row("capture", "ratio", CAPTURE_GOAL, "torch is not installed.")]
    rows.append(paired_row("capture", taken, other, CAPTURE_GOAL))
    same = {"jmat": taken["jmat, padded"], other: taken[other]}
    return [*rows, paired_row("capture", same, other, CAPTURE_GOAL, metric="same batches")]


def _padded(model: Transformer, batches: Sequence[Batch]) -> list[Float[ndarray, "n D"]]:
    """h_0 .. h_L at the positions of padded batches, on the host."""
    keep, values = stream_sites(model.config.layers), []
    for batch in batches:
        acts = run(model, batch.tokens, keep=keep, mask=batch.segments > 0, read_at=batch.read_at)[
            1
        ]
        real = batch.examples >= 0
        values += [np.asarray(stream, np.float32)[real] for stream in acts.values()]
    return values


def _real_work(config: ModelConfig, batches: Sequence[Batch]) -> tuple[int, float]:
    """Real tokens in the batches, and the floating-point operations of the blocks over
    them.
    """
    lengths = np.concatenate([batch.lengths[batch.lengths > 0] for batch in batches]).astype(
        np.float64
    )
    return int(lengths.sum()), config.layers * float(
        np.sum(block_flops(config, lengths, (lengths + 1) / 2))
    )


def block_shapes(config: ModelConfig, tokens: int) -> list[tuple[int, int, int]]:
    """(N, K, M) of the products with a block's matrices over a batch of tokens."""
    D, F = config.width, config.ffn_width
    return [*[(tokens, D, D)] * 4, (tokens, D, F), (tokens, F, D)]


def _faster_attention(bench: Bench, batches: Sequence[Batch]) -> tuple[str, Work]:
    """transformers with eager or sdpa attention, whichever reads a middle batch faster,
    ready to read all of them.
    """
    middle = [batches[len(batches) // 2]]
    middle = [_renumbered(batch) for batch in middle]
    speeds = {}
    for attention in ("eager", "sdpa"):
        work = rivals.torch_streams(bench.folder, middle, attention, bench.dtype)
        work()
        speeds[attention] = min(seconds(work) for _ in range(2))
    attention = min(speeds, key=lambda name: speeds[name])
    return f"torch ({attention})", rivals.torch_streams(
        bench.folder, batches, attention, bench.dtype
    )


def _renumbered(batch: Batch) -> Batch:
    """Returns the batch as if its examples were all there are."""
    examples = np.where(
        batch.examples >= 0, np.cumsum(batch.examples >= 0).reshape(batch.examples.shape) - 1, -1
    )
    return batch._replace(examples=examples.astype(np.int32))


# --- statistics that stream by --------------------------------------------------------------------


def streaming_rows(bench: Bench) -> list[Row]:
    """Moments of all pairs of layers at every token, then all maps from them; speed,
    memory, and both as predicted.
    """
    config = bench.config
    batches = memory.plan(config, bench.positions, bench.tokens_per_batch)
    pairs = jump_pairs(config.layers)
    run = lambda: stream_moments(bench.model, batches, pairs)  # noqa: E731
    first = seconds(run)
    tokens_per_batch = batches[0].tokens.size
    chain, chain_flops = matmul_chain(block_shapes(config, tokens_per_batch), bench.dtype)
    wide, wide_flops = matmul_chain([(config.width, tokens_per_batch, config.width)] * 4, "float64")
    taken = in_turn({"jmat": run, "matmul": chain, "matmul float64": wide}, bench.repeats)
    best = min(taken["jmat"])
    moments = run()
    maps = in_turn({"jmat": lambda: fit_jumps_to_moments(moments, config.layers)[0]}, 2)["jmat"]
    tokens = sum(int((batch.examples >= 0).sum()) for batch in batches)
    rows = seconds_rows("streaming", taken, tokens=tokens)
    rows += [
        {"map": "streaming", "metric": "compile_seconds", "value": max(first - best, 0.0)},
        {"map": "streaming", "metric": "tokens_per_second", "value": tokens / best, "n": tokens},
        {
            "map": "streaming",
            "metric": "map_seconds",
            "value": min(maps),
            "n": cost.pair_count(config, "all"),
        },
    ]
    peak = bench.peak or chain_flops / min(taken["matmul"])
    row_length = batches[0].tokens.shape[1]
    model_flops = cost.capture_flops(config, tokens, row_length)
    rows.append(
        {"map": "streaming", "metric": "mfu", "value": model_flops / best / peak, "n": tokens}
    )
    machine = cost.Machine(
        "this",
        peak,
        wide_flops / min(taken["matmul float64"]),
        memory=0,
        share=0.85,
        factor_share=FACTOR_SHARE,
    )
    predicted = cost.streaming_cost(
        config,
        tokens,
        machine,
        row_length=row_length,
        tokens_per_batch=tokens_per_batch,
        bytes_per_value=2 if bench.dtype == "bfloat16" else 4,
    )
    pass_seconds = predicted.seconds["capture"] + predicted.seconds["statistics"]
    rows += _prediction("pass", best, pass_seconds)
    rows += _prediction("maps", min(maps), predicted.seconds["fit"])
    return rows + _memory_rows(bench, predicted)


FACTOR_SHARE = 0.1


def _prediction(what: str, measured: float, predicted: float) -> list[Row]:
    words = f"on paper {duration(predicted)}"
    row = ratio_row("cost", what, measured / predicted, duration(measured), words)
    return [row | {"predicted_seconds": predicted, "measured_seconds": measured}]


def _memory_rows(bench: Bench, predicted: cost.Cost) -> list[Row]:
    if jax.default_backend() != "cpu":
        stats = jax.local_devices()[0].memory_stats() or {}
        peak = stats.get("peak_bytes_in_use")
        note = (
            "of the device, in this process so far"
            if peak is not None
            else "the device does not tell."
        )
        found = None if peak is None else float(peak)
        words = {"predicted_bytes": predicted.memory, "note": note}
        return [{"map": "streaming", "metric": "peak_bytes", "value": found, **words}]
    sizes = memory.measure(bench.folder, bench.dtype, bench.positions, bench.tokens_per_batch)
    if sizes is None:
        return [
            missing_row(
                "streaming", "memory", MEMORY_GOAL, "this system does not tell a process's memory."
            )
        ]
    allowed = sizes["weights"] + _ALLOWED
    said = f"weights {bytes_in_words(sizes['weights'])} + {bytes_in_words(_ALLOWED)}"
    ours = bytes_in_words(sizes["growth"])
    row = ratio_row("streaming", "memory", sizes["growth"] / allowed, ours, said, MEMORY_GOAL)
    paper = ratio_row(
        "cost",
        "memory",
        sizes["growth"] / predicted.memory,
        ours,
        f"on paper {bytes_in_words(predicted.memory)}",
    )
    return [row | {f"{name}_bytes": value for name, value in sizes.items()}, paper]
