"""Every script: each flag is a setting of its study, none is lost, and its folder is
claimed for what it writes.
"""

import dataclasses
import importlib
import pathlib
import sys
import types

import pytest
from absl import flags

from jmat.models import gpt2, llama  # noqa: F401 (imported before scripts are)
from jmat.report.results import Results
from jmat.studies.settings import Settings
from tests.inside import call, loaded, text

STUDIES = {
    "layer_jump": "layer_jump",
    "r2": "r2",
    "submodule_ablation": "submodules",
    "early_exit": "early_exit",
    "linearity": "linearity",
    "prune": "prune",
    "probe": "probe",
    "peek": "peek",
    "cross_corpus": "cross_corpus",
    "map_zoo": "map_zoo",
    "decoding": "decoding",
    "tasks": "tasks",
    "report": "overview",
}
# Flags of a script that are no settings of its study, but name what it reads.
READ = {
    "submodule_ablation": set(),
    "linearity": {"revisions", "against"},
    "probe": {"labels", "against"},
    "peek": {"sentences", "maps"},
    "cross_corpus": {"corpora"},
    "map_zoo": {"models"},
    "decoding": {"prompts"},
    "tasks": {"text", "tasks"},
}
NOT_FLAGS = {"snapshot_folder"}  # a script says where
LISTS = {
    "layers": ["1", "2"],
    "sizes": ["7", "9"],
    "maps": ["mat_ffn"],
    "kinds": ["rank:3"],
    "draft_tokens": ["3"],
    "ways": ["exit"],
    "fills": ["copy"],
    "thresholds": ["0.7"],
    "method": ["map"],
    "pairs": ["0-1"],
    "studies": ["r2", "peek"],
}
LISTS_OF = {"cross_corpus": {"maps": ["rank:3"]}}  # where a name means something else
# Scripts whose maps have an intercept, or a solver, by their kind: these settings are refused.
OF_KINDS = ("map_zoo", "decoding")
OUTSIDE_REPORT = ("cross_corpus", "tasks", "report", *OF_KINDS)
# settings that need another one
SAVE = {"save": {"method": ["map"]}, "score_sentences": {}, "then_run": {"pairs": ["0-1"]}}


def options_of(script):
    return importlib.import_module(f"jmat.studies.{STUDIES[script]}").Options


def other(flag, script):
    """Another value of a flag of a script than its default."""
    values, lists = getattr(flag.parser, "enum_values", None), LISTS | LISTS_OF.get(script, {})
    if flag.name in lists:
        return lists[flag.name]
    if values:
        return next(value for value in values if value != flag.default)
    if flag.boolean:
        return not flag.default
    return (
        3
        if flag.default is None
        else type(flag.default)(flag.default + 1 if flag.default != 0.05 else 0.5)
    )


@pytest.fixture(params=STUDIES)
def script(request):
    with loaded(request.param) as module:
        flags.FLAGS([module.__name__])
        yield request.param, module


def test_flags_have_the_defaults_of_the_settings(script):
    name, module = script
    kind = options_of(name)
    found, wanted = module.common.flag_options(kind), kind()
    for field in dataclasses.fields(kind):
        given, default = (getattr(each, field.name) for each in (found, wanted))
        if isinstance(default, tuple):
            given = tuple(given)
        assert given == default, field.name


def test_every_setting_is_a_flag_that_sets_it_alone(script):
    name, module = script
    kind, known = options_of(name), flags.FLAGS
    fields = {field.name for field in dataclasses.fields(kind)} - NOT_FLAGS
    if name in OF_KINDS:
        fields -= {"intercept", "solver"}
    usual = module.common.flag_options(kind)
    for field in fields:
        assert field in known, field
        needed = {each: value for each, value in SAVE.get(field, {}).items() if each in known}
        before = {each: known[each].value for each in (field, *needed)}
        for each, value in needed.items():
            known[each].value = value
        wanted = 0.5 if field in ("delta", "epsilon") else other(known[field], name)
        known[field].value = wanted
        found = module.common.flag_options(kind)
        differing = {each for each in fields if getattr(found, each) != getattr(usual, each)}
        assert differing == {field, *needed}, field
        assert getattr(found, field) == wanted
        for each, value in before.items():
            known[each].value = value


