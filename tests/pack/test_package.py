"""What the registry asks of a pack, and what a user's copy contains."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from scripts.comfyui_server import PACK
from tests.support.package_files import packaged


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((PACK / "pyproject.toml").read_text())


def test_the_package_is_what_a_user_needs():
    files = packaged()
    folders = {path.parts[0] for path in files if len(path.parts) > 1}
    assert folders == {"docs", "locales", "nodes", "parallel_backend", "web", "workflows"}
    needed = ("__init__.py", "requirements.txt", "pyproject.toml", "README.md", "LICENSE", "icon.svg")
    assert {Path(name) for name in needed} <= set(files)
    assert Path("parallel_backend/quickstart/quickstart-digits.safetensors") in files
    assert not [path for path in files if "api" in path.parts]
    size = sum((PACK / path).stat().st_size for path in files)
    assert size < 20e6


def test_the_registrys_fields(project):
    comfy = project["tool"]["comfy"]
    assert re.fullmatch(r"[a-z][a-z0-9-]{1,98}", project["project"]["name"])
    assert "comfyui" not in project["project"]["name"].lower()
    assert re.fullmatch(r"\d+\.\d+\.\d+", project["project"]["version"])
    assert comfy["PublisherId"]
    assert comfy["DisplayName"] == "Parallel DiT"
    assert comfy["requires-comfyui"]
    assert {line.partition(" :: ")[0] for line in project["project"]["classifiers"]} == {"Operating System", "Environment"}
    icon = (PACK / comfy["Icon"].rsplit("/", 1)[-1]).read_text()  # a URL of this file, once there is a public address
    assert 'width="400" height="400"' in icon  # the registry's largest


def test_requirements_are_loose_and_bring_no_torch(project):
    lines = (PACK / "requirements.txt").read_text().split("\n")
    required = [line for line in lines if line]
    assert sorted(required) == sorted(project["project"]["dependencies"])
    names = {re.match(r"[\w-]+", line).group() for line in required}
    assert not names & {"torch", "torchvision", "torchaudio", "flash-attn", "numpy<2"}
    assert not [line for line in required if "==" in line]


def test_pip_installs_the_backend_alone(project):
    """ComfyUI imports the nodes from the pack's folder; tests and benchmarks need the repository."""
    setup = project["tool"]["setuptools"]
    assert setup["packages"]["find"]["include"] == ["parallel_backend*"]
    endings = {Path(pattern).suffix for pattern in setup["package-data"]["*"]}
    assert {path.suffix for path in packaged() if path.parts[0] == "parallel_backend"} == endings | {".py"}


@pytest.mark.parametrize("folder", ["benchmarks", "scripts", "testing", "nodes", "parallel_backend"])
def test_only_tests_import_tests(folder):
    """What benchmarks and scripts share with the tests is in testing/."""
    named = set()
    for path in (PACK / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and not node.level:
                named.add((node.module.partition(".")[0], path))
            elif isinstance(node, ast.Import):
                named |= {(name.name.partition(".")[0], path) for name in node.names}
            elif isinstance(node, ast.Constant) and node.value == "tests":  # a part of a path
                named.add(("tests", path))
    assert [path for top, path in named if top == "tests"] == []
    assert named
