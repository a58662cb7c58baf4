"""Pages and pictures that scripts make of the code are those of the code that is here, and name files that exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import architecture_picture, module_list

ROOT = Path(__file__).resolve().parents[2]
PATHS = re.compile(r"`((?:[\w.-]+/)+\w+\.py)`")
"""Modules in code spans, such as `nodes/model/reach.py`."""
INVENTED = "NAME"
"""Stands in a path for a name that the reader chooses."""


@pytest.mark.parametrize("script", ["architecture_picture.py", "module_list.py"])
def test_the_committed_page_is_the_one_of_this_code(script):
    command = [sys.executable, f"scripts/{script}", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("made", [(architecture_picture, "PICTURE"), (module_list, "PAGE")], ids=lambda made: made[1])
def test_a_stale_page_is_named_with_the_command_that_makes_it(made, tmp_path, monkeypatch):
    module, constant = made
    stale = tmp_path / "docs" / "page"
    stale.parent.mkdir()
    stale.write_text(getattr(module, constant).read_text(encoding="utf-8") + "x", encoding="utf-8")
    monkeypatch.setattr(module, constant, stale)
    monkeypatch.setattr(sys, "argv", ["script", "--check"])
    with pytest.raises(SystemExit, match=rf"run python scripts/{module.__name__.split('.')[-1]}\.py"):
        module.main()
    monkeypatch.setattr(sys, "argv", ["script"])
    module.main()
    monkeypatch.setattr(sys, "argv", ["script", "--check"])
    module.main()


def test_the_picture_has_every_room_and_every_import_is_an_arrow_or_named_in_a_box():
    edges = architecture_picture.imports_between_rooms()
    arrows = architecture_picture.without_implied(edges)
    rooms = [room for floor in architecture_picture.floors() for room in floor]
    assert {room for edge in edges for room in edge} <= set(rooms)
    assert {path.parent.name for path in (ROOT / "parallel_backend").glob("*/__init__.py")} | {"nodes"} == set(rooms)
    for room in rooms:
        assert architecture_picture.reached(room, arrows) == architecture_picture.reached(room, edges)
    text = architecture_picture.picture()
    assert text.count("marker-end") == len(arrows) + 1  # and the messages between the towers


@pytest.mark.parametrize("page", ["architecture", "walks", "glossary"])
def test_paths_that_a_page_names_exist(page):
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    folders = (ROOT, ROOT / "parallel_backend")
    named = {path for path in PATHS.findall(text) if INVENTED not in path}
    assert named
    assert [path for path in sorted(named) if not any((folder / path).exists() for folder in folders)] == []
