"""The rooms of the library import one another in one direction."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
# Each room may import those before it.
ROOMS = ("runtime", "metrics", "data", "models", "forward", "checkpoint", "capture", "maps", "training", "decode",
         "report", "studies")  # fmt: skip


def imported(path: pathlib.Path) -> set[str]:
    """Returns the modules that a file imports, wherever in it the import stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def files(room: str) -> list[pathlib.Path]:
    folder = ROOT / "jmat" / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def test_every_module_stands_in_a_room():
    inside = {
        path.relative_to(ROOT / "jmat").parts[0].removesuffix(".py")
        for path in (ROOT / "jmat").rglob("*.py")
    }
    assert inside == {*ROOMS, "__init__"}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_those_below_it(room):
    above = {"experiments", "tests", *(f"jmat.{other}" for other in ROOMS[ROOMS.index(room) + 1 :])}
    for path in files(room):
        found = {
            name
            for name in imported(path)
            if any(name == up or name.startswith(f"{up}.") for up in above)
        }
        assert not found, f"{path.relative_to(ROOT)} imports {', '.join(sorted(found))}"
        assert "jmat" not in imported(path), f"{path.relative_to(ROOT)} imports the whole library"


def test_what_only_some_may_import():
    may = {"absl": (), "torch": ("checkpoint", "studies"), "matplotlib": ("report", "studies")}
    for module, rooms in may.items():
        for path in sorted((ROOT / "jmat").rglob("*.py")):
            room = path.relative_to(ROOT / "jmat").parts[0]
            found = {
                name for name in imported(path) if name == module or name.startswith(f"{module}.")
            }
            assert not found or room in rooms, (
                f"{path.relative_to(ROOT)} imports {', '.join(sorted(found))}"
            )


def test_reports_touch_no_model():
    for path in files("report"):
        assert not {
            name
            for name in imported(path)
            if name.startswith(("jmat.forward", "jmat.capture", "jmat.models"))
        }
