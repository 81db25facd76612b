"""Runs an experiment of maps on several models, each in a folder of its own, and puts
their results together.

A model that is finished is not run again, so a run that was killed goes on with the
next one.
"""

import pathlib
from collections.abc import Collection, Sequence

from experiments import cli, common
from experiments.common import FLAGS
from experiments.text_flags import check_text_flags
from jmat.checkpoint.load import find
from jmat.maps.files import MAPS_FILES
from jmat.models import fields_among, read_config
from jmat.report.results import Results, read_results
from jmat.report.rows import Content
from jmat.runtime.annotations import Keywords
from jmat.runtime.files import discard_temporary
from jmat.runtime.names import PREFIX
from jmat.studies import map_zoo
from jmat.studies.map_zoo.several import Part, combined
from jmat.studies.overview.finished import is_same


def run_models(names: Sequence[str], writes: Collection[str]) -> None:
    """Runs map_zoo on every model, and prints and writes the results of all.

    Args:
      names: of the models, as --model takes them.
      writes: names of the files that the experiment writes for one model.
    """
    check_text_flags()
    settings = common.flag_options(map_zoo.Options)
    for flag in ("model", "revision"):
        if FLAGS[flag].present:
            raise ValueError(f"models={','.join(names)} names all models: leave out --{flag}.")
    folders = folder_names(names)
    config, out, claim = common.claim(
        "map_zoo",
        writes=(*writes, *folders.values()),
        reads=("models",),
        out=pathlib.Path("runs/map_zoo-models"),
    )
    assert claim is not None  # one host
    ignored = {name: _ignored(name) for name in names}
    for name in names:  # before any of them is loaded
        if (folder := find(name)).is_dir():
            settings.check(read_config(folder, ignored[name]))
    parts: dict[str, Part] = {}
    for name, folder_name in folders.items():
        loading: Keywords = {"ignore": ignored[name], "needs_head": True}
        model, tokenizer = common.load_checked(name, settings, **loading)
        own = config | {"model": name, "models": []}  # as if it were run alone
        source = FLAGS.examples or FLAGS.corpus
        folder = claim.path(folder_name)
        job = common.Job("map_zoo", own, folder, None, model, tokenizer, source)
        parts[folder_name] = Part(model.config.family, _content(job))
        del model, job
    results = combined(parts, {key: value for key, value in config.items() if key != "model"})
    written = results.save(out, before=claim.path, say=cli.say, **_drawing())
    print(results.table())
    print(f"wrote {out}/{', '.join(written)}, and all of each model in {', '.join(parts)}")


def _content(job: common.Job) -> Content:
    """Returns the results of one model: those that its folder has, or those of a run."""
    options = job.options(map_zoo.Options)
    expected = Results("map_zoo", [], job.config, job.model_hash, job.text())
    found = _finished(job.out, expected)
    if found is None:
        discard_temporary(job.out.glob("*"))  # none where there is no folder yet
        results = job.described(map_zoo.run(job.model, job.examples, options, **job.context))
        results.save(job.out, say=cli.say, **_drawing())
        return read_results(job.out)
    cli.say(f"{job.config['model']} is there already: {job.out}")
    drawn = Results("map_zoo", [*found["rows"]], job.config, figures=map_zoo.figures(options))
    drawn.save_figures(job.out, say=cli.say, **_drawing())  # a run was killed before it drew all
    return found


def _finished(folder: pathlib.Path, expected: Results) -> Content | None:
    """Returns the results in a folder; None where there are none of these settings,
    model, text and version of jmat.
    """
    if not all((folder / name).is_file() for name in MAPS_FILES):
        return None
    try:
        found = read_results(folder)
    except (FileNotFoundError, ValueError):
        return None
    return found if is_same(found, expected) else None


def _ignored(name: str) -> tuple[str, ...]:
    """Returns the fields of --ignore_config that the config.json of a model has."""
    if not FLAGS.ignore_config:
        return ()
    return fields_among(find(name), FLAGS.ignore_config)


def _drawing() -> Keywords:
    return {"figure_format": FLAGS.figure_format, "width": FLAGS.figure_width}


def folder_names(names: Sequence[str]) -> dict[str, str]:
    """Returns the folder of each model: the last part of its name, with a number where
    several have one.

    Raises:
      ValueError: a model is named twice, or a name is empty.
    """
    if not all(name.strip() for name in names):
        raise ValueError("models has an empty name: give names such as gpt2-docs,bert-docs.")
    folders: dict[str, str] = {}
    for name in names:
        if name in folders:
            raise ValueError(f"models has {name!r} twice: name each model once.")
        short = pathlib.Path(name.removeprefix(PREFIX)).name or "model"
        taken, number = set(folders.values()), 2
        folder = short
        while folder in taken:
            folder, number = f"{short}-{number}", number + 1
        folders[name] = folder
    return folders
