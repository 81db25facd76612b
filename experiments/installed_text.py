"""Makes text files of sentences out of installed packages: other domains and languages.

    python -m experiments.installed_text --out=texts
    python -m experiments.cross_corpus --corpora=docs,texts/novels.txt,texts/manual-de.txt

Packages of Debian and its kin install novels, glosses, a dictionary, sayings, licences,
and manual pages in several languages. Each that is there becomes a file of sentences,
one a line, which --corpus and --corpora take. Those that are missing are listed with
the package that installs them; --root reads a folder into which packages were unpacked
(`dpkg -x FILE.deb ROOT`) in place of the machine's own. Nothing is run, and nothing is
downloaded. The texts belong to their authors: share the script, not the files. Some
seconds a text, most for English manual pages.
"""

import functools
import pathlib
from collections.abc import Sequence

from absl import flags

from experiments import cli
from jmat.data.installed import TEXTS, installed_sentences
from jmat.runtime.checks import chosen
from jmat.runtime.files import save_atomically
from jmat.runtime.folders import output_path

flags.DEFINE_list("texts", list(TEXTS), f"Texts to make, of {', '.join(TEXTS)}.")
flags.DEFINE_string("root", "/", "Folder below which the packages are installed, or unpacked.")
flags.DEFINE_string("out", "texts", "Folder for the text files.")
flags.DEFINE_bool(
    "overwrite", False, "Replace what a run with other flags left in --out, once there is text."
)
FLAGS = flags.FLAGS


def main(argv: list[str]) -> None:
    """Makes the files."""
    del argv
    names, root = chosen("texts", FLAGS.texts, list(TEXTS)), pathlib.Path(FLAGS.root).expanduser()
    if not root.is_dir():
        raise ValueError(f"--root={FLAGS.root} is no folder: name one with usr/share below it.")
    out = output_path(FLAGS.out)
    claim = cli.claim_folder(
        out,
        "installed_text",
        cli.own_flags(),
        writes=[f"{name}.txt" for name in names],
        reads=("root",),
        overwrite=FLAGS.overwrite,
    )
    missing = []
    for name in names:
        cli.say(f"reading {TEXTS[name].words}")
        sentences = installed_sentences(name, root)
        if not sentences:
            missing.append(name)
            continue
        path = claim.path(f"{name}.txt")
        save_atomically(path, functools.partial(_write, sentences))
        print(f"{path}: {len(sentences):,} sentences, {TEXTS[name].words}")
    packages = ", ".join(f"{name} ({TEXTS[name].package})" for name in missing)
    if len(missing) == len(names):
        raise ValueError(
            f"none of these texts is installed below {root}: {packages}. Install the packages in "
            "brackets, or unpack them into a folder and give --root."
        )
    if missing:
        print(f"not installed, with the package of each: {packages}")


def _write(sentences: Sequence[str], path: pathlib.Path) -> None:
    path.write_text("\n".join(sentences) + "\n", "utf-8")


if __name__ == "__main__":
    cli.run(main)
