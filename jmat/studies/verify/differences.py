"""Does jmat compute what transformers computes? Every site of a checkpoint against
PyTorch, and a verdict.

The reference is transformers in float32 with eager attention. Differences are relative:
the largest |ours − theirs| at a real token, each coordinate in units of its root mean
square, or of the median coordinate's where that is larger; logits in units of their
standard deviation at a token. The verdict is

- MATCH: the logits differ by no more than `TOLERANCE`;
- PRECISION: they differ more, but rounding explains it: every site differs by no more
  than `FACTOR` times what transformers itself differs in another precision (in the
  dtype asked for; for float32, in float64);
- WRONG: some site differs by more than both. The first of them, in the order of
  computation, is where to look.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jmat.data.encoding import Tokenizer, encode, special_tokens
from jmat.forward import run
from jmat.metrics.predictions import Predictions
from jmat.models.config import ModelConfig
from jmat.models.family import Transformer
from jmat.report.notes import noted, with_note
from jmat.report.rows import Row
from jmat.runtime.annotations import TorchModel
from jmat.studies.verify.reference import load_reference, run_reference

TOLERANCE = 1e-4
FACTOR = 8.0
SENTENCES = (
    "Yes.",
    "The committee will meet again on Thursday.",
    "Although the river had risen by more than two metres, nobody in the village thought of "
    "leaving.",
    "In 1928 a physicist wrote down an equation whose solutions came in pairs; four years later "
    "the second of each pair, which most of his colleagues had taken for an artefact, was seen in "
    "a cloud chamber.",
)


class PaddedTokens(NamedTuple):
    """Holds token ids, and which of them are real."""

    tokens: np.ndarray  # int32 [B, T]
    mask: np.ndarray  # bool [B, T]

    @property
    def positions(self) -> np.ndarray:
        """Returns the index of each token in its text; 0 for padding."""
        return np.where(self.mask, np.cumsum(self.mask, axis=1) - 1, 0).astype(np.int32)


class SiteDifference(NamedTuple):
    """Holds the distance of a site from the reference, and that of transformers from
    itself by rounding (0: not measured).
    """

    site: str
    difference: float
    rounding: float

    @property
    def explained(self) -> bool:
        """Returns whether tolerance or rounding explains the difference."""
        return self.difference <= max(TOLERANCE, FACTOR * self.rounding)


@dataclasses.dataclass(frozen=True)
class Report:
    """Holds the result of a comparison."""

    verdict: str
    sites: tuple[SiteDifference, ...]  # in the order of computation
    first: str | None  # the first site whose difference nothing explains
    largest: float  # |difference| of a logit, absolute; of the last site where there is no head
    same_top_1: float  # share of real tokens with the same most likely token
    tokens: int
    note: str | None = None  # where the predictions do not depend on the text


def verify(
    folder: pathlib.Path,
    model: Transformer,
    tokenizer: Tokenizer | None,
    *,
    dtype: str = "float32",
    text: str | None = None,
) -> Report:
    """Compares a model, loaded from `folder` in `dtype`, with what transformers makes
    of the same folder.

    Args:
      folder: in Hugging Face format.
      model: as `jmat.load` gives it.
      tokenizer: of the model; without one, the tokens are random.
      dtype: that the model was loaded in.
      text: to run on, instead of `SENTENCES`.

    Raises ValueError if torch is not installed, transformers does not load the folder,
    or the text has no tokens.
    """

    def load(precision: str) -> TorchModel:
        has_head = model.head is not None
        return load_reference(folder, model.config.family, dtype=precision, has_head=has_head)

    other = "float64" if dtype == "float32" else dtype
    batches = make_batches(model.config, tokenizer, text)
    return compare(model, load("float32"), lambda: load(other), batches)


def make_batches(
    config: ModelConfig, tokenizer: Tokenizer | None, text: str | None = None
) -> list[PaddedTokens]:
    """Returns texts of several lengths, padded on the right, padded on the left, and
    the longest alone.

    A text that is longer than the model's positions is cut, which is logged.
    """
    if tokenizer is None:
        rng = np.random.default_rng(0)
        rows = [rng.integers(0, config.vocab_size, length) for length in (1, 6, 13, 24)]
    else:
        special = special_tokens(tokenizer, masked=not config.causal)
        texts = SENTENCES if text is None else (text,)
        rows = [
            row
            for row in encode(texts, tokenizer, config.num_positions, special)
            if row is not None
        ]
        if not rows:
            raise ValueError("the text has no tokens.")
        if text is not None:  # its beginnings, and the whole
            rows = [rows[0][: -(-rows[0].size // part)] for part in (8, 3, 1)]
    rows = [row[: config.num_positions].astype(np.int32) for row in rows]
    longest = max(rows, key=len)
    right = np.stack([np.arange(longest.size) < row.size for row in rows])
    batches = [PaddedTokens(longest[None], np.ones((1, longest.size), bool))]
    for mask in (right, right[:, ::-1]):
        tokens = np.zeros(mask.shape, np.int32)
        tokens[mask] = np.concatenate(rows)
        batches.append(PaddedTokens(tokens, mask))
    return batches


def compare(
    model: Transformer,
    reference: TorchModel,
    load_rounded: Callable[[], TorchModel],
    batches: Sequence[PaddedTokens],
) -> Report:
    """Returns the verdict on a model, given the reference and how to load it in another
    precision, should that be needed.
    """

    def theirs(torch_model: TorchModel, batch: PaddedTokens) -> dict[str, np.ndarray]:
        return run_reference(torch_model, batch.tokens, batch.mask, batch.positions)

    differences: dict[str, float] = {}
    largest, same, tokens = 0.0, 0, 0
    predictions = Predictions()
    for batch in batches:
        expected = theirs(reference, batch)
        with jax.default_matmul_precision("highest"):
            _, kept = run(model, batch.tokens, mask=batch.mask, keep=tuple(expected))
        got = {
            site: np.asarray(value, np.float64).reshape(*batch.tokens.shape, -1)
            for site, value in kept.items()
        }
        differences = _largest(differences, _relative(got, expected, batch.mask))
        last = next(reversed(expected))
        if last == "logits":
            predictions.add(expected[last].astype(np.float32), batch.mask)
        ours, wanted = got[last][batch.mask], expected[last][batch.mask]
        largest = max(largest, _finite(np.abs(ours - wanted).max()))
        same, tokens = (
            same + int((ours.argmax(-1) == wanted.argmax(-1)).sum()),
            tokens + len(wanted),
        )
    rounding = dict.fromkeys(differences, 0.0)
    if max(differences.values()) > TOLERANCE:
        rounded = load_rounded()
        for batch in batches:
            measured = _relative(theirs(rounded, batch), theirs(reference, batch), batch.mask)
            rounding = _largest(rounding, measured)
    sites = tuple(
        SiteDifference(site, value, rounding[site]) for site, value in differences.items()
    )
    first = next((site.site for site in sites if not site.explained), None)
    verdict = "WRONG" if first else "MATCH" if sites[-1].difference <= TOLERANCE else "PRECISION"
    return Report(verdict, sites, first, largest, same / tokens, tokens, predictions.note())


def _relative(
    values: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], mask: np.ndarray
) -> dict[str, float]:
    """Returns the largest difference at a real token, by site, in units of what is
    expected there.
    """
    differences = {}
    for site, right in expected.items():
        right = right[mask]
        if site == "logits":
            unit = (right - right.mean(-1, keepdims=True)).std()
        else:
            each = np.sqrt(np.square(right).mean(0))
            unit = np.maximum(each, np.median(each))
        with np.errstate(invalid="ignore", over="ignore"):
            differences[site] = _finite(
                (np.abs(values[site][mask] - right) / np.maximum(unit, 1e-30)).max()
            )
    return differences


def _finite(value: float) -> float:
    """Returns the number, or infinity for NaN, which compares with nothing."""
    return float(np.nan_to_num(value, nan=np.inf, posinf=np.inf))


def _largest(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    return {site: max(value, a.get(site, 0.0)) for site, value in b.items()}


def format_report(report: Report) -> str:
    """Returns the verdict in words, and the differences as a table with a line a block."""
    sites = {site.site: site for site in report.sites}
    parts = ("ln_1", "attn", "mid", "ln_2", "ffn")
    blocks = sorted({int(name.split(".")[1]) for name in sites if name.startswith("block.")})
    lines = ["relative difference from transformers".ljust(50) + "(* nothing explains it)", ""]
    lines.append("".join(name.rjust(11) for name in ("block", *parts, "output")))

    def cell(name: str) -> str:
        site = sites.get(name)
        return (
            "-".rjust(11)
            if site is None
            else (f"{site.difference:.1e}" + " *"[not site.explained]).rjust(11)
        )

    for i in blocks:
        lines.append(
            f"{i}".rjust(11)
            + "".join(cell(f"block.{i}.{part}") for part in parts)
            + cell(f"block.{i}")
        )
    lines += [
        "",
        *(f"{name:>11}{cell(name)}" for name in ("embed", "final_norm", "logits") if name in sites),
        "",
    ]
    what = "logit" if "logits" in sites else "value of the last site (the model has no head)"
    lines.append(
        f"largest difference of a {what}: {report.largest:.2e}, over {report.tokens} tokens"
    )
    lines.append(
        f"same most likely token: {100 * report.same_top_1:.1f} %"
    ) if "logits" in sites else None
    last = "logits" if "logits" in sites else "values of the last site"
    why = {
        "MATCH": f"the {last} differ by no more than {TOLERANCE:g} of their standard deviation.",
        "PRECISION": f"the {last} differ by more than {TOLERANCE:g}, but "
        "no site by more than rounding explains.",
        "WRONG": (
            "the first site that differs by more than tolerance and rounding explain is "
            f"{report.first}."
        ),
    }
    lines.append(f"{report.verdict}: {why[report.verdict]}")
    lines += [report.note] if report.note else []
    return "\n".join(line.rstrip() for line in lines)


def report_rows(report: Report) -> list[Row]:
    """Returns the report as rows of results.json; a difference that is not finite has
    no value.
    """
    rows: list[Row] = [
        {"site": site.site, "metric": metric, "value": value}
        for site in report.sites
        for metric, value in (("difference", site.difference), ("rounding", site.rounding))
    ]
    rows += [
        {"metric": "largest", "value": report.largest},
        {"metric": "same_top_1", "value": report.same_top_1},
    ]
    rows = noted(rows, report.note)
    rows = [
        row if np.isfinite(row["value"]) else with_note({**row, "value": None}, "not finite")
        for row in rows
    ]
    return [{**row, "n": report.tokens, "verdict": report.verdict} for row in rows]
