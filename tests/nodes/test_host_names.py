"""Each name that a ComfyUI defines has a row that says what becomes of it (rows.py), and no row is of another name.

tests/comfyui/test_host_names.py holds the names to the ComfyUI that is there.
"""

import pytest

from tests.nodes import rows
from tests.nodes.rows import VERSIONS, without_a_row


@pytest.mark.parametrize("version", VERSIONS)
def test_every_name_has_a_row(version):
    assert without_a_row(VERSIONS[version]) == []


def test_no_row_is_of_a_name_that_no_comfyui_has():
    tables = rows.TABLES | {"samplers": rows.SAMPLERS_IN_BANDS, "setters": rows.SETTERS}
    names = {kind: {name for version in VERSIONS.values() for name in version.get(kind, ())} for kind in tables}
    assert {kind: set(table) - names[kind] for kind, table in tables.items() if set(table) - names[kind]} == {}
