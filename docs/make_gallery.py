"""Makes the page with all figures, docs/gallery.md, and its pictures in docs/images.

    python docs/make_gallery.py            # some half an hour on two CPU cores, on the bundled models
    python docs/make_gallery.py --runs=DIR # what earlier runs have left in DIR is not run again

Each picture is drawn from results.json alone, as wide as a page or a column of a paper.
"""

import argparse
import dataclasses
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure

from jmat.report.compare import compare
from jmat.report.plots import plot_by_layer
from jmat.report.results import read_results
from jmat.studies import layer_jump, r2
from jmat.studies.cross_corpus import kinds
from jmat.studies.cross_corpus import plots as corpora
from jmat.studies.decoding import plots as decoding
from jmat.studies.early_exit import study as early_exit
from jmat.studies.linearity import plots as linearity
from jmat.studies.map_zoo import plots as map_zoo
from jmat.studies.probe import study as probe
from jmat.studies.prune import study as prune
from jmat.studies.submodules import study as submodules

DOCS = pathlib.Path(__file__).parent
PAGE, IMAGES = DOCS / "gallery.md", DOCS / "images"
_DOTS = 200  # an inch
_SIZE = "--num_fit=600 --num_eval=120"
_STUDY = "runs/regularizer_study"
Plot = Callable[..., Figure]


@dataclasses.dataclass(frozen=True)
class Entry:
    """Holds one figure of the page.

    Attributes:
      name: of the picture.
      heading: of the entry.
      shows: sentences about what the figure shows.
      commands: make the runs, and with --model=NAME those of another model.
      runs: their output folders below runs/.
      plot: draws the figure from what results.json holds; of two runs, side by side.
      alt: describes the picture for those who do not see it.
      panels: of the figure, for two runs.
      width: of the figure.
    """

    name: str
    heading: str
    shows: str
    commands: Sequence[str]
    runs: Sequence[str]
    plot: Plot
    alt: str
    panels: Sequence[str] | None = None
    width: str = "page"

    def draw(self, root: pathlib.Path) -> Figure:
        """Returns the figure of the runs in a folder."""
        results = [read_results(root / run) for run in self.runs]
        if len(results) == 1:
            return self.plot(results[0], width=self.width)
        return compare(results, self.plot, panels=self.panels, width=self.width)


def _regularizers(results: dict[str, Any], **drawing: Any) -> Figure:
    """Draws what a study of penalties does."""
    metrics = ("linearity", "linearity_without_residual", "accuracy", "precision@1")
    names = {"none": "no penalty"}
    return plot_by_layer(
        results, metrics, names=names, title="the same model under different penalties", **drawing
    )


_JUMP = f"python -m experiments.layer_jump --model=gpt2-docs {_SIZE} --out=runs/small-gpt2-docs"
_LINEARITY = f"python -m experiments.linearity {_SIZE} --all_pairs --out=runs/linearity"
_CROSS = (
    f"python -m experiments.cross_corpus {_SIZE} --corpora=docs,upper.txt --sizes=300,400,600 "
    "--out=runs/cross"
)
_TRAIN = (
    "--layers=4 --width=96 --heads=4 --steps=160 --warmup_steps=20 --keep_every=40 "
    "--eval_sentences=200"
)
_PENALTIES = (
    f"python -m experiments.regularizer_study --kinds=none,cosine --pretrain='{_TRAIN}' "
    f"--measure='{_SIZE}' --out={_STUDY}"
)
_THEN_RUN = f"python -m experiments.layer_jump {_SIZE} --then_run --out=runs/then_run"
_ZOO = (
    f"python -m experiments.map_zoo {_SIZE} --kinds=id,diag,rank:16,rank:64,mat,affine,affine+int8 "
    "--out=runs/map_zoo"
)
_ZOO_PAIRS = f"python -m experiments.map_zoo {_SIZE} --kinds=id,mat,affine --pairs=all --out=runs/map_zoo_pairs"
_TRAVEL = (
    f"python -m experiments.cross_corpus {_SIZE} --corpora=docs,upper.txt --sizes=300,600 "
    "--maps=id,mat,affine,toward_id --layers=2,4,6 --out=runs/travel"
)
_DECODING = (
    f"python -m experiments.decoding {_SIZE} --num_prompts=8 --new_tokens=32 --thresholds=0.7 "
    "--out=runs/decoding"
)
_STEPS = ",".join(f"{_STUDY}/none/pretrain/steps/{step:06}" for step in (40, 80, 120))
_CHECKPOINTS = (
    f"python -m experiments.linearity {_SIZE} --model={_STUDY}/none/pretrain/model "
    f"--revisions={_STEPS} --against={_STUDY}/cosine-0.5/pretrain/model "
    "--out=runs/linearity-checkpoints"
)

