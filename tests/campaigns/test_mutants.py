"""The mutants are of today's code, and what is said of one is true."""

import ast

import pytest

from tests.campaigns.mutants.table import MUTANTS
from tests.campaigns.mutants.trial import REPOSITORY


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
