"""Figures need results.json only, show what is in it, under its own name, and say so
where there is nothing to show.
"""

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from jmat.models.sites import SUBMODULES
from jmat.report.names import METHODS, PARTS, PROBES, STREAMS, metric_name, readable
from jmat.report.plots import plot_by_layer, plot_early_exit, plot_layer_jump, plot_layer_pairs
from jmat.report.saving import save_figure
from jmat.studies.cross_corpus import plots as travel_plots
from jmat.studies.cross_corpus import rows as travel
from jmat.studies.linearity import plots as linear_plots
from jmat.studies.linearity import rows as study_rows
from jmat.studies.prune.rows import plot_prune
from tests.figures import band, curve, digits, legend, look, names_bands, ticks

L = 3
METRICS = ("precision@1", "precision@5", "precision@10", "surprisal")


def figures(*labels, seed=0):
    """A row for each label, each with a value and an interval of its own."""
    random = np.random.default_rng(seed)
    for label in labels:
        low, value, high = sorted(random.uniform(0.05, 0.95, 3).tolist())
        yield {**label, "value": value, "low": low, "high": high}


JUMPS = [
    *figures(
        *(
            {"map": name, "layer": layer, "target": L, "metric": metric}
            for name in ("id", "mat", "mat_attn", "mine", "mat_ffn", "mat_ln1_ln2")
            for metric in METRICS
            for layer in reversed(range(L + 1))
        )
    )
]
R2 = [
    *figures(
        *(
            {"map": name, "layer": i, "target": j, "metric": "r2"}
            for name in ("mat", "id")
            for j in range(1, L + 1)
            for i in range(j)
        )
    )
]
EXITS = [
    *figures(
        *(
            {"map": name, "confidence": kind, setting: step, "metric": metric}
            for name in ("mat", "id")
            for kind, setting in (
                ("gap", "lambda"),
                ("gap_cheap", "lambda_cheap"),
                ("fixed", "layer"),
            )
            for metric in ("layers", "precision@1", "flops_ratio")
            for step in range(L + 1)
        )
    )
]
STEPS = ("linearity", "linearity_without_residual")
KINDS = {"in sample": "", "adjusted": "_adjusted", "held out": "_held_out"}
LINEARITY = [
    *figures(
        *(
            {"map": "mat", "layer": layer, "target": layer + 1, "metric": f"{score}{kind}", **of}
            for of in (
                {},
                {"checkpoint": "steps/20"},
                {"checkpoint": "steps/100"},
                {"against": "other"},
            )
            for score in STEPS
            for kind in (*KINDS.values(), "_held_out_difference")
            for layer in range(L)
            if ("against" in of) or not kind.endswith("difference")
        ),
        *(
            {"map": "mat", "layer": i, "target": i + 1, "metric": name}
            for name in ("contribution_norm", "cosine")
            for i in range(L)
        ),
        *({"map": "stream", "layer": layer, "metric": "anisotropy"} for layer in range(L + 1)),
        *(
            {"map": p, "layer": i, "metric": "linearity_held_out"}
            for p in SUBMODULES
            for i in range(L)
        ),
        *({"map": "mat", "layer": 0, "target": j, "metric": "linearity_held_out"} for j in (2, 3)),
    )
]
PRUNED = [
    *figures(
        *(
            {"method": method, "removed": k, "blocks": ("", "1", "1,4")[k], "metric": metric}
            for method in ("map", "delete", "merge", "distil")
            for metric in ("perplexity", "kl", "precision@1", "flops")
            for k in range(3)
        )
    )
]
CROSS = [
    *figures(
        *(
            {
                "map": name,
                "fit_corpus": fit,
                "eval_corpus": eval_,
                "n_fit": n,
                "layer": layer,
                "metric": metric,
            }
            for name, fit, n in (
                ("id", None, 0),
                ("mat", "b/x", 80),
                ("mat", "b/x", 500),
                ("mat", "a", 500),
            )
            for eval_ in ("a", "b/x")
            for layer in (0, 2)
            for metric in ("precision@1", "precision@10", "surprisal", "r2")
        )
    )
]


@pytest.fixture
def saved(monkeypatch, tmp_path):
    """A function that calls a plot function on rows and returns its figure, which can
    be saved.
    """

    def call(plot, rows, *args, title="tiny", **options):
        figure = plot({"rows": rows}, *args, title=title, **options)
        assert figure.get_suptitle() == title
        with monkeypatch.context() as patch:
            save = Figure.savefig
            patch.setattr(
                Figure,
                "savefig",
                lambda figure, *args, **how: save(figure, *args, **how | {"dpi": 20}),
            )
            save_figure(figure, tmp_path / "figure.png")
        return figure

    return call


