"""Figures fit the width of a paper: type of 7 points or more, nothing cut off, no ticks
on each other.
"""

import itertools

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

from jmat.report import results as module
from jmat.report.axes import LayerLocator
from jmat.report.compare import compare
from jmat.report.drawing import BAND, Layout, Panel, draw
from jmat.report.plots import plot_by_layer, plot_early_exit, plot_layer_jump, plot_layer_pairs
from jmat.report.results import Results
from jmat.report.saving import save_figure
from jmat.report.style import WIDTHS
from jmat.studies import layer_jump
from jmat.studies.cross_corpus import plots as travel_plots
from jmat.studies.linearity import plots as linear_plots
from jmat.studies.prune.rows import plot_prune
from tests.figures import legend, names_bands, ticks
from tests.test_plots import CROSS, JUMPS, LINEARITY, METRICS, PRUNED, figures

DEEP = 32
LAYERS = [
    *figures(
        *(
            {"map": name, "layer": layer, "target": DEEP, "metric": metric}
            for name in ("mat", "id", "mat_attn", "mat_ffn", "mat_ln1_ln2")
            for metric in METRICS
            for layer in range(DEEP + 1)
        )
    )
]
PAIRS = [
    {"map": name, "layer": i, "target": j, "metric": "r2", "value": -0.25 if i == 0 else 0.5}
    for name in ("mat", "id")
    for j in range(1, 9)
    for i in range(j)
]
DEEP_PAIRS = [
    {"map": name, "layer": i, "target": j, "metric": "r2", "value": 0.5}
    for name in ("mat", "id")
    for j in range(1, DEEP + 1)
    for i in range(j)
]
EXITS = [
    {"map": name, "confidence": kind, setting: step, "metric": metric, "value": step / 8}
    for name in ("mat", "id")
    for kind, setting in (("gap", "lambda"), ("gap_cheap", "lambda_cheap"), ("fixed", "layer"))
    for metric in ("layers", "precision@1", "flops_ratio")
    for step in range(9)
]
ERRORS = [
    {"map": "mat", "layer": layer, "target": layer + 1, "metric": "token_error_share", "value": 1.0}
    | {"error_from": 10.0**-2, "error_to": 10.0**-1.75}
    for layer in range(8)
]
PLOTS = {
    "layers": (plot_layer_jump, LAYERS),
    "a few layers": (plot_layer_jump, JUMPS),
    "pairs": (plot_layer_pairs, PAIRS),
    "pairs of a deep model": (plot_layer_pairs, DEEP_PAIRS),
    "exits": (plot_early_exit, EXITS),
    "pruned": (plot_prune, PRUNED),
    "corpora": (travel_plots.plot_pairs, CROSS),
    "learning curve": (travel_plots.plot_learning_curve, CROSS),
    "linearity": (linear_plots.plot_linearity, LINEARITY),
    "geometry": (linear_plots.plot_geometry, LINEARITY),
    "errors": (linear_plots.plot_errors, ERRORS),
    "checkpoints": (linear_plots.plot_checkpoints, LINEARITY),
    "difference": (linear_plots.plot_difference, LINEARITY),
}


def content(rows, model="gpt2-docs"):
    return {"rows": rows, "config": {"model": model}}


def texts(figure):
    """All words of a figure that are seen."""
    return [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]


def check_printed(figure):
    """Holds all words against the edge, the size of the type, and the ticks against
    each other.
    """
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    shown = [text for text in texts(figure) if not _is_tick(figure, text)]
    for axis in (axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)):
        labels = [
            label
            for label in axis.get_ticklabels()
            if label.get_text().strip() and label.get_visible()
        ]
        low, high = sorted(axis.get_view_interval())
        across = axis.axis_name == "x"
        labels = [
            label for label in labels if low <= label.get_position()[0 if across else 1] <= high
        ]
        boxes = sorted(
            ((box.x0, box.x1) if across else (box.y0, box.y1))
            for box in (
                label.get_window_extent(renderer) for label in labels if not label.get_rotation()
            )
        )
        assert all(after[0] >= before[1] for before, after in itertools.pairwise(boxes)), [
            *map(str, labels)
        ]
        shown += labels
    assert min(text.get_fontsize() for text in shown) >= 7
    for text in shown:
        box = text.get_window_extent(renderer)
        assert min(box.x0, box.y0) >= -1, text.get_text()
        assert max(box.x1 - figure.bbox.x1, box.y1 - figure.bbox.y1) <= 1, text.get_text()
    digits = [
        text.get_window_extent(renderer) for ax in figure.axes if ax.images for text in ax.texts
    ]
    assert not any(a.overlaps(b) for a, b in itertools.pairwise(digits))


