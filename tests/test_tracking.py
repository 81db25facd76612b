"""--track sends the figures of results.json, and no others, to a tracker; trackers are
fakes here.
"""

import contextlib
import importlib.machinery
import importlib.util
import io
import json
import pathlib
import sys
import types

import pytest

from jmat.report.results import read_results, write_results
from tests.inside import call, loaded, text

FEW = {"corpus": text(), "num_fit": 80, "num_eval": 31, "seed": 5}
PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
ROWS = [
    {
        "metric": metric,
        "map": kind,
        "layer": layer,
        "target": 2,
        "value": layer / 4,
        "low": 0.1,
        "high": 0.9,
        "n": 3,
    }
    for metric in ("precision@1", "r2")
    for kind in ("mat", "id")
    for layer in (1, 0)
]


def find(monkeypatch, package, spec):
    """From now on `spec` is what is known of a package."""
    others = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda asked: spec if asked == package else others(asked)
    )


@pytest.fixture
def installed(monkeypatch):
    """Both packages are there, as fakes that keep what they get."""
    kept = {"scalars": [], "text": {}, "logged": [], "init": {}, "folder": None}

    class Closing:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            kept["closed"] = True

    class SummaryWriter(Closing):
        def __init__(self, logdir):
            kept["folder"] = pathlib.Path(logdir)
            kept["folder"].mkdir()

        def add_text(self, name, words):
            kept["text"][name] = words

        def add_scalar(self, name, value, step):
            kept["scalars"].append((name, step, value))

    class Run(Closing):
        def log(self, values, step):
            kept["logged"].append((step, dict(values)))

    def init(**given):
        kept["init"] = given
        return Run()

    fakes = {"tensorboardX": {"SummaryWriter": SummaryWriter}, "wandb": {"init": init}}
    for package, names in fakes.items():
        find(monkeypatch, package, importlib.machinery.ModuleSpec(package, None, origin="fake.py"))
        monkeypatch.setitem(sys.modules, package, types.SimpleNamespace(**names))
    return kept


def run(monkeypatch, out, track, studies=None):
    """A script that writes rows, or those of several studies, and nothing else; what it
    says, and its exit code.
    """
    said = io.StringIO()
    with loaded("layer_jump") as script:

        def main(argv):
            config, folder, claim = script.common.claim("layer_jump", writes=("report.json",))
            if studies is None:
                write_results(folder, "layer_jump", config, ROWS)
            else:
                content = {
                    "experiment": "report",
                    "studies": {name: {"rows": rows} for name, rows in studies.items()},
                }
                claim.path("report.json").write_text(json.dumps(content))

        monkeypatch.setattr(
            sys, "argv", ["experiments.layer_jump", f"--track={track}", f"--out={out}"]
        )
        with contextlib.redirect_stderr(said), pytest.raises(SystemExit) as end:
            script.cli.run(main)
    return said.getvalue(), end.value.code or 0


EXPECTED = {
    (f"{row['metric']}/{row['map']}{end}", row["layer"], row[key])
    for row in ROWS
    for key, end in (("value", ""), ("low", "/low"), ("high", "/high"))
}


def test_tensorboard_gets_all_figures(installed, tmp_path, monkeypatch):
    for _ in range(2):  # the second run takes the place of the first
        said, code = run(monkeypatch, tmp_path / "out", "tensorboard")
        assert code == 0, said
        assert set(installed["scalars"]) == EXPECTED
        assert len(installed["scalars"]) == len(EXPECTED)
        assert installed["folder"] == tmp_path / "out" / "tensorboard"
        assert installed["closed"]
        assert (
            f"· sent {len(EXPECTED)} scalars to {tmp_path}/out/tensorboard: tensorboard --logdir="
            in said
        )
        installed["scalars"].clear()
    settings = json.loads(installed["text"]["config"])
    assert settings["config"] == read_results(tmp_path / "out")["config"]
    assert "track" not in settings["config"]  # it changes no number


def test_wandb_gets_the_figures_by_step(installed, tmp_path, monkeypatch):
    said, code = run(monkeypatch, tmp_path / "mine", "wandb")
    assert code == 0, said
    assert [step for step, _ in installed["logged"]] == [0, 1]
    logged = {
        (name, step, value)
        for step, values in installed["logged"]
        for name, value in values.items()
    }
    assert logged == EXPECTED
    given = installed["init"]
    assert (given["project"], given["name"], given["job_type"]) == ("jmat", "mine", "layer_jump")
    assert given["config"]["config"] == read_results(tmp_path / "mine")["config"]
    assert given["dir"] == str(tmp_path / "mine")
    assert installed["closed"]