def chosen(rows, **wanted):
    """Rows with these fields by layer, or by what else rises; a field that should not
    be there is given as None.
    """
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def check_line(panel, sample, rows, key="layer", linestyle=None):
    """A line, and its band, are those of these rows and no others."""
    rows = sorted(rows, key=lambda row: row[key])
    x, y = curve(panel, sample, linestyle)
    assert x == [row[key] for row in rows]
    assert y == [row["value"] for row in rows]
    if linestyle is None:
        bounds = band(panel, sample)
        assert bounds == {row[key]: pytest.approx((row["low"], row["high"])) for row in rows}


def test_every_label_by_layer_names_its_own_line_and_band(saved):
    figure = saved(plot_by_layer, JUMPS, METRICS)
    names = ["mat", "id", "mat_attn", "mat_ffn", "mat_ln1_ln2", "mine"]
    assert list(legend(figure)) == [readable(name) for name in names]  # known maps first
    assert names_bands(figure)
    assert len({look(sample) for sample in legend(figure).values()}) == 6
    assert [panel.get_title() for panel in figure.axes] == list(METRICS)
    for panel, metric in zip(figure.axes, METRICS, strict=True):
        for name in names:
            check_line(
                panel, legend(figure)[readable(name)], chosen(JUMPS, map=name, metric=metric)
            )
        assert len(panel.lines) == len(panel.collections) == 6
        assert panel.get_xlabel() == "layer"
        assert panel.get_ylabel() == ("nats" if metric == "surprisal" else "")
        if metric != "surprisal":
            assert panel.get_ylim() == (0, 1.02)


def test_jumps_have_four_panels_and_files_enough_dots(tmp_path):
    save_figure(plot_layer_jump({"rows": JUMPS}, title="tiny"), tmp_path / "jump.png")
    # dots an inch of a screen
    assert imread(tmp_path / "jump.png").shape[1] == (4 * 2.3 + 0.4) * 200
    assert [file.name for file in tmp_path.iterdir()] == ["jump.png"]


def test_axes_suit_what_they_show(saved):
    rows = [
        *figures(
            *(
                {"map": "mat", "layer": i, "target": L, "metric": m}
                for m in ("perplexity", "kl")
                for i in (0, 1)
            )
        )
    ]
    far = [
        {**row, "metric": "cosine", "value": 0.9 + 0.01 * row["layer"], "low": 0.9, "high": 0.92}
        for row in rows
    ]
    perplexity, kl, cosine = saved(plot_by_layer, rows + far, ("perplexity", "kl", "cosine")).axes
    assert (perplexity.get_yscale(), kl.get_yscale()) == ("log", "linear")
    perplexity.set_ylim(42, 90)
    assert {"50", "60", "80"} <= {
        label.get_text() for label in perplexity.get_yticklabels(which="both")
    }
    assert kl.get_ylabel() == "nats"
    assert cosine.get_ylim()[0] > 0.8  # far from zero: the axis does not begin there


# Metric → its unit on the axis, the axis' ends (None: as the figures have them), and whether it is
# logarithmic.
AXES = {
    **{
        metric: ("", 0, 1.02, False)
        for metric in ("precision@1", "precision@5", "recall@10", "accuracy", "linearity")
    },
    **{metric: ("nats", 0, None, False) for metric in ("surprisal", "kl", "cross_entropy")},
    "r2": ("", 0, None, False),
    "flops_ratio": ("", 0, None, False),
    "perplexity": ("", None, None, True),
}


@pytest.mark.parametrize("metric", AXES)
def test_every_metric_has_its_own_axis(saved, metric):
    unit, low, high, is_log = AXES[metric]
    label = {"map": "mat", "target": L, "metric": metric, "n": 9}
    rows = [{**label, "layer": i, "value": value} for i, value in enumerate((0.31, 0.5, 0.71))]
    (panel,) = saved(plot_by_layer, rows, (metric,)).axes
    assert panel.get_ylabel() == unit
    assert (panel.get_yscale() == "log") == is_log
    bottom, top = panel.get_ylim()
    assert bottom == low if low is not None else bottom > 0
    assert top == high if high is not None else 0.71 < top < 0.8
    if not is_log:
        below = [{**row, "value": row["value"] - 1} for row in rows]
        assert saved(plot_by_layer, below, (metric,)).axes[0].get_ylim()[0] <= -0.69


