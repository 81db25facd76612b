"""Defines flags for a number of sentences, or all that there are."""

from absl import flags

flags.disclaim_key_flags()  # they belong to the module that defines them

ALL = "all"


class _Count(flags.ArgumentParser):
    """Parses a whole number above 0, or `all`."""

    syntactic_help = "a whole number above 0, or all"

    def parse(self, argument: int | str) -> int | str:
        """Returns the number, or `all`."""
        if argument == ALL:
            return ALL
        try:
            count = int(argument)
        except ValueError:
            count = 0
        if count < 1:
            raise ValueError(f"expected {self.syntactic_help}")
        return count

    def flag_type(self) -> str:
        """Returns how help names the values."""
        return "number|all"


def define_count(name: str, default: int, help: str) -> flags.FlagHolder[int | str]:
    """Defines a flag of the module that calls this."""
    return flags.DEFINE(_Count(), name, default, help, serializer=flags.ArgumentSerializer())