ENTRIES = (
    Entry(
        "layer_jump",
        "What the model already predicts at a layer",
        "The final prediction is guessed from the stream at every layer: through a linear map to "
        "the last layer, or with the head alone (the logit lens). Precision@k says how often the "
        "guess is among the full model's k likeliest tokens. Surprisal is of the guess, under the "
        "full model.",
        [_JUMP],
        ["small-gpt2-docs"],
        layer_jump.plot,
        "Four line plots over the layers; the linear map is above the logit lens in early layers.",
    ),
    Entry(
        "layer_jump_pairs",
        "What a jump in the middle costs",
        "A map stands in for the blocks between layer i and layer j, and the blocks behind j run. "
        "The figures are shares of the full model's predictions that stay the same.",
        [_THEN_RUN],
        ["then_run"],
        layer_jump.plot_jumps,
        "Two triangular heat maps over pairs of layers.",
    ),
    Entry(
        "map_zoo",
        "Kinds of maps, layer by layer",
        "Kinds that no other beats in both bytes and KL, beside the logit lens, the linear map and "
        "the affine map.",
        [_ZOO],
        ["map_zoo"],
        map_zoo.plot_layers,
        "KL, precision@1 and R² by layer, one line a kind.",
    ),
    Entry(
        "map_zoo_bytes",
        "What a map's memory buys",
        "KL of a kind, mean over the layers, against the bytes of its maps. A line joins the kinds "
        "that no other beats in both.",
        [_ZOO],
        ["map_zoo"],
        map_zoo.plot_bytes,
        "Points of kinds; KL falls with the bytes.",
        width="column",
    ),
    Entry(
        "map_zoo_pairs",
        "Kinds of maps between any two layers",
        "Held-out R² from layer i to layer j, a panel a kind.",
        [_ZOO_PAIRS],
        ["map_zoo_pairs"],
        map_zoo.plot_pairs,
        "Three triangular heat maps over pairs of layers.",
    ),
    Entry(
        "decoding",
        "Ways to write text",
        "Left: tokens a second against the share of plain tokens that stand at the same place; "
        "drafts change none. Right: how many tokens one check of a draft brings, by the layer that "
        "drafts. The clock is of one busy machine.",
        [_DECODING],
        ["decoding"],
        decoding.plot,
        "Points of ways to write, and lines over the layers that draft.",
    ),
    Entry(
        "two_models",
        "Two models side by side",
        "Any figure of two runs has a column for each run and one scale in each row. In Python: "
        '`compare([first, second], layer_jump.plot, panels=["precision@1", "surprisal"])`, where '
        "`compare` is of `jmat.report.compare`, `layer_jump` of `jmat.studies`, and `first` is "
        '`jmat.read_results("runs/small-gpt2-docs")`.',
        [_JUMP, _JUMP.replace("gpt2-docs", "bert-docs")],
        ["small-gpt2-docs", "small-bert-docs"],
        layer_jump.plot,
        "Precision@1 and surprisal by layer, gpt2-docs in the left column and bert-docs in the "
        "right one.",
        ["precision@1", "surprisal"],
    ),
    Entry(
        "r2",
        "How well a layer gives a later one",
        "R² of layer j, predicted from layer i: by a linear map, and by the stream of layer i as "
        "it is. Digits are left out where they do not fit.",
        [f"python -m experiments.r2 {_SIZE} --out=runs/r2"],
        ["r2"],
        r2.plot,
        "Two triangular heat maps over pairs of layers.",
    ),
    Entry(
        "early_exit",
        "What an early exit saves",
        "The model stops as soon as a guess is sure enough; each point is a threshold. The dotted "
        "lines stop at a fixed layer. The cheap check (dashed) looks at every second layer, and at "
        "512 words of the head. FLOPs include what the checks cost, so that they can exceed "
        "those of the full pass.",
        [f"python -m experiments.early_exit {_SIZE} --timing_examples=0 --out=runs/early_exit"],
        ["early_exit"],
        early_exit.plot,
        "Precision@1 against mean blocks run, and against FLOPs.",
    ),
    Entry(
        "submodule_ablation",
        "Which parts a linear map can stand in for",
        "From layer l on, every attention, every feed-forward part, every norm, or each whole "
        "block is replaced by its linear map.",
        [f"python -m experiments.submodule_ablation {_SIZE} --out=runs/submodule_ablation"],
        ["submodule_ablation"],
        submodules.plot,
        "Four line plots over the layer from which parts are replaced; the norms' maps are best.",
    ),
    Entry(
        "probe",
        "What a classifier reads at a layer",
        "Accuracy of a linear classifier of the stream at a token. It says of the next token whether "
        "it begins a word, goes on with one, is a number or punctuation, or ends the text. Beside "
        "it stands that of always saying the most frequent of these.",
        [f"python -m experiments.probe {_SIZE} --out=runs/probe"],
        ["probe"],
        probe.plot,
        "Accuracy by layer, above a level line.",
        width="column",
    ),
    Entry(
        "prune",
        "What removed blocks cost",
        "Every set of blocks has its own tick, so that methods meet only where they removed the "
        "same blocks. Blocks are deleted, replaced by a linear map, or merged into a neighbour.",
        [
            f"python -m experiments.prune {_SIZE} --method=delete,map,merge "
            "--score=block_influence --remove=3 --out=runs/prune"
        ],
        ["prune"],
        prune.plot,
        "Perplexity, KL and precision@1 over the blocks removed, one line a method.",
    ),
    Entry(
        "linearity",
        "How linear each step is",
        "Linearity of the step to the next layer, with and without the residual, by three "
        "estimators. They often agree, so the broad lines lie below the narrow one. On the right "
        "the parts of each block.",
        [_LINEARITY],
        ["linearity"],
        linearity.plot_linearity,
        "Three line plots over the layers.",
    ),
    Entry(
        "geometry",
        "How far a block moves the stream",
        "The size of what a block adds against that of the stream, the cosine between neighbouring "
        "layers, and anisotropy: the share of variance along the first direction.",
        [_LINEARITY],
        ["linearity"],
        linearity.plot_geometry,
        "Three line plots over the layers.",
    ),
    Entry(
        "errors",
        "How the error is spread over tokens",
        "A column a layer: the share of tokens by the squared error of their step. 1 is the "
        "variance of the target: its mean squared distance from its mean.",
        [_LINEARITY],
        ["linearity"],
        linearity.plot_errors,
        "A histogram in colour for every layer.",
        width="column",
    ),
    Entry(
        "linearity_pairs",
        "Linearity of all pairs of layers",
        "Held-out linearity from layer i to layer j.",
        [_LINEARITY],
        ["linearity"],
        linearity.plot_pairs,
        "A triangular heat map over pairs of layers.",
        width="column",
    ),
    Entry(
        "corpora",
        "Whether maps travel to other text",
        "Maps are fitted on the text on the left and evaluated on the text below. Here `upper.txt` "
        "holds 3,000 sentences of `jmat.data.corpus.docs_sentences()` in capitals, one a line.",
        [_CROSS],
        ["cross"],
        corpora.plot_pairs,
        "Three small heat maps of corpora against corpora.",
    ),
    Entry(
        "kind_pairs",
        "How far each kind of map travels",
        "Precision@1 of maps fitted on the text on the left and evaluated on the text below, a "
        "panel a kind.",
        [_TRAVEL],
        ["travel"],
        kinds.plot_kind_pairs,
        "Three small heat maps of corpora against corpora.",
    ),
    Entry(
        "kind_curves",
        "How many examples each kind needs",
        "Means over the layers, against the number of examples that maps are fitted on; fitted and "
        "evaluated on the same corpus.",
        [_TRAVEL],
        ["travel"],
        kinds.plot_kind_curves,
        "Line plots of metrics on two corpora, one line a kind.",
    ),
    Entry(
        "learning_curve",
        "How many examples a map needs",
        "Means over the layers, against the number of examples that the maps are fitted on.",
        [_CROSS],
        ["cross"],
        corpora.plot_learning_curve,
        "Six line plots: three metrics on two corpora.",
    ),
    Entry(
        "regularizer_study",
        "Models trained with a penalty",
        "The same small model, trained with and without a penalty on how the stream moves. These "
        "ran for only 160 steps.",
        [_PENALTIES],
        ["regularizer_study"],
        _regularizers,
        "Four line plots over the layers, one line a penalty.",
    ),
    Entry(
        "checkpoints",
        "Linearity over training",
        "Held-out linearity of each step, at earlier checkpoints and at the end of training. Later "
        "blocks are darker.",
        [_PENALTIES, _CHECKPOINTS],
        ["linearity-checkpoints"],
        linearity.plot_checkpoints,
        "Two line plots over checkpoints, one line a block.",
    ),
    Entry(
        "jump_strength",
        "How far each block turns the stream, over training",
        "The mean angle between neighbouring layers, at earlier checkpoints and at the end of "
        "training. Later blocks are darker.",
        [_PENALTIES, _CHECKPOINTS],
        ["linearity-checkpoints"],
        linearity.plot_jump_strength,
        "A line plot over checkpoints, one line a block.",
        width="column",
    ),
    Entry(
        "difference",
        "Two models' linearity, subtracted",
        "Held-out linearity of the model less that of the other, on the same tokens. The intervals "
        "are of the difference.",
        [_PENALTIES, _CHECKPOINTS],
        ["linearity-checkpoints"],
        linearity.plot_difference,
        "Two lines over the layers, and zero.",
        width="column",
    ),
)

