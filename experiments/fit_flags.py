"""Defines the flags of experiments that fit maps from layer to layer."""

from absl import flags

from experiments import snapshot_flags
from jmat.maps.plain import SOLVERS
from jmat.studies.fitting import ROUTES, TOKENS

flags.adopt_module_key_flags(snapshot_flags)
flags.DEFINE_enum(
    "fit_tokens",
    "sampled",
    TOKENS,
    "Tokens of the fit sentences that maps are fitted on: the sampled positions, or all (which "
    "masked models read unmasked; --protocol=jmat leaves out the same as when it samples). "
    "Evaluation is on sampled positions always.",
)
flags.DEFINE_enum(
    "route",
    "auto",
    ROUTES,
    "memory: activations are stored, and maps fitted to them (QR, float32). streaming: nothing is "
    "stored but second moments (float64), whose size does not depend on the text; such a run goes "
    "on where it was killed. auto: memory where it is the smaller one, or small.",
)
flags.DEFINE_enum(
    "solver",
    "qr",
    SOLVERS,
    "qr: one factorisation of a layer for all its targets. lstsq: the plain formula, "
    "jnp.linalg.lstsq(x, y, rcond=0), one call a pair; slower, and less exact beside large "
    "coordinates. It stores activations.",
)