WORDS = {
    "mat": "linear map", "id": "logit lens", "mat_attn": "linear map of attention",
    "mat_ffn": "linear map of feed-forward", "mat_ln1_ln2": "linear map of norms", "affine": "affine map",
    "ridge:0.1": "ridge map 0.1", "rank:64": "low-rank map 64", "rank_logit:8": "low-rank map of logits 8",
    "tuned": "tuned lens", "mean": "mean of the target", "mine": "mine", "a$b": "a\\$b",
}  # fmt: skip


def test_code_names_have_their_own_words():
    assert {code: readable(code) for code in WORDS} == WORDS
    assert {code: readable(code, STREAMS) for code in ("mat", "id")} == {
        "mat": "linear map",
        "id": "identity",
    }
    parts = {
        "ln_1": "first norm",
        "attn": "attention",
        "ln_2": "second norm",
        "ffn": "feed-forward",
    }
    assert {code: readable(code, PARTS) for code in SUBMODULES} == parts
    methods = {
        "delete": "deleted",
        "map": "linear map",
        "distil": "distilled map",
        "merge": "merged",
    }
    assert {code: readable(code, METHODS) for code in methods} == methods
    probes = {
        "ridge": "ridge classifier",
        "logistic": "logistic regression",
        "majority": "most frequent label",
    }
    probes |= {f"{code} (against)": f"{words}, other model" for code, words in probes.items()}
    assert {code: readable(code, PROBES) for code in probes} == probes
    metrics = {
        "r2": "$R^2$",
        "kl": "KL",
        "accuracy": "accuracy of the probe",
        "precision@1": "precision@1",
    }
    metrics |= {
        "linearity_held_out": "linearity, held out",
        "linearity_without_residual": "linearity without residual",
    }
    assert {code: metric_name(code) for code in metrics} == metrics


def test_maps_look_the_same_in_every_figure(saved):
    one, other = (
        legend(saved(plot_by_layer, rows, METRICS[:1]))
        for rows in (JUMPS, [row for row in JUMPS if row["map"] != "mat"])
    )
    assert look(one["logit lens"]) == look(other["logit lens"]) != look(one["linear map"])


def test_rows_without_intervals_values_or_of_single_heads(saved):
    rows = [{**row, "low": None, "high": None} for row in JUMPS if row["map"] == "mat"]
    rows[0] = {**rows[0], "value": None, "note": "no data"}
    rows += [{**rows[1], "map": "mat_head.3"}, {"metric": "precision@1", "value": 0.5}]
    rows += [{**rows[1], "map": "cosine 0.5"}]
    figure = saved(plot_by_layer, rows, ("precision@1",))
    assert list(legend(figure)) == ["linear map", "cosine 0.5"]
    assert len(curve(figure.axes[0], legend(figure)["linear map"])[0]) == L
    assert not figure.axes[0].collections
    assert not names_bands(figure)


def test_r2_heat_maps_hold_every_pair(saved):
    figure = saved(plot_layer_pairs, R2)
    for panel, name in zip(figure.axes, ("mat", "id"), strict=False):
        assert (panel.get_title(), panel.get_xlabel()) == (
            readable(name, STREAMS),
            "target layer $j$",
        )
        image, said = panel.images[0].get_array(), digits(panel)
        for row in chosen(R2, map=name):
            at = row["layer"], row["target"] - 1
            assert image[at] == row["value"]
            assert said[at] == f"{row['value']:.2f}"
        assert len(said) == L * (L + 1) / 2
        assert ticks(panel.xaxis) == ["1", "2", "3"]
    assert ticks(figure.axes[0].yaxis) == ["0", "1", "2"]
    assert figure.axes[0].get_ylabel() == "source layer $i$"
    assert figure.axes[2].get_ylabel() == "$R^2$ (negative values shown as 0)"


def test_heat_maps_say_what_is_below_zero_and_are_of_the_metric_asked_for(saved):
    rows = [
        {**row, "value": -3.25 if row["target"] == 1 else -99.0, "metric": "other"} for row in R2
    ] + R2
    panel = saved(plot_layer_pairs, rows, metric="other").axes[0]
    assert digits(panel)[0, 0] == "−3.25"
    assert digits(panel)[1, 2] == "< −10"
    assert panel.images[0].get_array()[0, 0] == 0


