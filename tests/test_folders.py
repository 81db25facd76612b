"""Output folders: one run at a time, nothing mixed up, and nothing of the user's is
ever moved or replaced.
"""

import ast
import json
import os
import pathlib
import stat
import types
import warnings

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jmat.report.results import read_results, write_results
from jmat.runtime import files, locks, run_file
from jmat.runtime.files import save_atomically, save_together, write_tensors
from jmat.runtime.folders import check_output_folder, claim_output_folder
from tests.inside import loaded
from tests.scripts import ROOT

CONFIG = {"model": "tiny", "seed": 0, "maps": ["mat", "id"]}
ROW = {"metric": "r2", "value": 0.5}


def run(out, experiment="r2", config=CONFIG, *, writes=(), results=True, **given):
    """A whole run: claims the folder, writes everything it may write, and leaves.
    Returns the names in the folder.
    """
    with claim_output_folder(out, experiment, config, writes=writes, **given) as claim:
        for name in writes:
            if "." in name:
                claim.path(name).write_text(experiment)
            else:
                claim.path(name).mkdir(exist_ok=True)
                (out / name / "part").write_text(experiment)
        if results:
            write_results(out, experiment, config, [ROW])
    return names(out)


def names(folder):
    return {path.name for path in folder.iterdir()}


