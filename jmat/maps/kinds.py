"""Kinds of maps: one table says for each name how it is fitted. No other file knows the
names.

A kind is a name, for some with a parameter: `mat`, `ridge:1e-2`, `rank:64`. With
`+int8` behind it, the matrices of the map are rounded to int8 by row: `mat+int8`.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxtyping import Float
from numpy import ndarray

from jmat.maps import closed_forms, jacobian, lens, one_jump
from jmat.maps.closed_forms import AUTO
from jmat.maps.compact import Map, quantised
from jmat.maps.jacobian import ERROR, Jacobian
from jmat.maps.lens import Lesson
from jmat.maps.regression import Regression
from jmat.maps.weighting import EQUAL
from jmat.models.family import Transformer
from jmat.runtime.checks import check_several

INT8 = "+int8"
_DIGITS = 6  # of a rank, or of a number of units: longer ones are no map that fits into memory
IDENTITY = "id"
MAT, AFFINE = "mat", "affine"  # least squares without and with an intercept
Parameter = int | float | str | None


@dataclasses.dataclass(frozen=True)
class Entry:
    """Says how the maps of one name are fitted.

    Attributes:
      fit: returns the map of one pair's moments, given the parameter; None for a kind
        that is trained, chosen, or derived from gradients.
      parse: returns the parameter from its text, "" for none; raises ValueError with
        what it expects.
      example: how the kind is written.
      train: returns the map that is trained on stored activations, given the parameter;
        None for other kinds.
      derive: returns the map of a mean Jacobian, given the moments of its pair, too;
        None for other kinds. The parameter is the relative error that is wanted.
      choose: returns the one map of all source layers, given the model, their streams,
        h_L, the parameter and the weights of tokens; None for other kinds.
      is_rank: the parameter is a rank, which the width bounds.
      needs_head: the fit reads the model's head.
      is_pooled: one map serves all source layers; it is fitted to the moments of all
        together.
      is_square: source and target must be equally wide.
      sums_future: the target of the fit is the sum of the target over a position and
        all later ones (`jmat.capture.future`).
    """

    fit: Callable[[Regression, Any], Map] | None
    parse: Callable[[str], Parameter]
    example: str
    train: Callable[[Lesson, Any], Map] | None = None
    derive: Callable[[Jacobian, Regression], Map] | None = None
    choose: (
        Callable[[Transformer, Sequence[Float[ndarray, "N D"]], ndarray, Any, str], Map] | None
    ) = None
    is_rank: bool = False
    needs_head: bool = False
    is_pooled: bool = False
    is_square: bool = False
    sums_future: bool = False


def _none(text: str) -> None:
    """Reads no parameter."""
    if text:
        raise ValueError("no parameter")


def _share(text: str) -> float | str:
    """Reads a share of the mean variance, or `auto`, which is the default."""
    if text in ("", AUTO):
        return AUTO
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 < share < math.inf:
        raise ValueError("a number above 0, or auto")
    return share


def _error(text: str) -> float | None:
    """Reads a relative error; 0 stands for all the text, nothing for the default."""
    if not text:
        return None
    try:
        error = float(text)
    except ValueError:
        error = math.nan
    if not 0 <= error < 1:
        raise ValueError("a relative error of at least 0 and below 1")
    return error


def _whole(text: str) -> int:
    """Reads a whole number of at least 1."""
    if len(text) > _DIGITS:
        raise ValueError(f"a whole number of at most {_DIGITS} digits")
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise ValueError("a whole number of at least 1")
    return int(text)


KINDS: dict[str, Entry] = {
    IDENTITY: Entry(closed_forms.identity, _none, IDENTITY, is_square=True),
    "mean": Entry(closed_forms.constant, _none, "mean"),
    MAT: Entry(closed_forms.linear, _none, MAT),
    AFFINE: Entry(closed_forms.affine, _none, AFFINE),
    "ridge": Entry(closed_forms.ridge, _share, "ridge:1e-2"),
    "toward_id": Entry(closed_forms.toward_identity, _share, "toward_id:1e-2", is_square=True),
    "orthogonal": Entry(closed_forms.orthogonal, _none, "orthogonal"),
    "diag": Entry(closed_forms.diagonal, _none, "diag", is_square=True),
    "hadamard": Entry(closed_forms.hadamard, _none, "hadamard", is_square=True),
    "rank": Entry(closed_forms.low_rank, _whole, "rank:64", is_rank=True),
    "rank_logit": Entry(
        closed_forms.low_rank_logits, _whole, "rank_logit:64", is_rank=True, needs_head=True
    ),
    "njtc": Entry(closed_forms.standardised, _whole, "njtc:8", is_rank=True),
    "one_jump": Entry(closed_forms.low_rank, _whole, "one_jump:64", is_rank=True, is_pooled=True),
    "one_jump_kl": Entry(
        None,
        _whole,
        "one_jump_kl:64",
        choose=one_jump.chosen_by_kl,
        is_rank=True,
        needs_head=True,
        is_pooled=True,
    ),
    "tuned": Entry(None, _none, "tuned", lens.tuned, needs_head=True),
    "mlp": Entry(None, _whole, "mlp:64", lens.hidden, needs_head=True),
    "future_sum": Entry(closed_forms.affine, _none, "future_sum", sums_future=True),
    "jacobian": Entry(None, _error, "jacobian:0.05", derive=jacobian.lens),
    "jacobian_no_bias": Entry(
        None, _error, "jacobian_no_bias:0.05", derive=jacobian.lens_without_bias
    ),
    "jacobian_shrunk": Entry(None, _error, "jacobian_shrunk:0.05", derive=jacobian.shrunk_lens),
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """Holds a kind of map.

    Attributes:
      name: one of `KINDS`.
      parameter: what stands behind the colon.
      int8: whether the matrices are rounded to int8 by row.
    """

    name: str
    parameter: Parameter = None
    int8: bool = False

    def __str__(self) -> str:
        shown = "" if self.parameter in (None, AUTO) else f":{self.parameter}"
        return f"{self.name}{shown}{INT8 if self.int8 else ''}"

    @property
    def entry(self) -> Entry:
        """Returns how maps of this kind are fitted."""
        return KINDS[self.name]

    @property
    def wanted_error(self) -> float:
        """Returns the relative error at which a mean Jacobian is good enough."""
        return self.parameter if isinstance(self.parameter, float) else ERROR

    @property
    def needs_activations(self) -> bool:
        """Returns whether the kind is fitted to stored activations, not to moments."""
        entry = self.entry
        return entry.train is not None or entry.choose is not None or entry.sums_future

    @property
    def fits_a_pair(self) -> bool:
        """Returns whether the moments of one source and one target alone give the map."""
        entry = self.entry
        return entry.fit is not None and not entry.is_pooled and not entry.sums_future

    @property
    def exact(self) -> "Kind":
        """Returns the kind without int8."""
        return dataclasses.replace(self, int8=False)

    def check_width(self, source: int, target: int) -> None:
        """Raises ValueError where there is no map of this kind from a width to another."""
        if self.entry.is_square and source != target:
            raise ValueError(
                f"kind {str(self)!r} keeps the width, and the sites are {source} and {target} wide."
            )
        widest = min(source, target)
        if self.entry.is_rank and isinstance(self.parameter, int) and self.parameter > widest:
            raise ValueError(
                f"kind {str(self)!r} has rank {self.parameter}, above the width {widest} of the "
                f"maps: give a rank of at most {widest}."
            )


def parse_kind(text: str) -> Kind:
    """Returns the kind of a name such as `mat`, `ridge:1e-2` or `rank:64+int8`.

    Raises:
      ValueError: an unknown name, or a parameter that the kind does not have.
    """
    if not isinstance(text, str):
        raise ValueError(
            f"a kind of map is text such as {MAT!r}; got an object of type {type(text).__name__}."
        )
    written = text.strip()
    body, int8, rest = written.partition(INT8)
    name, colon, parameter = body.partition(":")
    if name not in KINDS or rest:
        near = difflib.get_close_matches(name.lower(), KINDS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near and near[0] != name else ""
        raise ValueError(
            f"{written!r} is no kind of map; {hint}Kinds: "
            f"{', '.join(each.example for each in KINDS.values())}."
        )
    entry = KINDS[name]
    try:
        if colon and not parameter:
            raise ValueError("a parameter behind the colon, or no colon")
        return Kind(name, entry.parse(parameter), bool(int8))
    except ValueError as error:
        raise ValueError(
            f"kind {written!r}: {name} takes {error}, as in {entry.example!r}."
        ) from None


def parse_kinds(texts: Iterable[str]) -> list[Kind]:
    """Returns the kinds of several names, each once. Raises ValueError as `parse_kind`,
    and for no name.
    """
    check_several("kinds", texts)
    kinds = list(dict.fromkeys(parse_kind(text) for text in texts))
    if not kinds:
        raise ValueError(f"no kind of map is named; choose from {', '.join(KINDS)}.")
    return kinds


def fit_kind(kind: Kind, pair: Regression) -> Map:
    """Returns the map of a kind, fitted to the moments of a pair; those of all pairs
    together for a pooled kind.

    What one fit factorises is kept in `pair` for the next ones.

    Raises:
      ValueError: the widths do not fit the kind; NaN or infinity in the moments; no
        head where one is needed.
    """
    kind.check_width(len(pair.x_mean), len(pair.y_mean))
    if kind.entry.fit is None:
        raise ValueError(
            f"kind {str(kind)!r} "
            + (
                "needs stored activations: it is trained or chosen"
                if kind.needs_activations
                else "is derived from gradients"
            )
            + ", not fitted to moments."
        )
    pair.check()
    stand_in = kind.entry.fit(pair, kind.parameter)
    return quantised(stand_in) if kind.int8 else stand_in


def train_kind(kind: Kind, lesson: Lesson) -> Map:
    """Returns the map of a kind that is trained.

    Raises:
      ValueError: the kind has a closed form.
    """
    if kind.entry.train is None:
        how = "has a closed form: fit_kind finds it" if kind.entry.fit else "is not trained"
        raise ValueError(f"kind {str(kind)!r} {how}.")
    stand_in = kind.entry.train(lesson, kind.parameter)
    return quantised(stand_in) if kind.int8 else stand_in


def derive_kind(kind: Kind, found: Jacobian, pair: Regression) -> Map:
    """Returns the map of a kind that is derived from gradients.

    Args:
      kind: the kind.
      found: the mean Jacobian of the target by the source.
      pair: their moments.

    Raises:
      ValueError: the kind is not derived from gradients.
    """
    if kind.entry.derive is None:
        raise ValueError(f"kind {str(kind)!r} is not derived from gradients.")
    stand_in = kind.entry.derive(found, pair)
    return quantised(stand_in) if kind.int8 else stand_in


def choose_kind(
    kind: Kind,
    model: Transformer,
    sources: Sequence[Float[ndarray, "N D"]],
    target: Float[ndarray, "N E"],
    weights: str = EQUAL,
) -> Map:
    """Returns the one map of a kind for all source layers.

    Args:
      kind: one that is chosen among the maps of the single layers.
      model: has a head.
      sources: the streams of the layers at the same tokens.
      target: h_L there.
      weights: of the tokens.

    Raises:
      ValueError: the kind is no such one.
    """
    if kind.entry.choose is None:
        raise ValueError(f"kind {str(kind)!r} is not chosen among the maps of single layers.")
    stand_in = kind.entry.choose(model, sources, target, kind.parameter, weights)
    return quantised(stand_in) if kind.int8 else stand_in
