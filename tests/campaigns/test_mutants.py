"""The mutants are of today's code, and what is said of one is true."""

import ast
import subprocess

import pytest

from tests.campaigns.mutants.mutant import Mutant
from tests.campaigns.mutants.table import MUTANTS
from tests.campaigns.mutants.trial import REPOSITORY, copy_of, try_out


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
    assert len(names) == len(set(names))
    assert not any("," in name for name in names)  # --only
    rooms = {path.parent.name for path in (REPOSITORY / "parallel_backend").glob("*/__init__.py")} - {"quickstart"}
    assert {mutant.room for mutant in MUTANTS} >= {f"parallel_backend/{room}" for room in rooms}
    assert {mutant.room for mutant in MUTANTS} >= {"nodes/model", "nodes/sampling", "nodes/ui"}


@pytest.mark.slow
def test_a_mutant_lives_unless_a_test_notices_it_that_passes_without_it(tmp_path):
    """A repository with a product of two functions, of which one is tested, and a test that always fails."""
    files = {
        "product.py": "def add(a, b):\n    return a + b\n\n\ndef twice(a):\n    return 2 * a\n",
        "test_product.py": "import product\n\n\ndef test_add():\n    assert product.add(1, 2) == 3\n",
        "test_broken.py": "def test_broken():\n    raise AssertionError\n",
        "pytest.ini": "[pytest]\npythonpath = .\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    tests = ("test_broken.py", "test_product.py")
    with copy_of(tmp_path) as folder:
        seen = try_out(folder, Mutant("a", "product.py", "a + b", "a - b", tests), ("quick",))
        assert (seen.caught_by, seen.test) == ("quick", "test_product.py::test_add")
        assert try_out(folder, Mutant("b", "product.py", "2 * a", "3 * a", tests), ("quick",)).caught_by is None
        assert {path.name: path.read_text() for path in folder.iterdir() if path.is_file()} == files
