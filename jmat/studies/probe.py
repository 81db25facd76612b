"""Linear probes: what can be read off each layer by a linear classifier.

Features are standardised with the fit examples' mean and deviation; the classifier is scikit-learn's.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped
from numpy import ndarray

from jmat.data.encoding import encode, special_tokens
from jmat.data.examples import Examples, Split
from jmat.data.json_lines import read_json_lines
from jmat.metrics.bootstrap import bootstrap_mean
from jmat.metrics.r2 import varying
from jmat.report.notes import estimate, with_note
from jmat.runtime.progress import track

CLASSIFIERS = ("ridge", "logistic")
_ALPHAS = np.logspace(-1, 5, 7)  # ridge penalties to choose from, by leave-one-out on the fit examples


def read_labelled(path: str | pathlib.Path) -> tuple[list[str], list[str]]:
    """Texts and their labels from JSON lines, `{"text": …, "label": …}` each.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a line is something else, or there are fewer than two labels.
    """
    texts, labels = zip(*read_json_lines(path, _labelled, '{"text": "…", "label": "…"}'), strict=True)
    if len(set(labels)) < 2:
        raise ValueError(f"{path} has the labels {sorted(set(labels))}; a classifier needs two at least.")
    return list(texts), list(labels)


def _labelled(fields: Mapping[str, Any]) -> tuple[str, str]:
    text, label = fields["text"], fields["label"]
    if not isinstance(text, str) or not text.strip() or not isinstance(label, str | int):
        raise ValueError("the text should be a text, not empty, and the label a text or a whole number")
    return text, str(label)


def labelled_examples(
    texts: Sequence[str], labels: Sequence[str], tokenizer: Any, *, max_length: int, masked: bool, seed: int
) -> tuple[Examples, dict[str, Shaped[ndarray, " N"]]]:
    """Three quarters of the texts to fit on, the rest to evaluate on, drawn by the seed; and their labels.

    A causal model is read at the last token of a text, a masked one at its first, [CLS].

    Raises:
      ValueError: too few texts; a masked model whose tokenizer puts no token in front of a text.
    """
    special = special_tokens(tokenizer, masked=masked)
    if masked and not special.before:
        raise ValueError(
            "a masked model is probed at [CLS], and its tokenizer puts no token in front of a text: it needs a "
            "tokenizer.json with a post_processor, or a tokenizer_config.json that names the class of its tokenizer."
        )
    order = np.random.default_rng(seed).permutation(len(texts))
    cut = 3 * len(texts) // 4
    splits: dict[str, Split] = {}
    kept: dict[str, Shaped[ndarray, " N"]] = {}
    for name, chosen in (("fit", order[:cut]), ("eval", order[cut:])):
        pieces = encode([texts[i] for i in chosen], tokenizer, max_length, special)
        tokens = [piece for piece in pieces if piece is not None]
        if not tokens:
            raise ValueError(f"{len(texts)} labelled texts leave none to {name}; give more of them.")
        lengths = np.asarray([len(t) for t in tokens], np.int32)
        positions = np.zeros_like(lengths) if masked else lengths - 1
        splits[name] = Split(tokens=np.concatenate(tokens), lengths=lengths, positions=positions)
        kept[name] = np.asarray([labels[i] for i, piece in zip(chosen, pieces, strict=True) if piece is not None])
    return Examples(**splits), kept


def token_classes(tokens: Int[ndarray, " N"], tokenizer: Any) -> Shaped[ndarray, " N"]:
    """A coarse class of each token, −1 being the end of a text: end, number, punctuation, word, or piece of one."""
    names = {token: _token_class(token, tokenizer) for token in np.unique(tokens).tolist()}
    return np.asarray([names[token] for token in tokens.tolist()])


def _token_class(token: int, tokenizer: Any) -> str:
    if token < 0:
        return "end"
    piece = tokenizer.convert_ids_to_tokens(token)
    text = tokenizer.convert_tokens_to_string([piece]).strip().removeprefix("##")
    if not any(c.isalnum() for c in text):
        return "punctuation"
    if text[0].isdigit():
        return "number"
    # Byte-level BPE and SentencePiece mark a beginning, WordPiece what goes on.
    marks_beginnings = piece.startswith(("Ġ", "▁"))
    goes_on = piece.startswith("##") if "##" in _prefixes(tokenizer) else not marks_beginnings
    return "piece" if goes_on else "word"


def _prefixes(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return str(getattr(getattr(backend, "model", None), "continuing_subword_prefix", "") or "")


def probe_rows(
    fit: Mapping[int, Float[ndarray, "N D"]],
    held_out: Mapping[int, Float[ndarray, "M D"]],
    labels: Mapping[str, Shaped[ndarray, " _"]],
    *,
    classifier: str = "ridge",
    groups: Int[ndarray, " M"] | None = None,
    seed: int = 0,
    progress: str | None = None,
) -> list[dict[str, Any]]:
    """Accuracy of a probe on each layer at the held-out examples, with intervals; and of the most frequent label.

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
    right = {layer: _right(fit[layer], held_out[layer], labels, classifier) for layer in track(list(fit), progress)}
    most = kinds[counts == counts.max()]
    majority = np.isin(labels["eval"], most) / len(most)
    mean, low, high = bootstrap_mean(
        np.stack([*right.values(), majority], axis=1).astype(np.float64), groups=groups, seed=seed
    )
    names: list[dict[str, Any]] = [*({"map": classifier, "layer": layer} for layer in right), {"map": "majority"}]
    still = "is the same at all examples to fit on: nothing can be read off it"
    constant = {layer: f"the stream of layer {layer} {still}" for layer, X in fit.items() if not varying(X).any()}
    rows = [
        with_note(
            {**name, "metric": "accuracy", **estimate(*figure), "n": len(majority)}, constant.get(name.get("layer", -1))
        )
        for name, *figure in zip(names, mean, low, high, strict=True)
    ]
    tied = f"the labels {', '.join(map(repr, most.tolist()))} are equally frequent: the mean over them"
    return [*rows[:-1], with_note(rows[-1], tied if len(most) > 1 else None)]


def check_labels(labels: Shaped[ndarray, " N"]) -> tuple[Shaped[ndarray, " K"], Int[ndarray, " K"]]:
    """The different labels of the examples to fit on, and how often each comes. Raises ValueError for a single one."""
    kinds, counts = np.unique(labels, return_counts=True)
    if len(kinds) < 2:
        raise ValueError(f"all {len(labels)} examples to fit on have the label {str(kinds[0])!r}; give more of them.")
    return kinds, counts


def _right(X: ndarray, X_eval: ndarray, labels: Mapping[str, ndarray], classifier: str) -> ndarray:
    # Here, since scikit-learn is an extra: only probes need it.
    from sklearn.linear_model import LogisticRegression, RidgeClassifierCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    head = RidgeClassifierCV(_ALPHAS) if classifier == "ridge" else LogisticRegression(max_iter=2000)
    model = make_pipeline(StandardScaler(), head).fit(X.astype(np.float64), labels["fit"])
    return model.predict(X_eval.astype(np.float64)) == labels["eval"]