def test_no_flag_of_a_script_is_lost(script):
    name, module = script
    own = {flag.name for flag in flags.FLAGS.get_key_flags_for_module(module)}
    shared = {flag.name for flag in flags.FLAGS.get_key_flags_for_module(module.common)}
    shared |= {"figure_format", "figure_width"}
    settings = {field.name for field in dataclasses.fields(options_of(name))}
    common = {field.name for field in dataclasses.fields(Settings)}
    assert own - shared - settings == READ.get(name, set())
    read = (
        {"seed", "tokens_per_batch"}
        if name == "tasks"
        else {"seed", "intercept", "tokens_per_batch"}
    )
    assert common & own == read


MAPS = {"maps.safetensors", "maps.json"}
SNAPSHOTS = "checkpoints"
LINEARITY = {"linearity.png", "geometry.png", "errors.png", SNAPSHOTS}
# Script and flags → what it writes beside results.json, the flags that may name files, whether it
# needs a head, and whether several processes may run it.
CLAIMS = [
    ("layer_jump", {}, {"layer_jump.png", "layer_jump_pairs.png", *MAPS, SNAPSHOTS}, (), True, True),
    ("r2", {}, {"r2.png", *MAPS, SNAPSHOTS}, (), False, True),
    ("submodule_ablation", {}, {"submodule_ablation.png", *MAPS}, (), True, True),
    ("early_exit", {}, {"early_exit.png", *MAPS}, (), True, True),
    ("linearity", {}, LINEARITY, ("revisions", "against"), False, True),
    ("linearity", {"against": "x"}, LINEARITY | {"difference.png"}, ("revisions", "against"), False, True),
    ("linearity", {"revisions": "x"}, LINEARITY | {"checkpoints.png", "jump_strength.png"}, ("revisions", "against"), False, True),
    ("linearity", {"all_pairs": True}, LINEARITY | {"pairs.png"}, ("revisions", "against"), False, True),
    ("prune", {}, {"prune.png", *MAPS}, (), True, False),
    ("prune", {"save": True, "method": "map"}, {"prune.png", *MAPS, "model"}, (), True, False),
    ("probe", {}, {"probe.png"}, ("labels", "against"), True, False),
    ("peek", {}, {"peek.json", "peek.html"}, ("maps",), True, False),
    ("decoding", {}, {"decoding.png", "decoding.json", *MAPS, SNAPSHOTS}, ("prompts",), True, False),
    ("cross_corpus", {}, {"pairs.png", "learning_curve.png"}, ("corpora",), True, True),
    ("report", {}, {*(set(STUDIES) - set(OUTSIDE_REPORT)), "report.html", "report.json", SNAPSHOTS},
     (), False, False),
]  # fmt: skip


@pytest.mark.parametrize(("script", "given", "writes", "reads", "head", "many"), CLAIMS)
def test_scripts_claim_what_they_write_and_name_what_they_read(
    script, given, writes, reads, head, many, monkeypatch
):
    seen = {}

    def start(experiment, **how):
        seen.update(how, experiment=experiment)
        raise ValueError("stopped")

    with loaded(script) as module:
        monkeypatch.setattr(module.common, "start", start)
        with pytest.raises(ValueError, match="stopped"):
            call(script, corpus=text(), seed=78, **given)
    assert seen["experiment"] == script
    assert set(seen["writes"]) == writes
    assert tuple(seen.get("reads", ())) == reads
    assert seen.get("needs_head", True) == head
    assert seen.get("many_hosts", False) == many
    assert seen["options"] is options_of(script)


