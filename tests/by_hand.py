"""What a script should find, computed by hand: least squares in float64, predictions
and intervals with numpy.
"""

import dataclasses
import functools

import numpy as np

import jmat
from jmat.capture.activations import capture
from jmat.data import Split, corpus, make_examples
from jmat.data.examples import mask_positions
from jmat.forward import logits
from jmat.metrics.bootstrap import bootstrap_counts
from jmat.models.sites import stream_sites
from tests.inside import text
from tests.test_reference import REFERENCE


@dataclasses.dataclass(frozen=True)
class Lab:
    """A model and its examples, as flags of a script ask for them."""

    family: str = "gpt2"
    num_fit: int = 100
    num_eval: int = 40
    seed: int = 0
    intercept: bool = False
    protocol: str = "din2023"
    positions_per_sentence: int = 1
    skip_first: int | None = None
    skip_special: bool | None = None
    source: str = ""
    dtype: str = "float32"

    @functools.cached_property
    def loaded(self):
        return jmat.load(REFERENCE / self.family, dtype=self.dtype)

    @property
    def model(self):
        return self.loaded[0]

    @property
    def layers(self):
        return self.model.config.layers

    @functools.cached_property
    def sentences(self):
        return corpus.fit_eval(self.source or text(), self.num_fit, self.num_eval, self.seed)

    @functools.cached_property
    def examples(self):
        names = ("seed", "protocol", "positions_per_sentence", "skip_first", "skip_special")
        chosen = {name: getattr(self, name) for name in names}
        size = {
            "max_length": self.model.config.num_positions,
            "masked": not self.model.config.causal,
        }
        return make_examples(*self.sentences, self.loaded[1], **size, **chosen)

    @property
    def mask_token(self):
        return None if self.model.config.causal else self.loaded[1].mask_token_id

    def read(self, split, sites=None):
        """Activations of a split by site, the streams by default."""
        return capture(
            self.model, mask_positions(split, self.mask_token), sites or stream_sites(self.layers)
        )

    @functools.cached_property
    def fit(self):
        """h_0 .. h_L at the fit examples."""
        return list(self.read(self.examples.fit).values())

    @functools.cached_property
    def held_out(self):
        """h_0 .. h_L at the evaluation examples."""
        return list(self.read(self.examples.eval).values())

    @functools.cached_property
    def every_token(self):
        """h_0 .. h_L at all tokens of the fit sentences but the first ones that are
        skipped.
        """
        return list(self.read(self.every(self.examples.fit)).values())

    def every(self, split):
        """The same sentences, with an example at each token but the first ones that are
        skipped.
        """
        rows = np.repeat(np.arange(split.num_sentences), split.lengths)
        places = np.arange(len(split.tokens)) - split.starts[rows]
        kept = places >= (self.skip_first or 0)
        return Split(
            split.tokens, split.lengths, places[kept].astype(np.int32), rows[kept].astype(np.int32)
        )

    def jump(self, x, i, j=None, fit=None):
        """Stream i through `mat` to layer j, by default the last."""
        streams = fit or self.fit
        return affine(streams[i], streams[self.layers if j is None else j], self.intercept)(x)

    @functools.cached_property
    def groups(self):
        return self.examples.eval.rows

    def drawn(self, samples=1000, groups=None):
        """How often each evaluation example is drawn in each resample of whole
        sentences.
        """
        groups = self.groups if groups is None else groups
        return bootstrap_counts(len(groups), groups=groups, samples=samples, seed=self.seed)

    def interval(self, values, drawn=None):
        """Mean with its 95 % interval over sentences, drawn whole."""
        drawn = self.drawn() if drawn is None else drawn
        low, high = np.percentile(drawn @ values / drawn.sum(1), [2.5, 97.5])
        return values.mean(), low, high

    def metrics(self, stand_in):
        """Metric → its value at each evaluation example, where a stream stands in for
        the last one.
        """
        return compare(log_p(self.model, self.held_out[-1]), log_p(self.model, stand_in))


def affine(x, y, intercept=False, rcond=None):
    """Least squares in float64, as a function; directions in which x varies less than
    `rcond` are left out.
    """
    x, y = (np.asarray(values, np.float64) for values in (x, y))
    x_mean, y_mean = (values.mean(0) if intercept else 0.0 for values in (x, y))
    W = np.linalg.lstsq(x - x_mean, y - y_mean, rcond=rcond)[0]
    return lambda new: (np.asarray(new, np.float64) - x_mean) @ W + y_mean


def log_p(model, stream):
    """Log-probabilities of what a model predicts from its last stream, in float64."""
    scores = np.asarray(logits(model, np.asarray(stream, np.float32)), np.float64)
    scores -= scores.max(-1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(-1, keepdims=True))


def compare(full, short):
    """Precision and recall at k, surprisal and KL of each prediction, from
    log-probabilities.
    """
    every, top_full, top_short = np.arange(len(full)), full.argmax(-1), short.argmax(-1)
    rank_in_full = (full > full[every, top_short][:, None]).sum(1)
    rank_in_short = (short > short[every, top_full][:, None]).sum(1)
    values = {f"precision@{k}": (rank_in_full < k).astype(float) for k in (1, 5, 10)}
    values |= {f"recall@{k}": (rank_in_short < k).astype(float) for k in (1, 5, 10)}
    return values | {
        "surprisal": -full[every, top_short],
        "kl": (np.exp(full) * (full - short)).sum(1),
    }


def r2(y, predicted, weights=None):
    """Mean over the coordinates of the coefficient of determination; `weights` of the
    examples.
    """
    w = np.ones(len(y)) if weights is None else weights
    y, predicted = (np.asarray(values, np.float64) for values in (y, predicted))
    mean = w @ y / w.sum()
    return float(np.mean(1 - (w @ (y - predicted) ** 2) / (w @ (y - mean) ** 2)))


def same(row, figures, n=None, tolerance=2e-3):
    """Raises AssertionError where a row is not `(value, low, high)`; one example of a
    count may fall the other way.
    """
    counted = row["metric"].startswith(("precision", "recall", "accuracy"))
    allowed = 1.01 / row["n"] if counted else 0.0
    for name, wanted in zip(("value", "low", "high"), np.atleast_1d(figures), strict=False):
        assert abs(row[name] - wanted) <= allowed + tolerance * max(abs(wanted), 0.05), (
            name,
            wanted,
            row,
        )
    if n is not None:
        assert row["n"] == n, row
