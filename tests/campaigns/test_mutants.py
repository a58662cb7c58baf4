"""The mutants are of today's code, and what is said of one is true."""

import ast
import subprocess

import pytest

from tests.campaigns.mutants.mutant import Mutant
from tests.campaigns.mutants.runner import REPOSITORY, Runner
from tests.campaigns.mutants.table import MUTANTS
from tests.campaigns.mutants.trial import Verdict, confirmed, copy_of, try_out


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_is_another_program(mutant):
    text = (REPOSITORY / mutant.file).read_text()
    program = (lambda source: ast.dump(ast.parse(source))) if mutant.file.endswith(".py") else str.split
    assert program(mutant.applied(text)) != program(text)
    assert mutant.tier in ("quick", "default")
    paths = [argument for argument in (*mutant.tests, *mutant.wider) if argument.startswith("tests/")]
    assert mutant.tests[0] in paths
    assert all((REPOSITORY / path).exists() for path in paths)


def test_names_are_their_own_and_every_room_has_some():
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names)) >= 44
    assert not any("," in name for name in names)  # --only
    rooms = {path.parent.name for path in (REPOSITORY / "parallel_backend").glob("*/__init__.py")} - {"quickstart"}
    assert {mutant.room for mutant in MUTANTS} >= {f"parallel_backend/{room}" for room in rooms}
    assert {mutant.room for mutant in MUTANTS} >= {"nodes/model", "nodes/sampling", "nodes/ui"}


@pytest.mark.parametrize("old", ["no such text", "return"])
def test_a_text_that_is_not_there_once_is_an_error(old):
    mutant = Mutant("a", "product.py", old, "pass", ("tests",))
    with pytest.raises(ValueError, match="mutant 'a'"):
        mutant.applied("def one():\n    return 1\n\n\ndef two():\n    return 2\n")


@pytest.fixture(scope="module")
def runner():
    with Runner(imports=()) as runner:
        yield runner


@pytest.fixture
def copy(tmp_path):
    """Of a repository with a product of two functions, of which one is tested, and a test that always fails."""
    files = {
        "product.py": "def add(a, b):\n    return a + b\n\n\ndef twice(a):\n    return 2 * a\n",
        "test_product.py": "import product\n\n\ndef test_add():\n    assert product.add(1, 2) == 3\n",
        "test_broken.py": "def test_broken():\n    raise AssertionError\n",
        "pytest.ini": "[pytest]\npythonpath = .\n",
        ".gitignore": "ignored.py\n",
        "ignored.py": "",
    }
    repository = tmp_path / "repository"
    repository.mkdir()
    for name, text in files.items():
        (repository / name).write_text(text)
    subprocess.run(["git", "init", "-q", repository], check=True)
    with copy_of(repository) as folder:
        yield folder
        assert {path.name for path in folder.iterdir()} >= files.keys() - {"ignored.py"}
        assert not (folder / "ignored.py").exists()
        assert all((folder / name).read_text() == text for name, text in files.items() if name != "ignored.py")


def test_one_that_a_test_sees_is_caught(runner, copy):
    mutant = Mutant("a", "product.py", "a + b", "a - b", ("test_product.py",))
    found = [try_out(runner, copy, mutant, ("quick", "default"))]
    assert (found[0].caught_by, found[0].test) == ("quick", "test_product.py::test_add")
    assert confirmed(runner, copy, found, ("quick", "default")) == found


def test_one_that_no_test_sees_lives_whatever_fails_without_it(runner, copy):
    mutant = Mutant("a", "product.py", "2 * a", "3 * a", ("test_product.py", "test_broken.py"))
    found = try_out(runner, copy, mutant, ("quick",))
    assert (found.caught_by, found.test) == ("quick", "test_broken.py::test_broken")
    (after,) = confirmed(runner, copy, [found], ("quick",))
    assert (after.caught_by, after.test) == (None, "")


def test_one_that_is_caught_late_is_not_as_expected():
    mutant = Mutant("a", "product.py", "2 * a", "3 * a", ("tests",))
    assert Verdict(mutant, "quick", "test", 1.0).as_expected
    assert not Verdict(mutant, "default", "test", 1.0).as_expected
    assert not Verdict(mutant, None, "", 1.0).as_expected
