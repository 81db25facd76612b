"""The page of figures has every figure that an experiment draws, and is what its script
writes.
"""

import importlib.util
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
EXPERIMENTS = (
    "layer_jump r2 early_exit submodule_ablation probe prune linearity cross_corpus "
    "regularizer_study map_zoo decoding"
).split()
OTHERS = ("report.png", "map_kinds_curve.png")  # pictures of other pages


@pytest.fixture(scope="module")
def gallery():
    spec = importlib.util.spec_from_file_location("make_gallery", ROOT / "docs" / "make_gallery.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_its_script_writes(gallery):
    assert gallery.PAGE.read_text("utf-8") == gallery.page()


def test_every_picture_is_there_and_they_are_small(gallery):
    pictures = {path.name: path.stat().st_size for path in gallery.IMAGES.iterdir()}
    assert set(pictures) == {*(f"{entry.name}.png" for entry in gallery.ENTRIES), *OTHERS}
    assert pictures["report.png"] < 200_000
    assert sum(pictures.values()) < 3e6
    assert all((gallery.IMAGES / name).read_bytes().startswith(b"\x89PNG") for name in pictures)


def test_every_experiment_that_draws_has_its_entries(gallery):
    commands = [command for entry in gallery.ENTRIES for command in entry.commands]
    assert {
        name for command in commands for name in re.findall(r"experiments\.(\w+)", command)
    } == set(EXPERIMENTS)
    draws = {entry.plot for entry in gallery.ENTRIES}
    for name in (
        "linearity",
        "geometry",
        "errors",
        "checkpoints",
        "jump_strength",
        "difference",
        "pairs",
    ):
        assert getattr(gallery.linearity, f"plot_{name}") in draws
    assert {
        gallery.map_zoo.plot_layers,
        gallery.map_zoo.plot_bytes,
        gallery.map_zoo.plot_pairs,
    } <= draws
    assert {gallery.kinds.plot_kind_pairs, gallery.kinds.plot_kind_curves} <= draws
    assert {gallery.decoding.plot, gallery.layer_jump.plot_jumps} <= draws
    assert {gallery.corpora.plot_pairs, gallery.corpora.plot_learning_curve} <= draws