def in_a_child(call):
    """Runs `call`, which uses files only, in a forked process; it may kill that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX has threads, which the child lacks and does not need
        child = os.fork()
    if not child:
        try:
            call()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def owner(out):
    return json.loads((out / "run.json").read_text())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_flag_that_is_no_finite_number_is_named(tmp_path, value):
    with pytest.raises(ValueError, match=rf"--reg_weight={value}: expected a finite number"):
        claim_output_folder(tmp_path / "out", "pretrain", {"reg_weight": value})
    assert not (tmp_path / "out").exists()


def test_a_run_may_come_back_to_its_folder(tmp_path):
    out = tmp_path / "runs" / "r2"
    run(out, writes=["r2.png", "maps.json"])
    wrote = ["results.json", "r2.png", "maps.json"]
    assert owner(out) == {"experiment": "r2", "config": CONFIG, "wrote": wrote}
    # a tuple is a list to JSON
    with claim_output_folder(out, "r2", {**CONFIG, "maps": ("mat", "id")}):
        assert len(read_results(out)["rows"]) == 1
        assert owner(out)["wrote"] == wrote
    assert owner(out)["wrote"] == wrote


@pytest.mark.parametrize(
    ("experiment", "config", "message"),
    [
        (
            "layer_jump",
            CONFIG,
            "belongs to experiment r2, this is layer_jump; choose another --out, or --overwrite",
        ),
        (
            "r2",
            {**CONFIG, "seed": 1, "maps": []},
            r"--maps was \['mat', 'id'\] and is \[\], --seed was 0 and is 1",
        ),
        ("r2", {**CONFIG, "new": 1}, "--new was None and is 1"),
    ],
)
def test_another_runs_folder_is_refused_and_says_why(tmp_path, experiment, config, message):
    run(tmp_path, writes=["maps.json"], results=False)
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(ValueError, match=message):
        claim_output_folder(tmp_path, experiment, config)
    assert (tmp_path / "run.json").read_bytes() == before
    assert names(tmp_path) == {"run.json", "maps.json"}


@pytest.mark.parametrize("config", [CONFIG, {"seed": 1}], ids=["the same flags", "other flags"])
def test_a_second_run_at_the_same_time_is_refused_at_once(tmp_path, config):
    def claim():
        try:
            claim_output_folder(tmp_path / "out", "r2", config, overwrite=True)
        except ValueError as error:
            (tmp_path / "said").write_text(str(error))

    with claim_output_folder(tmp_path / "out", "r2", CONFIG):
        in_a_child(claim)
        said = (tmp_path / "said").read_text()
        assert said.startswith(
            f"another run is working in {tmp_path}/out (r2, process {os.getpid()} on "
        )
        assert said.endswith("): wait until it has ended, or choose another --out.")
        with pytest.raises(ValueError, match="another run is working"):
            check_output_folder(tmp_path / "out")
        assert owner(tmp_path / "out")["config"] == CONFIG
    check_output_folder(tmp_path / "out")


def test_a_killed_run_holds_its_folder_no_longer(tmp_path):
    in_a_child(lambda: claim_output_folder(tmp_path, "r2", CONFIG))  # ends without a release
    assert names(tmp_path) == {"run.json", locks.LOCK}
    run(tmp_path, "peek", {})
    assert names(tmp_path) == {"run.json", "results.json"}


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(locks.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks.fcntl, "flock", no_locks)
    with claim_output_folder(tmp_path, "r2", CONFIG) as claim:
        assert not claim.locked
    monkeypatch.undo()
    with claim_output_folder(tmp_path, "r2", CONFIG) as claim:
        assert claim.locked


def test_a_script_says_what_a_claim_has_found(tmp_path, monkeypatch, capsys):
    claimed = {"moved": tmp_path / "aside", "locked": False}
    with loaded("r2") as script:
        monkeypatch.setattr(script.cli, "_claimed", [])
        for changed, lines in (
            ({}, 2),
            ({"moved": None}, 1),
            ({"locked": True}, 1),
            ({"moved": None, "locked": True}, 0),
        ):
            found = types.SimpleNamespace(**(claimed | changed), release=lambda: None)
            monkeypatch.setattr(
                script.cli, "claim_output_folder", lambda *_, found=found, **__: found
            )
            assert script.cli.claim_folder(tmp_path, "r2", CONFIG, overwrite=False) is found
            said = capsys.readouterr().err.splitlines()
            assert len(said) == lines
            assert any("aside until there are new results" in line for line in said) == (
                found.moved is not None
            )
            assert any("has no locks" in line for line in said) == (not found.locked)


def test_overwrite_keeps_what_the_run_wrote_until_there_are_new_results_and_touches_nothing_else(
    tmp_path,
):
    run(tmp_path, writes=["r2.png", "checkpoints", "maps.safetensors"])
    run(tmp_path, overwrite=True)  # the same run goes on
    assert (tmp_path / "checkpoints" / "part").exists()
    foreign = {"notes.txt", "mine.png", "layer_jump.png", "replaced", "model", "steps"}
    for name in foreign:
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("precious")
    with claim_output_folder(
        tmp_path, "peek", {}, writes=["maps.safetensors"], overwrite=True
    ) as claim:
        aside = claim.moved
        assert names(tmp_path) == {"run.json", aside.name, locks.LOCK, *foreign}
        assert names(aside) == {
            "run.json",
            "results.json",
            "r2.png",
            "checkpoints",
            "maps.safetensors",
        }
        claim.path("maps.safetensors").write_text("half of new ones: the run failed")
    with claim_output_folder(tmp_path, "probe", {}, overwrite=True) as claim:
        assert claim.moved == aside
        assert (aside / "maps.safetensors").read_text() == "r2"
        assert owner(aside)["experiment"] == "r2"
        write_results(tmp_path, "probe", {}, [ROW])
    assert names(tmp_path) == {"run.json", "results.json", *foreign}
    assert {(tmp_path / name / "weights").read_text() for name in foreign} == {"precious"}


@pytest.mark.parametrize("name", ["model", "r2.png", "results.json", "maps.json"])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("config", [CONFIG, {}], ids=["the same flags", "other flags"])
def test_where_the_users_file_lies_no_run_writes(tmp_path, name, overwrite, config):
    run(tmp_path, writes=["other.png"], results=False)
    (tmp_path / name).write_text("precious")
    claimed = {"writes": ["model", "r2.png", "maps.json"], "overwrite": overwrite}
    with pytest.raises(
        ValueError, match=f"holds {name}, which no run is known to have|belongs to a run with other"
    ):
        claim_output_folder(tmp_path, "r2", config, **claimed)
    assert (tmp_path / name).read_text() == "precious"
    assert names(tmp_path) == {"run.json", "other.png", name}
    assert owner(tmp_path)["config"] == CONFIG


def test_what_comes_to_lie_in_the_way_of_a_run_is_not_replaced(tmp_path):
    with claim_output_folder(tmp_path, "r2", CONFIG, writes=["r2.png"]) as claim:
        (tmp_path / "r2.png").write_text("precious")
        with pytest.raises(
            ValueError, match=r"holds r2\.png, which no run is known to have written"
        ):
            claim.path("r2.png")
        with pytest.raises(ValueError, match=r"r2 writes other\.png, which it had not claimed"):
            claim.path("other.png")
    assert names(tmp_path) == {"r2.png"}


def test_a_users_replaced_folder_stays(tmp_path):
    run(tmp_path)
    (tmp_path / ".replaced").mkdir()
    (tmp_path / ".replaced" / "notes").write_text("precious")
    with pytest.raises(ValueError, match=r"holds \.replaced, which no run is known"):
        claim_output_folder(tmp_path, "peek", {}, overwrite=True)
    run(tmp_path)
    assert names(tmp_path) == {"run.json", "results.json", ".replaced"}
    assert owner(tmp_path)["experiment"] == "r2"


@pytest.mark.parametrize("made", [True, False])
def test_a_run_that_fails_before_it_writes_anything_leaves_all_as_it_was(tmp_path, made):
    out = tmp_path / "new" / "out"
    if made:
        out.mkdir(parents=True)
    with pytest.raises(ValueError, match="bad warm-up"), claim_output_folder(out, "r2", CONFIG):
        raise ValueError("bad warm-up")
    assert out.exists() == made
    assert names(tmp_path) == ({"new"} if made else set())
    before = run(out, writes=["r2.png", "checkpoints"])
    for _ in range(2):
        with claim_output_folder(out, "layer_jump", {}, overwrite=True):
            assert not (out / "results.json").exists()
        assert names(out) == before
        assert owner(out)["experiment"] == "r2"
        assert (out / "checkpoints" / "part").read_text() == "r2"


@pytest.mark.parametrize("at", range(1, 6))
def test_a_run_that_is_killed_while_it_moves_files_loses_none(tmp_path, at, monkeypatch):
    before = run(tmp_path, writes=["r2.png", "checkpoints", "maps.json"])
    calls, rename = [], pathlib.Path.rename

    def killed(path, target):
        calls.append(path)
        if len(calls) == at:
            os._exit(9)
        return rename(path, target)

    def move():
        monkeypatch.setattr(pathlib.Path, "rename", killed)
        claim_output_folder(tmp_path, "layer_jump", {}, overwrite=True).release()

    in_a_child(move)
    run(tmp_path)
    assert names(tmp_path) == before
    assert (tmp_path / "checkpoints" / "part").read_text() == "r2"


def test_a_run_that_was_killed_before_it_wrote_anything_keeps_no_folder(tmp_path):
    (tmp_path / "run.json").write_text(
        json.dumps({"experiment": "r2", "config": CONFIG, "wrote": ["results.json"]})
    )
    with claim_output_folder(tmp_path, "layer_jump", {"seed": 3}) as claim:
        assert claim.moved is None
        assert owner(tmp_path) == {
            "experiment": "layer_jump",
            "config": {"seed": 3},
            "wrote": ["results.json"],
        }


@pytest.mark.parametrize("written", ["", '{"experiment": '])
def test_a_damaged_claim_needs_overwrite(tmp_path, written):
    run(tmp_path, writes=["maps.json"])
    (tmp_path / "run.json").write_text(written)
    with pytest.raises(ValueError, match="is damaged"):
        claim_output_folder(tmp_path, "r2", CONFIG)
    with pytest.raises(ValueError, match=r"holds maps\.json, which no run is known"):
        claim_output_folder(tmp_path, "r2", CONFIG, writes=["maps.json"], overwrite=True)
    run(tmp_path, overwrite=True)
    (tmp_path / "maps.json").rename(tmp_path / "kept")
    run(tmp_path, writes=["maps.json"])
    assert names(tmp_path) == {"run.json", "results.json", "maps.json", "kept"}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "content", ["mine", '{"id": 3}', '{"experiment": "r2"}', "[]", "3", '{"mine']
)
def test_a_users_run_file_stays(tmp_path, content, overwrite):
    (tmp_path / "run.json").write_text(content)
    (tmp_path / "results.json").write_text("mine, too")
    with pytest.raises(ValueError, match=r"holds run\.json, which no run is known to have written"):
        claim_output_folder(tmp_path, "r2", CONFIG, overwrite=overwrite)
    assert (tmp_path / "run.json").read_text() == content
    assert (tmp_path / "results.json").read_text() == "mine, too"


@pytest.mark.parametrize(
    "wrote", [["../precious"], ["."], [".."], [""], ["/etc"], [3], "r2.png", 3]
)
def test_a_run_file_that_names_paths_elsewhere_is_damaged(tmp_path, wrote):
    out = tmp_path / "out"
    run(out)
    (tmp_path / "precious").write_text("precious")
    (out / "run.json").write_text(json.dumps({"experiment": "r2", "config": {}, "wrote": wrote}))
    with pytest.raises(ValueError, match="is damaged"):
        claim_output_folder(out, "peek", {})
    run(out, "peek", {}, overwrite=True)
    assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.parametrize(
    ("experiment", "own", "foreign"),
    [
        (
            "layer_jump",
            ["layer_jump.png", "maps.json", "maps.safetensors"],
            ["model", "r2.png", "steps"],
        ),
        ("pretrain", ["model", "steps", "checkpoints"], ["r2.png", "maps.json"]),
        ("probe", ["probe.png"], ["checkpoints", "model"]),
        ("bundled_quality", [], ["model"]),
    ],
)
def test_folders_of_version_0_1_give_only_what_that_experiment_wrote(
    tmp_path, experiment, own, foreign
):
    for name in [*own, *foreign]:
        (tmp_path / name).write_text("old")
    (tmp_path / "results.json").write_text(
        json.dumps({"experiment": experiment, "config": {}, "rows": []})
    )
    if experiment != "bundled_quality":
        (tmp_path / "run.json").write_text(json.dumps({"experiment": experiment, "config": {}}))
    else:
        (tmp_path / "model").unlink()
        foreign = []
    with claim_output_folder(tmp_path, experiment, {}) as claim:
        assert claim.moved is None
    with pytest.raises(ValueError, match=r"other flags|belongs to"):
        claim_output_folder(tmp_path, experiment, {"seed": 1})
    run(tmp_path, "peek", {}, overwrite=True)
    assert names(tmp_path) == {"run.json", "results.json", *foreign}


def test_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "log.txt").write_text("the shell redirects output here: no reason to refuse")
    run(tmp_path)
    model = tmp_path / "gpt2"
    model.mkdir()
    (model / "config.json").write_text("{}")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=r"gpt2 holds config\.json, and no run\.json"):
            claim_output_folder(model, "r2", CONFIG, overwrite=overwrite)
    (tmp_path / "parent" / "model").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"parent holds model, and no run\.json"):
        claim_output_folder(tmp_path / "parent", "r2", CONFIG)


def unusable(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "nowhere").symlink_to("missing/folder")
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    return {
        tmp_path / "file": "File exists",
        tmp_path / "file" / "out": "Not a directory",
        tmp_path / "a": "Too many levels of symbolic links",
        tmp_path / "a" / "out": "Too many levels of symbolic links",
        tmp_path / ("n" * 300): "File name too long",
        tmp_path / ("n" * 300) / "out": "File name too long",
        tmp_path / "nowhere": "File exists",
        **(
            {}
            if os.geteuid() == 0
            else {locked: "Permission denied", locked / "out": "Permission denied"}
        ),
    }


def test_an_unusable_folder_is_one_clear_sentence(tmp_path):
    for out, reason in unusable(tmp_path).items():
        for claim in (lambda out: claim_output_folder(out, "r2", CONFIG), check_output_folder):
            with pytest.raises(
                ValueError, match=f"cannot use .* as output folder: {reason}; choose another --out"
            ):
                claim(out)
    for out, reason in (("", "--out is empty"), ("~nobody-here/out", "there is no such user")):
        with pytest.raises(ValueError, match=reason):
            claim_output_folder(out, "r2", CONFIG)


def test_a_home_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with claim_output_folder("~/out", "r2", CONFIG) as claim:
        assert claim.folder == tmp_path / "out"


def test_the_folder_that_is_proposed_is_the_first_that_is_free(tmp_path):
    out = tmp_path / "out"
    run(out)
    for taken in range(2, 5):
        told = rf"--seed was 0 and is 1\); choose another --out, such as --out={out}-{taken}, or --overwrite"
        with pytest.raises(ValueError, match=told):
            claim_output_folder(out, "r2", CONFIG | {"seed": 1})
        (tmp_path / f"out-{taken}").mkdir()
    told = rf"{out} belongs to experiment r2, this is probe; choose another --out, or --overwrite to replace it"
    with pytest.raises(ValueError, match=told):
        claim_output_folder(out, "probe", CONFIG)
    run(out, config=CONFIG)  # its own flags: taken over as it is


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_does_not_write_over_what_it_reads(tmp_path, overwrite):
    out = tmp_path / "out"
    run(out, "pretrain", {}, writes=["model"])
    (out / "elsewhere").mkdir()
    # what an earlier run left, which is deleted next
    (out / ".replaced" / "model").mkdir(parents=True)
    inside = [
        {name: str(out / name)}
        for name in ("model", "results.json", ".replaced", ".replaced/model")
    ]
    for flags in (*inside, {"revisions": ["main", f"{out}/../out/model"]}, {"maps": str(out)}):
        with pytest.raises(ValueError, match=r"lies in the output folder .*: choose another --out"):
            claim_output_folder(out, "prune", flags, reads=list(flags), overwrite=overwrite)
    assert (out / "model" / "part").read_text() == "pretrain"
    (out / ".replaced" / "model").rmdir(), (out / ".replaced").rmdir()
    flags = {"model": str(out / "elsewhere"), "corpus": "docs", "sentences": [str(out / "model")]}
    with claim_output_folder(out, "prune", flags, reads=["model", "corpus"], overwrite=True):
        pass


@pytest.mark.parametrize(
    "text", ["word " * 80, "~nobody knows", "a\0b", "x" * 5000, "/".join("ab" * 3000)]
)
def test_sentences_are_not_taken_for_paths(tmp_path, text):
    for reads in ([], ["sentences"]):
        with claim_output_folder(tmp_path, "peek", {"sentences": [text]}, reads=reads):
            pass


def kill_in(folder, call):
    """Runs `call` in a process that is killed where it would move a file to its place
    for the first time.
    """

    def killed():
        os.replace = lambda *_: os.kill(os.getpid(), 9)
        call()

    in_a_child(killed)
    assert any(path.name.startswith(".") and path.name != locks.LOCK for path in folder.rglob("*"))


def test_what_a_kill_leaves_half_written_is_swept(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    kill_in(out, lambda: claim_output_folder(out, "r2", CONFIG))
    assert run(out, writes=["model"]) == {"run.json", "results.json", "model"}
    (out / ".mine.json.abcdefgh.json").write_text("of no file that a run writes")
    write = {"model/config.json", "model/model.safetensors", "results.json", "r2.png"}
    for name in write:
        kill_in(
            out, lambda name=name: save_atomically(out / name, lambda path: path.write_text("half"))
        )
    run(out, writes=["model", "r2.png", "checkpoints"])
    (out / ".checkpoints.finished").mkdir()
    run(out, writes=["model", "r2.png", "checkpoints"])
    assert names(out) == {
        "run.json",
        "results.json",
        "r2.png",
        "model",
        "checkpoints",
        ".mine.json.abcdefgh.json",
    }
    assert names(out / "model") == {"part"}


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_the_users_umask_is_honoured(tmp_path, umask):
    before = os.umask(umask)
    try:
        run(tmp_path / "out", writes=["model"])
        save_together(
            {tmp_path / name: lambda path: path.write_text("text") for name in ("one", "two")}
        )
        save_atomically(tmp_path / "maps", lambda path: write_tensors(path, {"map": np.eye(2)}, {}))
    finally:
        os.umask(before)
    for path in [
        tmp_path / name for name in ("out/run.json", "out/results.json", "one", "two", "maps")
    ]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o777 & ~umask


def test_tensors_are_written_as_safetensors_does_and_into_the_file_itself(tmp_path):
    tensors = {
        "é": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "b": np.arange(3, dtype=np.float16),
        "a": np.arange(4, dtype=np.float64).reshape(2, 2),
        "empty": np.zeros((0, 3), ml_dtypes.bfloat16),
        **{name: np.arange(3).astype(name) for name in files._DTYPES if name != "bfloat16"},
    }
    metadata = {"info": '{"text": "ä\\n"}'}
    path = tmp_path / "file"
    path.touch()
    file = path.stat().st_ino
    write_tensors(path, tensors, metadata)
    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    assert path.read_bytes() == safetensors.numpy.save(contiguous, metadata)
    assert path.stat().st_ino == file  # and not another one, which a kill would leave behind
    with pytest.raises(OSError, match="No space left"):
        write_tensors(pathlib.Path("/dev/full"), tensors, metadata)


@pytest.mark.parametrize("killed_at", [1, 2, 3])
def test_files_that_belong_together_are_never_of_two_times(tmp_path, killed_at):
    def save(content):
        save_together(
            {
                tmp_path / n: lambda path: path.write_text(content)
                for n in ("maps.safetensors", "maps.json")
            }
        )

    save("old")
    replace, calls = os.replace, []

    def killed(*paths):
        calls.append(paths)
        if len(calls) == killed_at:
            os._exit(9)
        replace(*paths)

    def save_new():
        os.replace = killed
        save("new")

    in_a_child(save_new)
    found = {
        name: (tmp_path / name).read_text()
        for name in ("maps.safetensors", "maps.json")
        if (tmp_path / name).exists()
    }
    assert (
        found
        == {
            1: {"maps.safetensors": "old"},
            2: {"maps.safetensors": "new"},
            3: {"maps.safetensors": "new", "maps.json": "new"},
        }[killed_at]
    )


def test_a_full_disk_leaves_files_that_belong_together_as_they_were(tmp_path):
    paths = [tmp_path / "maps.safetensors", tmp_path / "maps.json"]
    save_together({path: lambda temporary: temporary.write_text("old") for path in paths})

    def full(_):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match=r"cannot write .*maps\.json: the disk is full"):
        save_together({paths[0]: lambda temporary: temporary.write_text("new"), paths[1]: full})
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        path.name: "old" for path in paths
    }


def test_every_script_that_has_an_output_folder_claims_it():
    for script in (ROOT / "experiments").glob("*.py"):
        text = script.read_text("utf-8")
        if "write_results(" in text or "job.publish(" in text:
            called = {
                ast.unparse(node.func)
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.Call)
            }
            assert called & {
                "common.start",
                "common.claim",
                "cli.claim_folder",
                "claim_output_folder",
            }, script.name
        assert "mkdir(" not in text, script.name


def test_the_experiments_of_version_0_1_are_known():
    assert "results.json" not in {
        name for wrote in run_file.WRITTEN_BY_0_1.values() for name in wrote
    }
    assert run_file.WRITTEN_BY_0_1.keys() <= {
        path.stem for path in (ROOT / "experiments").glob("*.py")
    }