def test_early_exit_curves_are_their_own_and_rise_with_cost(saved):
    figure = saved(plot_early_exit, EXITS)
    samples = legend(figure)
    styles = {"dynamic exit": "gap", "dynamic, cheap check": "gap_cheap", "fixed exit": "fixed"}
    assert list(samples) == ["linear map", "logit lens", *styles]
    labels = ("mean blocks run", "FLOPs, as a share of the full pass")
    for panel, across, label in zip(figure.axes, ("layers", "flops_ratio"), labels, strict=True):
        assert panel.get_xlabel() == label
        for name in ("mat", "id"):
            for said, kind in styles.items():
                mine = chosen(EXITS, map=name, confidence=kind)
                cost, hits = (chosen(mine, metric=metric) for metric in (across, "precision@1"))
                wanted = sorted((c["value"], h["value"]) for c, h in zip(cost, hits, strict=True))
                x, y = curve(panel, samples[readable(name)], samples[said].get_linestyle())
                assert [*zip(x, y, strict=True)] == wanted
        (level,) = [line for line in panel.lines if len(set(line.get_ydata())) == 1]
        assert set(level.get_ydata()) == {0.95}
    assert figure.axes[0].get_ylabel() == "precision@1"


def test_linearity_of_steps_and_parts(saved):
    figure = saved(linear_plots.plot_linearity, LINEARITY)
    own = [row for row in LINEARITY if not {"checkpoint", "against"} & row.keys()]
    samples = legend(figure)
    assert list(samples) == [
        *(f"steps, {kind}" for kind in KINDS),
        *(readable(part, PARTS) for part in SUBMODULES),
    ]
    steps = [row for row in own if row.get("target") == row["layer"] + 1]
    for panel, score, name in zip(figure.axes, STEPS, ("with", "without"), strict=False):
        assert panel.get_title() == f"layer to layer,\n{name} the residual"
        for kind, end in KINDS.items():
            check_line(panel, samples[f"steps, {kind}"], chosen(steps, metric=f"{score}{end}"))
        assert len(panel.lines) == 3
    parts = figure.axes[2]
    assert parts.get_title() == "sub-modules,\nheld out"
    for part in SUBMODULES:
        check_line(
            parts,
            samples[readable(part, PARTS)],
            chosen(own, map=part, metric="linearity_held_out"),
        )
    assert figure.axes[0].get_ylabel() == "linearity"
    assert {panel.get_xlabel() for panel in figure.axes} == {"layer"}


def test_geometry_checkpoints_and_difference(saved):
    figure = saved(linear_plots.plot_geometry, LINEARITY)
    for panel, (metric, name) in zip(figure.axes, study_rows.GEOMETRY.items(), strict=True):
        assert panel.get_title() == name
        of = "stream" if metric == "anisotropy" else "mat"
        assert list(panel.lines[0].get_ydata()) == [
            row["value"] for row in chosen(LINEARITY, map=of, metric=metric)
        ]
    assert figure.axes[0].get_yscale() == "log"

    figure = saved(linear_plots.plot_checkpoints, LINEARITY)
    for panel, score, name in zip(figure.axes, STEPS, ("with", "without"), strict=True):
        assert panel.get_title() == f"layer to layer,\n{name} the residual"
        assert ticks(panel.xaxis) == ["20", "100", "end"]
        for layer, line in enumerate(panel.lines):
            wanted = [
                chosen(
                    LINEARITY,
                    layer=layer,
                    target=layer + 1,
                    metric=f"{score}_held_out",
                    checkpoint=c,
                    against=None,
                )
                for c in ("steps/20", "steps/100", None)
            ]
            assert list(line.get_ydata()) == [
                rows[0]["value"] for rows in wanted if rows[0]["map"] == "mat"
            ]
        shades = [float(line.get_color()) for line in panel.lines]
        assert shades == sorted(shades, reverse=True)  # later layers are darker
        samples = legend(figure)
        assert [float(samples[f"{end} block"].get_color()) for end in ("first", "last")] == [
            shades[0],
            shades[-1],
        ]

    figure = saved(linear_plots.plot_difference, LINEARITY)
    for score, name in zip(STEPS, ("with", "without"), strict=True):
        rows = chosen(LINEARITY, metric=f"{score}_held_out_difference")
        check_line(figure.axes[0], legend(figure)[f"{name} the residual"], rows)
    assert figure.axes[0].get_ylabel() == "difference of held-out linearity"