def check_inside(figure):
    """Nothing that is drawn lies outside its axes."""
    for ax in figure.axes:
        for line in ax.get_lines():
            if line.get_transform() == ax.transData:
                for (low, high), values in (
                    (sorted(ax.get_xlim()), line.get_xdata()),
                    (ax.get_ylim(), line.get_ydata()),
                ):
                    assert all(low <= value <= high for value in values), (ax.get_title(), line)
        for each in ax.collections:
            for path in each.get_paths() if each.get_gid() == "band" else ():
                low, high = ax.get_ylim()
                assert low <= path.vertices[:, 1].min() <= path.vertices[:, 1].max() <= high, (
                    ax.get_title()
                )


def _is_tick(figure, text):
    return any(
        text in axis.get_ticklabels(which="both")
        or text in (tick.label2 for tick in axis.get_major_ticks())
        for ax in figure.axes
        for axis in (ax.xaxis, ax.yaxis)
    )


@pytest.mark.parametrize(
    "width", ["column", *(pytest.param(width, marks=pytest.mark.slow) for width in ("page", None))]
)
@pytest.mark.parametrize("name", PLOTS)
def test_every_figure_is_readable_where_it_is_printed(name, width):
    plot, rows = PLOTS[name]
    figure = plot(
        content(rows), width=width, title="some/model: a title that is longer than a column is wide"
    )
    assert isinstance(figure, Figure)
    check_printed(figure)
    check_inside(figure)
    if width is not None:
        assert figure.get_figwidth() == WIDTHS[width]
    assert names_bands(figure) == any(
        each.get_gid() == "band" for ax in figure.axes for each in ax.collections
    )


def test_the_last_layer_has_a_tick_and_every_layer_that_fits():
    page = plot_by_layer(content(LAYERS), METRICS[:1], width="page")
    column = plot_by_layer(content(LAYERS), METRICS[:1], width="column")
    few = plot_layer_jump(content(JUMPS), width="column")
    for figure in (page, column, few):
        figure.draw_without_rendering()
    assert [len(ticks(figure.axes[0].xaxis)) for figure in (page, few)] == [DEEP + 1, 4]
    assert ticks(column.axes[0].xaxis)[-1] == "32"
    assert isinstance(column.axes[0].xaxis.get_major_locator(), LayerLocator)
    deep = plot_layer_pairs(content(DEEP_PAIRS), width="column")
    assert [ticks(axis)[-1] for axis in (deep.axes[0].xaxis, deep.axes[0].yaxis)] == ["32", "31"]


def test_lines_that_lie_on_each_other_are_of_different_breadth():
    rows = [
        {**row, "value": 0.9} for row in LINEARITY if not {"checkpoint", "against"} & row.keys()
    ]
    for panel in linear_plots.plot_linearity(content(rows)).axes[:2]:
        breadths = [line.get_linewidth() for line in panel.lines]
        assert len(breadths) == 3
        assert all(below > 1.5 * above for below, above in itertools.pairwise(breadths))


def test_a_panel_is_drawn_into_axes_with_its_own_legend():
    own = Figure()
    left, right = own.subplots(1, 2)
    assert plot_layer_jump(content(JUMPS), ax=right, panel="surprisal") is own
    assert right.get_title() == "surprisal"
    assert {text.get_text() for text in right.get_legend().get_texts()} >= {
        "linear map",
        "logit lens",
        BAND,
    }
    assert not left.lines
    assert plot_by_layer(content(JUMPS), METRICS[:1], ax=left) is own
    assert (
        layer_jump.plot(content(JUMPS), panel="precision@1").get_suptitle()
        == "gpt2-docs: reading layer l"
    )
    assert layer_jump.plot(content(JUMPS), title="").get_suptitle() == ""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"width": "wide"},
            "width='wide' is not a width of a figure; expected column, page, or inches",
        ),
        ({"width": 0.3}, r"width=0\.3 is not a width"),
        ({"width": float("nan")}, "width=nan is not a width"),
        ({"panel": "precision@2"}, "no panel 'precision@2'; choose from precision@1"),
        (
            {"ax": Figure().subplots()},
            "the panels precision@1, .* and ax= holds one: choose it with panel=",
        ),
        ({"ax": Figure().subplots(), "panel": "surprisal", "width": 5}, "leave one of them out"),
    ],
)
def test_what_does_not_fit_a_figure_gets_a_sentence(given, message):
    with pytest.raises(ValueError, match=message):
        plot_layer_jump(content(JUMPS), **given)


