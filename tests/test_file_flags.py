"""Flags that name files take names with commas, lists, and repetitions."""

import pytest
from absl import flags

from experiments.file_flags import files_flag


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ([], []),
        (["--text="], []),
        (["--text=a.txt, b.txt"], ["a.txt", "b.txt"]),
        (["--text=one, and two.txt"], ["one, and two.txt"]),
        (["--text=one, and two.txt", "--text=a.txt,b.txt"], ["one, and two.txt", "a.txt", "b.txt"]),
        (['--text="one, and two.txt",a.txt'], ["one, and two.txt", "a.txt"]),
    ],
)
def test_names_of_files(given, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one, and two.txt").touch()
    values = flags.FlagValues()
    flags.DEFINE_flag(files_flag("text", "Files."), values)
    values(["script", *given])
    assert values.text == names
