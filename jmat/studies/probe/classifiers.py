"""Linear probes: what can be read off each layer by a linear classifier.

Features are standardised with the fit examples' mean and deviation; the classifier is
scikit-learn's.
"""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Int, Shaped
from numpy import ndarray

from jmat.metrics.bootstrap import bootstrap_mean
from jmat.metrics.r2 import varying
from jmat.report.notes import estimate, with_note
from jmat.report.rows import Row
from jmat.runtime.progress import track

CLASSIFIERS = ("ridge", "logistic")
# ridge penalties to choose from, by leave-one-out on the fit examples
_ALPHAS = np.logspace(-1, 5, 7)


def probe_rows(
    fit: Mapping[int, Float[ndarray, "N D"]],
    held_out: Mapping[int, Float[ndarray, "M D"]],
    labels: Mapping[str, Shaped[ndarray, " _"]],
    *,
    classifier: str = "ridge",
    groups: Int[ndarray, " M"] | None = None,
    seed: int = 0,
    progress: str | None = None,
) -> list[Row]:
    """Returns the accuracy of a probe on each layer at the held-out examples, with
    intervals; and of the most frequent label.

    Args:
      fit: layer → stream at the examples to fit on.
      held_out: the same at others.
      labels: of both, under `fit` and `eval`.
      classifier: `ridge` (its penalty chosen by leave-one-out) or `logistic`.
      groups: examples resampled together for the intervals, the sentences.
      seed: of the bootstrap.
      progress: what the progress bar says; None shows none.

    Raises ValueError where the fit examples have but one label.
    """
    kinds, counts = check_labels(labels["fit"])
    right = {
        layer: _right(fit[layer], held_out[layer], labels, classifier)
        for layer in track(list(fit), progress)
    }
    most = kinds[counts == counts.max()]
    majority = np.isin(labels["eval"], most) / len(most)
    mean, low, high = bootstrap_mean(
        np.stack([*right.values(), majority], axis=1).astype(np.float64), groups=groups, seed=seed
    )
    names: list[Row] = [
        *({"map": classifier, "layer": layer} for layer in right),
        {"map": "majority"},
    ]
    still = "is the same at all examples to fit on: nothing can be read off it"
    constant = {
        layer: f"the stream of layer {layer} {still}"
        for layer, X in fit.items()
        if not varying(X).any()
    }
    rows = [
        with_note(
            {**name, "metric": "accuracy", **estimate(*figure), "n": len(majority)},
            constant.get(name.get("layer", -1)),
        )
        for name, *figure in zip(names, mean, low, high, strict=True)
    ]
    tied = (
        f"the labels {', '.join(map(repr, most.tolist()))} are equally frequent: the mean over them"
    )
    return [*rows[:-1], with_note(rows[-1], tied if len(most) > 1 else None)]


def check_labels(labels: Shaped[ndarray, " N"]) -> tuple[Shaped[ndarray, " K"], Int[ndarray, " K"]]:
    """Returns the different labels of the examples to fit on, and how often each comes.
    Raises ValueError for a single one.
    """
    kinds, counts = np.unique(labels, return_counts=True)
    if len(kinds) < 2:
        raise ValueError(
            f"all {len(labels)} examples to fit on have the label {str(kinds[0])!r}; give more of "
            "them."
        )
    return kinds, counts


def _right(X: ndarray, X_eval: ndarray, labels: Mapping[str, ndarray], classifier: str) -> ndarray:
    # Here, since scikit-learn is an extra: only probes need it.
    from sklearn.linear_model import LogisticRegression, RidgeClassifierCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    head = (
        RidgeClassifierCV(_ALPHAS) if classifier == "ridge" else LogisticRegression(max_iter=2000)
    )
    model = make_pipeline(StandardScaler(), head).fit(X.astype(np.float64), labels["fit"])
    return model.predict(X_eval.astype(np.float64)) == labels["eval"]
