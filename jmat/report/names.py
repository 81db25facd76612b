"""Returns the words by which figures name maps, parts and metrics; rows of results.json
keep the code names.
"""

import pathlib
from collections.abc import Mapping, Sequence

from jmat.report.rows import Content
from jmat.runtime.annotations import Fields

# Code name → its words in a legend. Kinds that take a number, such as `ridge:0.01`, are named by
# what stands before it.
MAPS = {
    "mat": "linear map",
    "id": "logit lens",
    "mat_attn": "linear map of attention",
    "mat_ffn": "linear map of feed-forward",
    "mat_ln1_ln2": "linear map of norms",
    "affine": "affine map",
    "ridge": "ridge map",
    "toward_id": "map shrunk to the identity",
    "orthogonal": "orthogonal map",
    "diag": "diagonal map",
    "hadamard": "diagonal map, rotated",
    "rank": "low-rank map",
    "rank_logit": "low-rank map of logits",
    "kl": "map trained on KL",
    "mse": "map trained on squared error",
    "tuned": "tuned lens",
    "future_sum": "affine map to later streams too",
    "jacobian": "Jacobian lens",
    "jacobian_no_bias": "Jacobian lens without bias",
    "jacobian_shrunk": "Jacobian lens, shrunk",
    "mlp": "affine map and hidden layer",
    "mean": "mean of the target",
    "njtc": "low-rank map, standardised",
    "one_jump": "one low-rank map for all layers",
}
# Between layers below the last one there are no logits: `id` is the stream itself.
STREAMS = MAPS | {"id": "identity"}
PARTS = {"ln_1": "first norm", "attn": "attention", "ln_2": "second norm", "ffn": "feed-forward"}
METHODS = {"delete": "deleted", "map": "linear map", "distil": "distilled map", "merge": "merged"}
PROBES = {
    "ridge": "ridge classifier",
    "logistic": "logistic regression",
    "majority": "most frequent label",
}
PROBES |= {f"{code} (against)": f"{words}, other model" for code, words in PROBES.items()}
METRICS = {
    "r2": "$R^2$",
    "kl": "KL",
    "linearity_without_residual": "linearity without residual",
    "linearity_held_out": "linearity, held out",
    "accuracy": "accuracy of the probe",
}


def readable(code: str, names: Mapping[str, str] = MAPS) -> str:
    """Returns the words for a code name, and a name that has none as it is.

    A number behind a colon is kept: `rank:64` is "low-rank map 64". `+int8` behind it
    is named, too.
    """
    if code.endswith("+int8"):
        return f"{readable(code.removesuffix('+int8'), names)}, int8"
    if code in names:
        return names[code]
    base, colon, number = code.partition(":")
    if colon and base in names:
        return f"{names[base]} {plain(number)}"
    return plain(code)


def metric_name(metric: str) -> str:
    """Returns the words for a metric: `r2` is "$R^2$"."""
    return METRICS.get(metric, plain(metric))


def plain(text: str) -> str:
    """Returns a text in which a dollar sign does not begin a formula of matplotlib."""
    return text.replace("$", r"\$")


def model_name(results: Content | Fields) -> str:
    """Returns the name of a run's model for a title: of a path the last two parts."""
    return short_path(str(results.get("config", {}).get("model", "")))


def short_path(name: str) -> str:
    """Returns the last two parts of a path, or a name that is none as it is."""
    return short_paths([name], least=2)[0]


def short_paths(names: Sequence[str], least: int) -> list[str]:
    """Returns as many of the last parts of every path as tell all apart, at least so
    many.
    """
    paths = [pathlib.PurePath(name).parts for name in names]
    longest = max(map(len, paths), default=0)
    count = next(
        (n for n in range(least, longest) if len({path[-n:] for path in paths}) == len(paths)),
        longest,
    )
    return [plain(str(pathlib.PurePath(*path[-max(count, 1) :]))) for path in paths]