# Scripts that claim their folder themselves.
OWN_CLAIMS = [
    ("tasks", {"text": "{text}"}, "claim", ("text", "tasks"), set()),
    ("verify", {"text": "Yes."}, "claim_folder", ("model",), set()),
    ("benchmark", {"model": None, "smoke": True, "shape": "tiny"}, "claim_folder", (), set()),
    (
        "bundled_quality",
        {"model": None, "corpus": "{text}"},
        "claim_folder",
        ("gpt2", "bert", "corpus"),
        set(),
    ),
    (
        "pretrain",
        {"model": None, "corpus": "{text}"},
        "claim_folder",
        ("corpus",),
        {"model", "steps", "checkpoints"},
    ),
    (
        "regularizer_study",
        {"model": None, "kinds": "none"},
        "claim_folder",
        (),
        {"regularizer_study.png"},
    ),
]


@pytest.mark.parametrize(("script", "given", "function", "reads", "writes"), OWN_CLAIMS)
def test_scripts_of_another_kind_do_so_too(script, given, function, reads, writes, monkeypatch):
    seen = {}

    def claim(*names, **how):
        seen.update(how, experiment=names[0] if function == "claim" else names[1])
        raise ValueError("stopped")

    given = {name: str(text()) if value == "{text}" else value for name, value in given.items()}
    with loaded(script) as module:
        home = module.common if function == "claim" else module.cli
        monkeypatch.setattr(home, function, claim)
        with pytest.raises(ValueError, match="stopped"):
            call(script, seed=None if script in ("verify", "regularizer_study") else 79, **given)
    assert seen["experiment"] == script
    assert tuple(seen.get("reads", ())) == reads
    assert set(seen.get("writes", ())) == writes
    assert seen.get("overwrite", False) is False


@pytest.mark.parametrize("script", ["layer_jump", "tasks"])
@pytest.mark.parametrize("given", [(), ("--overwrite",)])
def test_the_flags_of_the_model_count_as_read_and_overwrite_arrives(script, given, monkeypatch):
    with loaded(script) as module:
        seen = {}

        def claim(out, experiment, config, **how):
            seen.update(how, config=config, experiment=experiment)

        monkeypatch.setattr(module.cli, "claim_folder", claim)
        monkeypatch.setattr(sys, "argv", [f"experiments.{script}"])
        flags.FLAGS([f"experiments.{script}", "--model=a", "--seed=5", *given])
        module.common.claim(script, writes=("a.png", "b.json"), reads=("mine",))
    assert set(seen["reads"]) == {"model", "examples", "corpus", "mine"}
    assert set(seen["writes"]) == {"a.png", "b.json"}
    assert seen["overwrite"] == bool(given)
    assert (seen["experiment"], seen["config"]["seed"]) == (script, 5)


MODEL_FLAGS = {
    "dtype": "bfloat16",
    "ignore_config": "odd",
    "revision": "v2",
    "shard_parameters": True,
}
# Script → the function that loads its model, and the flags of the model that must arrive there.
LOADERS = {
    "layer_jump": ("common.load", ("dtype", "ignore_config", "revision", "shard_parameters")),
    "report": ("common.load", ("dtype", "ignore_config", "revision", "shard_parameters")),
    "tasks": ("load_pruned", ("dtype", "ignore_config", "revision")),
    "verify": ("load_model", ("dtype", "ignore_config")),
}


def recorded(monkeypatch, module, path):
    """Replaces a function of a script by one that keeps its arguments and ends the run."""
    seen = {}

    def stop(*given, **how):
        seen.update(how, given=given)
        raise ValueError("stopped")

    home, _, name = path.rpartition(".")
    monkeypatch.setattr(getattr(module, home) if home else module, name, stop)
    return seen


@pytest.mark.parametrize("script", LOADERS)
def test_the_flags_of_the_model_arrive_where_it_is_loaded(script, monkeypatch):
    path, names = LOADERS[script]
    given = {name: value for name, value in MODEL_FLAGS.items() if name in (*names, "revision")}
    with loaded(script) as module:
        seen = recorded(monkeypatch, module, path)
        if script == "verify":
            monkeypatch.setattr(module, "find", lambda name, *, revision: (name, revision))
        with pytest.raises(ValueError, match="stopped"):
            call(script, model="some/model", text=text() if script == "tasks" else None, **given)
    wanted = {name: ("odd",) if name == "ignore_config" else MODEL_FLAGS[name] for name in names}
    assert {name: seen[name] for name in names} == wanted
    assert seen["given"] == (("some/model", "v2"),) if script == "verify" else ("some/model",)


