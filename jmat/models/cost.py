"""Time and memory on paper: what a run needs, from a config alone, before anything is
loaded.

Floating-point operations (a multiply-add is two) and bytes of reading activations,
summing up statistics and fitting maps, and the seconds that follow from a machine's
peak rate. Formulas of factorisations are those of Golub and Van Loan, *Matrix
Computations*: QR 4ND² − 4D³/3 with Q formed, eigenvectors 9D³, singular values 8D³/3.
`experiments.benchmark` holds them against the clock.
"""

import dataclasses
import math

import jax
from flax import nnx

from jmat.models import build
from jmat.models.config import ModelConfig
from jmat.models.flops import block_flops
from jmat.runtime.checks import check_choice

TARGETS = ("final", "all")


@dataclasses.dataclass(frozen=True)
class Machine:
    """Holds the properties of the hardware that the formulas need.

    Attributes:
      name: for the table.
      peak: FLOP/s of one chip in the dtype of the model.
      peak_float64: FLOP/s of one chip in float64.
      memory: bytes of one chip.
      chips: over which batches are sharded.
      share: of the peak that matrix products reach.
      factor_share: of the peak that factorisations reach.
    """

    name: str
    peak: float
    peak_float64: float
    memory: float | int
    chips: int = 1
    share: float = 0.5
    factor_share: float = 0.1


@dataclasses.dataclass(frozen=True)
class Cost:
    """Holds the cost of one pass over text and of the maps that follow from it.

    Attributes:
      flops: by step: `capture`, `statistics` (float64), `fit` (float64).
      seconds: by step. Capture and statistics are shared by the chips; the fit runs on
        one of them.
      bytes: by kind, of each chip: `weights`, `statistics`, `batch`.
    """

    flops: dict[str, float]
    seconds: dict[str, float]
    bytes: dict[str, int]

    @property
    def memory(self) -> int:
        """Returns the bytes of each chip."""
        return sum(self.bytes.values())


def streaming_cost(
    config: ModelConfig,
    tokens: int,
    machine: Machine,
    *,
    targets: str = "all",
    row_length: int = 128,
    tokens_per_batch: int = 4096,
    bytes_per_value: int = 4,
) -> Cost:
    """Returns the cost of linear maps between layers from streaming moments
    (`jmat.capture`).

    Args:
      config: of the model.
      tokens: run through the model and read.
      machine: that does it.
      targets: `all` later layers of each layer, or the `final` one.
      row_length: T of the packed batches.
      tokens_per_batch: B·T, of all chips together.
      bytes_per_value: of weights and activations: 4 for float32, 2 for bfloat16.
    """
    flops = {
        "capture": capture_flops(config, tokens, row_length),
        "statistics": statistics_flops(config, tokens, targets),
        "fit": moments_fit_flops(config, targets),
    }
    wide = machine.peak_float64
    rates = {
        "capture": machine.chips * machine.share * machine.peak,
        "statistics": machine.chips * machine.share * wide,
    }
    seconds = {step: flops[step] / rate for step, rate in rates.items()}
    factors = factorization_flops(config)
    seconds["fit"] = factors / (machine.factor_share * wide) + (flops["fit"] - factors) / (
        machine.share * wide
    )
    per_chip = math.ceil(tokens_per_batch / machine.chips)
    return Cost(
        flops,
        seconds,
        {
            "weights": parameter_count(config) * bytes_per_value,
            "statistics": statistics_bytes(config, targets),
            "batch": batch_bytes(config, per_chip, row_length, bytes_per_value=bytes_per_value),
        },
    )


# --- floating-point operations --------------------------------------------------------------------


def capture_flops(config: ModelConfig, tokens: float | int, context: float | int) -> float:
    """Returns the operations of all blocks over `tokens` positions that look at
    `context` positions each; no head.
    """
    return float(config.layers * block_flops(config, tokens, context))


def pair_count(config: ModelConfig, targets: str) -> int:
    """Returns the number of maps: L to the final layer, L(L + 1)/2 between all. Raises
    ValueError for targets of another name.
    """
    check_choice("targets", targets, TARGETS)
    L = config.layers
    return L if targets == "final" else L * (L + 1) // 2


def statistics_flops(config: ModelConfig, tokens: float | int, targets: str) -> float:
    """Returns the operations of `Σ x xᵀ` of every source and `Σ x yᵀ` of every pair: 2
    D² a token each. Sums of vectors are left out.
    """
    return 2.0 * config.width**2 * tokens * (config.layers + pair_count(config, targets))


def factorization_flops(config: ModelConfig) -> float:
    """Returns the operations of the eigenvectors of every source's moments, and of the
    singular values that give its condition number.
    """
    return config.layers * (9 + 8 / 3) * config.width**3


def moments_fit_flops(config: ModelConfig, targets: str) -> float:
    """Returns the operations of `jmat.maps.from_moments` for all sources: the
    factorisations, and three D × D products a pair.
    """
    return factorization_flops(config) + 6.0 * config.width**3 * pair_count(config, targets)


# --- bytes ----------------------------------------------------------------------------------------


def parameter_count(config: ModelConfig) -> int:
    """Returns the number of parameters of the model as jmat holds it. Nothing is
    allocated, and only the shapes of one block and the next are looked at, since all
    are alike.
    """

    def count(layers: int) -> int:
        shapes = jax.eval_shape(
            lambda: build(dataclasses.replace(config, layers=layers), nnx.Rngs(0))
        )
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))

    one, two = count(1), count(2)
    return one + (config.layers - 1) * (two - one)


def statistics_bytes(config: ModelConfig, targets: str) -> int:
    """Returns the bytes of the `Moments` of all layers with the `final` one, or with
    `all` later ones.
    """
    L = config.layers
    return moments_bytes(config.width, L, pair_count(config, targets), L + 1)


def moments_bytes(width: int, sources: int, pairs: int, sites: int) -> int:
    """Returns the bytes of `Moments`, float64: a D × D matrix for every source and
    pair, three vectors and a count a site.
    """
    return 8 * (width**2 * (sources + pairs) + (3 * width + 1) * sites)


def batch_bytes(
    config: ModelConfig, tokens: int, row_length: int, *, bytes_per_value: int = 4
) -> int:
    """Returns the bytes of one batch at its peak.

    It holds the streams h_0 .. h_L and, inside a block, the hidden layer and the
    attention scores. Statistics convert one pair of streams at a time to float64.
    """
    D, gates = config.width, 2 if config.gated_ffn else 1
    streams = (config.layers + 1) * D * bytes_per_value
    hidden = (1 + gates) * config.ffn_width * bytes_per_value
    scores = config.heads * row_length * (4 + bytes_per_value)
    wide = 2 * 8 * D
    return tokens * (streams + max(hidden, scores, wide))
