"""transformers is imported without its warning that torch is missing, and its settings
stay the user's.
"""

import os
import sys

import pytest

from jmat.runtime.transformers_package import transformers_package

NAME = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


@pytest.mark.parametrize("before", [None, "", "0"])
def test_the_warning_is_held_back_during_the_import_alone(before, tmp_path, monkeypatch):
    (tmp_path / "transformers.py").write_text(f"import os\nseen = os.environ.get({NAME!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    monkeypatch.delenv(NAME, raising=False)
    if before is not None:
        monkeypatch.setenv(NAME, before)
    assert transformers_package().seen == "1"
    assert os.environ.get(NAME) == before
    del sys.modules["transformers"]  # the fake; what was there comes back


def test_it_is_the_package():
    import transformers

    assert transformers_package() is transformers