@pytest.mark.parametrize("track", PACKAGES)
@pytest.mark.parametrize("is_folder", [False, True])
def test_a_missing_package_is_named_before_anything_is_written(
    track, is_folder, tmp_path, monkeypatch
):
    package = PACKAGES[track]
    find(monkeypatch, package, importlib.machinery.ModuleSpec(package, None) if is_folder else None)
    said, code = run(monkeypatch, tmp_path / "out", track)
    assert (
        said
        == f"error: --track={track} needs the package {package}: pip install 'jmat[{track}]'.\n"
    )
    assert code == 1
    assert not (tmp_path / "out").exists()


def test_a_tracker_that_fails_leaves_the_results(installed, tmp_path, monkeypatch):
    def init(**_):
        raise RuntimeError("no route\nto host")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    said, code = run(monkeypatch, tmp_path, "wandb")
    assert (
        said == f"error: --track=wandb failed: no route to host. All results are in {tmp_path}.\n"
    )
    assert code == 1
    assert len(read_results(tmp_path)["rows"]) == len(ROWS)


def test_a_run_without_a_folder_is_refused():
    with loaded("verify") as script:
        script.flags.FLAGS(["experiments.verify", "--track=wandb"])
        with pytest.raises(
            ValueError, match="--track=wandb sends what a run writes: give --out, too"
        ):
            script.main([])


def test_a_report_sends_all_its_studies(installed, tmp_path, monkeypatch):
    said, code = run(
        monkeypatch, tmp_path, "tensorboard", studies={"layer_jump": ROWS, "r2": ROWS[:1]}
    )
    assert code == 0, said
    names = {f"layer_jump/{name}" for name, *_ in EXPECTED} | {
        f"r2/precision@1/mat{end}" for end in ("", "/low", "/high")
    }
    assert {name for name, *_ in installed["scalars"]} == names


@pytest.fixture
def points():
    with loaded("r2"):
        from experiments import tracking

        yield tracking.points


def test_names_have_what_tells_figures_apart(points):
    def row(value, **fields):
        return {"metric": "r2", "map": "mat", "value": value, "n": 3, **fields}

    # One target a layer is no part of the name; several are.
    assert points([row(0.1, layer=0, target=1), row(0.2, layer=1, target=2)]) == [
        ("r2/mat", 0, 0.1),
        ("r2/mat", 1, 0.2),
    ]
    several = [
        row(0.1, layer=0, target=1),
        row(0.2, layer=0, target=2),
        row(0.3, layer=1, target=2),
    ]
    assert points(several) == [
        ("r2/mat/target=1", 0, 0.1),
        ("r2/mat/target=2", 0, 0.2),
        ("r2/mat/target=2", 1, 0.3),
    ]
    # Without a layer: removed blocks, training steps, else the order.
    pruned = [
        {"metric": "kl", "method": method, "removed": k, "value": k / 10}
        for method in "ab"
        for k in (0, 2)
    ]
    assert set(points(pruned)) == {
        ("kl/a", 0, 0.0),
        ("kl/a", 2, 0.2),
        ("kl/b", 0, 0.0),
        ("kl/b", 2, 0.2),
    }
    assert points([row(0.5, **{"lambda": 0.1}), row(0.6, **{"lambda": 0.2})]) == [
        ("r2/mat", 0, 0.5),
        ("r2/mat", 1, 0.6),
    ]
    assert points([row(None, layer=0, note="none")]) == []
    assert points([row(0.5, layer=2, low=0.4, high=0.6)], "report") == [
        ("report/r2/mat", 2, 0.5),
        ("report/r2/mat/low", 2, 0.4),
        ("report/r2/mat/high", 2, 0.6),
    ]


@pytest.mark.slow
def test_all_rows_of_all_studies_have_places_of_their_own(points):
    """No figure takes the place of another."""
    runs = [
        call("r2", **FEW),
        call("tasks", tasks=_questions(), text=text(), num_fit=None),
        call("prune", **FEW, remove=2, method="delete,map"),
    ]
    for outcome in runs:
        found = points(outcome.rows)
        values = [row for row in outcome.rows if row["value"] is not None]
        plain = [point for point in found if not point.name.endswith(("/low", "/high"))]
        assert len(plain) == len(values), outcome.name
        assert len({(point.name, point.step) for point in found}) == len(found), outcome.name


def _questions():
    path = text().with_name("questions-to-track.jsonl")
    path.write_text(json.dumps({"context": "It is", "choices": ["hot", "cold"], "answer": 0}))
    return path
