"""Figures need results.json only, show what is in it, and say so where there is nothing to show."""

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from jmat.plots import plot_by_layer, plot_early_exit, plot_layer_jump, plot_r2

L = 3
METRICS = ("precision@1", "precision@5", "precision@10", "surprisal")
JUMPS = [
    {"map": name, "layer": layer, "target": L, "metric": metric}
    | {"value": layer / L, "low": layer / L - 0.1, "high": layer / L + 0.1}
    for name in ("id", "mat", "mat_attn", "mine")
    for metric in METRICS
    for layer in reversed(range(L + 1))
]
R2 = [
    {"map": name, "layer": i, "target": j, "metric": "r2", "value": i / j}
    for name in ("mat", "id")
    for j in range(1, L + 1)
    for i in range(j)
]
EXITS = [
    {"map": name, "confidence": kind, setting: step, "metric": metric, "value": step / L}
    for name in ("mat", "id")
    for kind, setting in (("gap", "lambda"), ("gap_cheap", "lambda_cheap"), ("fixed", "layer"))
    for metric in ("layers", "precision@1", "flops_ratio")
    for step in range(L + 1)
]


@pytest.fixture
def figure(monkeypatch):
    """The figure that was saved, to look at what is in it."""
    saved = []
    save = Figure.savefig

    def remember(self, *args, **options):
        saved.append(self)
        return save(self, *args, **options)

    monkeypatch.setattr(Figure, "savefig", remember)
    return lambda: saved[-1]


def _legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_panels_lines_and_bands_by_layer(tmp_path, figure):
    path = tmp_path / "jump.png"
    plot_layer_jump({"rows": JUMPS}, path, title="tiny")
    panels = figure().axes
    assert [panel.get_title() for panel in panels] == list(METRICS)
    assert _legend(figure()) == ["mat", "id", "mat_attn", "mine"]  # one legend; known maps first
    for panel in panels:
        assert len(panel.lines) == len(panel.collections) == 4
        for line in panel.lines:
            assert list(line.get_xdata()) == [0, 1, 2, 3]
            assert list(line.get_ydata()) == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert panels[3].get_ylabel() == "nats"
    assert imread(path).shape[1] > 1500  # 200 dots an inch
    assert [file.name for file in tmp_path.iterdir()] == ["jump.png"]


def test_maps_look_the_same_in_every_figure(tmp_path, figure):
    colours = []
    for rows in (JUMPS, [row for row in JUMPS if row["map"] != "mat"]):
        plot_by_layer({"rows": rows}, METRICS[:1], tmp_path / "figure.png")
        lines = dict(zip(_legend(figure()), figure().axes[0].lines, strict=True))
        colours.append(lines["id"].get_color())
    assert colours[0] == colours[1]


def test_rows_without_intervals_values_or_of_single_heads(tmp_path, figure):
    rows = [{**row, "low": None, "high": None} for row in JUMPS if row["map"] == "mat"]
    rows[0] = {**rows[0], "value": None, "note": "no data"}
    rows += [{**rows[1], "map": "mat_head.3"}, {"metric": "precision@1", "value": 0.5}]
    rows += [{**rows[1], "map": "cosine 0.5"}]
    plot_by_layer({"rows": rows}, ("precision@1",), tmp_path / "figure.png")
    assert _legend(figure()) == ["mat", "cosine 0.5"]
    assert len(figure().axes[0].lines[0].get_xdata()) == L
    assert not figure().axes[0].collections


def test_r2_heat_maps_hold_every_pair(tmp_path, figure):
    plot_r2({"rows": R2}, tmp_path / "r2.png")
    mat = figure().axes[0]
    assert mat.get_title() == "mat"
    assert mat.images[0].get_array()[1, 2] == pytest.approx(1 / 3)  # layer 1 to target 3
    assert len(mat.texts) == L * (L + 1) / 2


def test_early_exit_curves_rise_with_cost(tmp_path, figure):
    plot_early_exit({"rows": EXITS}, tmp_path / "exit.png")
    panels = figure().axes
    assert _legend(figure()) == ["mat", "id", "dynamic exit", "dynamic, cheap check", "fixed exit"]
    for panel in panels:
        curves = [line for line in panel.lines if len(line.get_xdata()) == L + 1]
        assert len(curves) == 6
        assert all(list(line.get_xdata()) == sorted(line.get_xdata()) for line in curves)


@pytest.mark.parametrize(
    ("plot", "message"),
    [
        (lambda results, path: plot_layer_jump(results, path), "no rows by layer for precision@1"),
        (lambda results, path: plot_r2(results, path), "no rows of r2"),
        (lambda results, path: plot_early_exit(results, path), "no early-exit rows"),
    ],
)
def test_nothing_to_draw_is_said(tmp_path, plot, message):
    with pytest.raises(ValueError, match=message):
        plot({"rows": []}, tmp_path / "figure.png")
    assert not list(tmp_path.iterdir())