@pytest.mark.parametrize(("name", "revision"), [("other/model", None), ("step-3", "step-3")])
def test_another_checkpoint_is_loaded_as_the_model_is(name, revision, monkeypatch):
    with loaded("linearity") as module:
        words = [
            "--dtype=bfloat16",
            "--shard_parameters",
            "--ignore_config=odd",
            "--model=some/model",
            "--revision=v2",
        ]
        flags.FLAGS(["experiments.linearity", *words])
        monkeypatch.setattr(module, "find", lambda source, *, revision: (source, revision))
        monkeypatch.setattr(module, "fields_among", lambda place, fields: (place, *fields))
        seen = recorded(monkeypatch, module, "load")
        with pytest.raises(ValueError, match="stopped"):
            module.load_other(None, name, revision=revision is not None)
    source = "some/model" if revision else name
    assert seen == {
        "given": (source,), "dtype": "bfloat16", "shard_parameters": True, "revision": revision,
        "ignore_config": ((source, revision), "odd"),
    }  # fmt: skip


def test_the_second_model_of_a_probe_has_the_dtype_of_the_first(monkeypatch):
    with loaded("probe") as module:
        seen = recorded(monkeypatch, module, "load")
        job = types.SimpleNamespace(config={"dtype": "float16", "model": "one"})
        with pytest.raises(ValueError, match="stopped"):
            module.load_other(job, "two", reads_corpus=True)
    assert seen == {"given": ("two",), "dtype": "float16"}


# Flags of the studies' own scripts that are no settings, as the report's files have them.
NOT_GIVEN = {
    "linearity": {"revisions": [], "against": None},
    "probe": {"labels": None, "against": None},
    "peek": {"sentences": None, "maps": None},
}


@pytest.mark.parametrize("study", [name for name in STUDIES if name not in OUTSIDE_REPORT])
def test_a_study_of_the_report_is_described_as_by_its_own_script(study, monkeypatch):
    seen = {}

    def run(model, examples, options, **how):
        seen.update(how)
        raise ValueError("stopped")

    with loaded("report") as module:
        job = types.SimpleNamespace(
            model=1, examples=2, out=pathlib.Path("x"), path=None, context={"say": None}, options=lambda kind: kind(),
            described=lambda results, *, config: config,
        )  # fmt: skip
        monkeypatch.setattr(module.common, "start", lambda *_, **__: job)
        monkeypatch.setattr(module.overview, "run", run)
        monkeypatch.setattr(sys, "argv", ["experiments.report"])
        flags.FLAGS(["experiments.report", "--num_fit=7", "--model=some"])
        with pytest.raises(ValueError, match="stopped"):
            module.main([])
        settings = dataclasses.asdict(options_of(study)(seed=5)) | {"model": "some"}
        config = seen["described"](Results(study, [], settings))
    settings = {name: value for name, value in settings.items() if not name.startswith("snapshot_")}
    shared = {
        "num_fit": 7,
        "num_eval": 3000,
        "corpus": "docs",
        "seed": 0,
        **NOT_GIVEN.get(study, {}),
    }
    assert {name: config[name] for name in {*settings, *shared}} == settings | shared
    assert (seen["folder"], seen["say"]) == (pathlib.Path("x"), None)
    with loaded(study) as module:
        monkeypatch.setattr(sys, "argv", [f"experiments.{study}"])
        flags.FLAGS([f"experiments.{study}"])
        own = module.common.own_flags()
    assert set(config) == set(own)


@pytest.mark.parametrize("twice", ["{0},{0}", "{0},{1}/../{2}", "docs,jmat:docs", "docs,{0},docs"])
def test_a_corpus_is_named_once_under_whatever_name(twice):
    path = text()
    names = twice.format(path, path.parent, path.name).split(",")
    if "/../" in twice:
        names[1] = str(path.parent / ".." / path.parent.name / path.name)
    with pytest.raises(ValueError, match=r"--corpora=.* names a corpus twice"):
        call("cross_corpus", corpora=names)
