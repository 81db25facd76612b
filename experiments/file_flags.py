"""Defines flags for several files, whose names may hold commas."""

import pathlib
from collections.abc import Iterable

from absl import flags

flags.disclaim_key_flags()  # they belong to the script that defines them


class _FileNames(flags.ListParser):
    """Parses names with commas between them; an argument that is the name of a file is
    one name, commas and all.
    """

    def parse(self, argument: str | list[str]) -> list[str]:
        """Returns the names."""
        if isinstance(argument, str) and "," in argument and pathlib.Path(argument).exists():
            return [argument]
        return super().parse(argument)


class _FilesFlag(flags.MultiFlag):
    """Joins the names of all occurrences of a flag in one list."""

    def _parse(self, arguments: str | Iterable[str]) -> list[str]:
        given = [arguments] if isinstance(arguments, str) else [list(arguments)]
        return [name for names in super()._parse(given) for name in names]


def files_flag(name: str, help: str) -> flags.Flag:
    """Returns a flag for files, by default none: `--text=a.txt,b.txt`, or the flag once
    for each file.

    A single name may have commas in it, if there is such a file.
    """
    return _FilesFlag(_FileNames(), flags.CsvListSerializer(","), name, [], help)


def define_files(name: str, help: str) -> flags.FlagHolder[list[str]]:
    """Defines a `files_flag` of the script that calls this."""
    return flags.DEFINE_flag(files_flag(name, help))