def test_histogram_of_errors(saved):
    edges = 10.0**study_rows.ERROR_BINS
    rows = [
        {
            "map": "mat",
            "layer": layer,
            "target": layer + 1,
            "metric": "token_error_share",
            "value": share,
        }
        | {"error_from": float(edges[k]), "error_to": float(edges[k + 1])}
        for layer, k, share in ((0, 0, 0.25), (0, 7, 0.75), (1, 31, 1.0))
    ]
    panel, bar = saved(linear_plots.plot_errors, rows).axes
    grid = panel.collections[0].get_array()
    assert {(k, layer): grid[k, layer] for k, layer in np.argwhere(~np.ma.getmaskarray(grid))} == {
        (0, 0): 0.25,
        (7, 0): 0.75,
        (31, 1): 1.0,
    }
    assert (panel.get_xlabel(), panel.get_ylabel()) == (
        "layer",
        "squared error of a token ÷\nvariance of the target",
    )
    assert (panel.get_yscale(), bar.get_ylabel()) == ("log", "share of tokens (grey: none)")
    assert panel.get_ylim() == (edges[0], edges[32])


def test_pruned_models_by_method(saved):
    figure = saved(plot_prune, PRUNED)
    assert list(legend(figure)) == ["deleted", "linear map", "distilled map", "merged"]
    names = {"perplexity": "perplexity", "kl": "KL (nats)", "precision@1": "precision@1"}
    for panel, (metric, name) in zip(figure.axes, names.items(), strict=True):
        assert (panel.get_title(), panel.get_xlabel()) == (name, "blocks removed")
        for method in ("delete", "map", "distil", "merge"):
            check_line(
                panel,
                legend(figure)[readable(method, METHODS)],
                chosen(PRUNED, method=method, metric=metric),
                key="removed",
            )
    assert [panel.get_yscale() for panel in figure.axes] == ["log", "linear", "linear"]
    assert figure.axes[2].get_ylim() == (0, 1.02)


def test_maps_that_travel(saved):
    means = travel.over_layers(CROSS)

    def mean(fit, eval_, n, metric):
        (row,) = chosen(means, fit_corpus=fit, eval_corpus=eval_, n_fit=n, metric=metric)
        layers = chosen(CROSS, fit_corpus=fit, eval_corpus=eval_, n_fit=n, metric=metric)
        assert row["value"] == pytest.approx(np.mean([each["value"] for each in layers]))
        return row["value"]

    figure = saved(travel_plots.plot_pairs, CROSS)
    for panel, metric in zip(figure.axes, ("precision@1", "precision@10", "r2"), strict=False):
        assert (panel.get_title(), panel.get_xlabel()) == (metric_name(metric), "evaluated on")
        assert ticks(panel.xaxis) == ["a", "x"]
        for i, fit in enumerate(("a", "b/x", None)):
            for j, eval_ in enumerate(("a", "b/x")):
                wanted = mean(fit, eval_, 500 if fit else 0, metric)
                assert panel.images[0].get_array()[i, j] == pytest.approx(wanted)
                assert digits(panel)[i, j] == f"{wanted:.2f}"
    assert ticks(figure.axes[0].yaxis) == ["a", "x", "logit lens"]
    assert figure.axes[0].get_ylabel() == "fitted on 500 examples of"

    figure = saved(travel_plots.plot_learning_curve, CROSS)
    samples, panels = legend(figure), np.reshape(figure.axes, (2, 3))
    assert list(samples) == ["fitted on a", "fitted on x", "logit lens"]
    titles = ["precision@1", "surprisal, nats", "$R^2$, cut off at −1"]
    assert [[panel.get_title() for panel in row] for row in panels] == [
        [f"{title}\non {name}" for title in titles] for name in ("a", "x")
    ]
    for across, eval_ in zip(panels, ("a", "b/x"), strict=True):
        for panel, metric in zip(across, ("precision@1", "surprisal", "r2"), strict=True):
            for fit, label, sizes in (
                ("a", "fitted on a", [500]),
                ("b/x", "fitted on x", [80, 500]),
            ):
                x, y = curve(panel, samples[label])
                assert x == sizes
                assert y == pytest.approx([mean(fit, eval_, n, metric) for n in sizes])
            (dotted,) = [
                line
                for line in panel.lines
                if line.get_linestyle() == samples["logit lens"].get_linestyle()
            ]
            assert list(dotted.get_ydata()) == pytest.approx([mean(None, eval_, 0, metric)] * 2)
            assert panel.get_xscale() == "log"
    assert {panel.get_xlabel() for panel in panels[1]} == {"examples fitted on"}


@pytest.mark.parametrize(
    ("plot", "message"),
    [
        (plot_layer_jump, "no rows by layer for precision@1"),
        (plot_layer_pairs, "no rows of r2"),
        (plot_early_exit, "no early-exit rows"),
        (plot_prune, "nothing to draw"),
    ],
)
def test_nothing_to_draw_is_said(plot, message):
    with pytest.raises(ValueError, match=message):
        plot({"rows": []})