_INTRODUCTION = """# Figures

All figures that jmat draws, each with the command that makes it.
Here they are as wide as a page of a paper, or as one of its two columns.
`python docs/make_gallery.py` makes this page and its pictures on the two small bundled models, with few examples:
look at what the figures show, and not at the numbers.

Every experiment takes `--figure_width=column` (3.25 inches), `page` (6.75) or a number of inches,
and `--figure_format=png`, `pdf` or `svg`; without them figures are as wide as suits a screen. Type is at least 7 points at the printed width.
In Python, `results.plot(width="column", title="")` returns a matplotlib figure,
`results.plot(panel="precision@1", ax=axes[0])` draws one panel into axes of yours,
and `results.save("folder", figure_format="pdf", width="column")` writes all of a study's figures.
"""


def page() -> str:
    """Returns the text of the page."""
    parts = [_INTRODUCTION]
    for entry in ENTRIES:
        commands = "\n".join(entry.commands)
        parts.append(
            f"## {entry.heading}\n\n{entry.shows}\n\n![{entry.alt}](images/{entry.name}.png)\n\n"
            f"```bash\n{commands}\n```\n"
        )
    return "\n".join(parts)


def make_runs(root: pathlib.Path) -> None:
    """Makes every run that is not in a folder yet."""
    _write_capitals(root.parent / "upper.txt")
    for entry in ENTRIES:
        for command in entry.commands:
            words = shlex.split(command)
            out = pathlib.Path(words[-1].removeprefix("--out="))
            if not (root / out.name / "results.json").is_file():
                subprocess.run([sys.executable, *words[1:]], cwd=root.parent, check=True)


def _write_capitals(path: pathlib.Path) -> None:
    from jmat.data.corpus import docs_sentences

    path.write_text(
        "\n".join(sentence.upper() for sentence in docs_sentences()[:3000]) + "\n", "utf-8"
    )


def main() -> None:
    """Makes runs, pictures and the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=pathlib.Path, default=pathlib.Path("runs"), help="a folder called runs"
    )
    root = parser.parse_args().runs.resolve()
    if root.name != "runs":
        parser.error(f"--runs={root}: the commands write to a folder called runs.")
    make_runs(root)
    IMAGES.mkdir(exist_ok=True)
    for entry in ENTRIES:
        entry.draw(root).savefig(IMAGES / f"{entry.name}.png", dpi=_DOTS)
    PAGE.write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
