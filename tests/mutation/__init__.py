"""Small wrong changes, and the script that counts how many of them the tests notice."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Change:
    """One small wrong change of one file."""

    file: str  # path from the root of the tree
    old: str  # text that occurs exactly once in the file
    new: str  # the text that takes its place
    words: str  # describes the fault in a few words
    # test files that should notice, e.g. "test_r2.py test_jumps.py"; "": all of them
    tests: str = ""
