"""What scripts make of the code is what they make of this code; pages name rooms, modules and commands that exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATHS = re.compile(r"`((?:[\w.-]+/)+\w+\.py)`")
"""Modules in code spans, such as `nodes/model/patches/reach.py`."""
COMMANDS = re.compile(r"\b(?:bash|python) (?:-m )?((?:scripts/|parallel_backend|benchmarks|tests)[\w./-]*\w)")
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", ".github/PULL_REQUEST_TEMPLATE.md", ".pre-commit-config.yaml")
    ),
    *(page for folder in ("docs", ".github") for page in (ROOT / folder).rglob("*.*") if page.suffix in (".md", ".yml")),
]
INVENTED = "NAME"
"""Stands in a path for a name that the reader chooses."""


def test_the_committed_picture_is_the_one_of_this_code():
    command = [sys.executable, "scripts/architecture_picture.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", ["architecture", "glossary"])
def test_paths_that_a_page_names_exist(page):
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    folders = (ROOT, ROOT / "parallel_backend")
    named = {path for path in PATHS.findall(text) if INVENTED not in path}
    assert named
    assert [path for path in sorted(named) if not any((folder / path).exists() for folder in folders)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_that_a_page_names_exist(page):
    for command in COMMANDS.findall(page.read_text(encoding="utf-8")):
        path = ROOT / (command if command.startswith("scripts/") else command.replace(".", "/"))
        assert any(file.is_file() for file in (path, path.with_suffix(".py"), path / "__main__.py")), command
