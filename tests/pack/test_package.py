"""What the registry asks of a pack, and what a user's copy contains."""

import ast
import re
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from unittest import mock

import pytest
from packaging.requirements import Requirement

from scripts.comfyui_server import PACK
from scripts.requirements import constraints, installed
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
    icon = (PACK / comfy["Icon"]).read_text()
    assert 'width="400" height="400"' in icon  # the registry's largest


def test_requirements_are_loose_and_bring_no_torch(project):
    lines = (PACK / "requirements.txt").read_text().split("\n")
    required = [line for line in lines if line]
    assert sorted(required) == sorted(project["project"]["dependencies"])
    names = {re.match(r"[\w-]+", line).group() for line in required}
    assert not names & {"torch", "torchvision", "torchaudio", "flash-attn", "numpy<2"}
    assert not [line for line in required if "==" in line]


def requirements(project) -> list[str]:
    """The pack's own and those of all extras."""
    own = project["project"]
    return [*own["dependencies"], *(line for extra in own["optional-dependencies"].values() for line in extra)]


def test_what_the_pack_requires_has_bounds(project):
    unbound = [line for line in project["project"]["dependencies"] if not re.fullmatch(r"[\w-]+>=[\d.]+,<[\d.]+", line)]
    assert unbound == []


def test_constraints_name_what_the_tests_install_in_versions_that_are_allowed(project):
    allowed = {each.name: each.specifier for each in map(Requirement, requirements(project)) if each.name != "torch"}
    assert constraints().keys() == allowed.keys()
    assert [name for name, version in constraints().items() if version not in allowed[name]] == []


def test_what_a_script_has_to_install(monkeypatch):
    versions = {"diffusers": "0.42.1", "numpy": "1.24.0", "einops": "0.8.1"}
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    assert installed("diffusers>=0.38,<0.43", None)
    assert not installed("numpy>=1.25,<3", None)
    assert installed("einops>=0.7,<1", None)
    assert not installed("einops>=0.7,<1", "0.8.2")
    monkeypatch.setattr("importlib.metadata.version", mock.Mock(side_effect=PackageNotFoundError))
    assert not installed("einops>=0.7,<1", None)


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


def test_no_code_is_made_from_text_and_nothing_installs_itself(project):
    assert {"S102", "S307"} <= set(project["tool"]["ruff"]["lint"]["select"])
    for path in packaged():
        if path.suffix == ".py":
            assert not re.search(r"\bsubprocess\b|\bos\.system\b", (PACK / path).read_text()), path