@pytest.mark.parametrize("kind", ["png", "pdf", "svg"])
def test_files_have_the_width_and_are_written_again_the_same(tmp_path, kind):
    for name in ("a", "b"):
        save_figure(
            plot_by_layer(content(JUMPS), METRICS[:1], width="column"), tmp_path / f"{name}.{kind}"
        )
    first, second = ((tmp_path / f"{name}.{kind}").read_bytes() for name in ("a", "b"))
    assert first == second
    if kind == "png":
        assert imread(tmp_path / "a.png").shape[1] == 3.25 * 300
    assert first.startswith({"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}[kind])


def results(model="gpt2-docs", rows=JUMPS):
    return Results(
        "layer_jump", rows, {"model": model}, figures={"layer_jump.png": layer_jump.plot}
    )


def test_results_are_saved_in_a_format_and_a_width(tmp_path):
    saved = results().save(tmp_path, figure_format="pdf", width="column")
    assert saved == ["results.json", "layer_jump.pdf"]
    assert (tmp_path / "layer_jump.pdf").read_bytes().startswith(b"%PDF")
    assert results().plot("layer_jump", width=5).get_figwidth() == 5
    with pytest.raises(
        ValueError,
        match="figure_format='gif' is not a format of figures; expected one of png, pdf, svg",
    ):
        results().save(tmp_path / "new", figure_format="gif")
    with pytest.raises(ValueError, match="width='wide' is not a width"):
        results().save(tmp_path / "new", width="wide")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind", ["png", "pdf", "svg"])
@pytest.mark.parametrize("width", [None, "column", 5.0])
def test_every_figure_is_drawn_in_the_width_and_saved_in_the_format_that_are_given(
    tmp_path, monkeypatch, kind, width
):
    drawn, saved, announced = [], [], []

    def draw(content, **how):
        drawn.append((content["experiment"], len(content["rows"]), how))
        return len(drawn)

    monkeypatch.setattr(module, "save_figure", lambda figure, path: saved.append((figure, path)))
    several = Results(
        "mine",
        JUMPS,
        {},
        figures={"one.png": draw, "two.png": draw},
        files={("a.txt", "b.txt"): write},
    )
    names = several.save(tmp_path, figure_format=kind, width=width, before=announced.append)
    assert drawn == [("mine", len(JUMPS), {"width": width})] * 2
    assert saved == [(1, tmp_path / f"one.{kind}"), (2, tmp_path / f"two.{kind}")]
    assert names == ["results.json", f"one.{kind}", f"two.{kind}", "a.txt", "b.txt"]
    assert announced == ["a.txt", "b.txt", f"one.{kind}", f"two.{kind}"]


def write(folder):
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text(name)


def test_notebooks_show_a_figure():
    assert plot_by_layer(content(JUMPS), METRICS[:1])._repr_png_().startswith(b"\x89PNG")


def test_runs_stand_side_by_side_on_one_scale():
    other = [
        {**row, "value": 2 * row["value"], "low": 2 * row["low"], "high": 2 * row["high"]}
        for row in JUMPS
    ]
    figure = compare([results(), results("a/b/other", other)], panels=["precision@1", "surprisal"])
    assert figure.get_figwidth() == WIDTHS["page"]
    assert list(legend(figure))[:2] == ["linear map", "logit lens"]
    assert [ax.get_title() for ax in figure.axes] == [
        "gpt2-docs\nprecision@1", "b/other\nprecision@1", "surprisal", "surprisal"
    ]  # fmt: skip
    one, two = figure.axes[2:]
    assert one.get_ylim() == two.get_ylim()
    for runs in ([results(), results("b", other)], [results("b", other), results()]):
        check_inside(compare(runs, panels=["surprisal"]))
    assert max(one.lines[0].get_ydata()) < max(two.lines[0].get_ydata())
    check_printed(figure)
    assert len(compare([results()] * 3, width="column").axes) == 3 * len(METRICS)
    maps = compare([content(PAIRS)] * 2, plot_layer_pairs, names=["one", "$two"], panels=["mat"])
    assert [ax.get_title() for ax in maps.axes[:2]] == ["one\nlinear map", "\\$two\nlinear map"]
    assert len(maps.axes) == 3  # one colour bar
    check_printed(maps)


@pytest.mark.parametrize(
    ("runs", "given", "message"),
    [
        ([], {}, "there is no run to draw"),
        ([content(JUMPS)], {}, "give the plot function of its study"),
        (
            [results()],
            {"names": ["a", "b"]},
            "names has 2 headings; expected one for each of 1 runs",
        ),
        ([results()], {"panels": ["kl"]}, "no panel 'kl'"),
    ],
)
def test_runs_that_cannot_be_compared_get_a_sentence(runs, given, message):
    with pytest.raises(ValueError, match=message):
        compare(runs, **given)


def test_panels_of_even_rows_and_no_formula_in_names():
    panels = {str(k): Panel(lambda ax: np.nan and None) for k in range(5)}
    figure = draw(panels, Layout(narrowest=1.0), width="column")
    assert len(figure.axes) == 5
    assert figure.axes[0].get_subplotspec().get_gridspec().get_geometry() == (2, 3)
    rows = [{**row, "map": "cost $5, gain $7"} for row in JUMPS if row["map"] == "mat"]
    check_printed(plot_layer_jump(content(rows, "a$b$c"), width="column"))
