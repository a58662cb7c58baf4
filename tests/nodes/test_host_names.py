"""Each name that a ComfyUI defines has a row that says what becomes of it (rows.py), and no row is of another name.

tests/comfyui/test_host_names.py holds the names to the ComfyUI that is there.
"""

import copy
from collections import Counter

import pytest

from parallel_backend.families import FAMILIES
from tests.nodes import rows
from tests.nodes.rows import VERSIONS, without_a_row


@pytest.mark.parametrize("version", VERSIONS)
def test_every_name_has_a_row(version):
    assert without_a_row(VERSIONS[version]) == []


@pytest.mark.parametrize(
    "kind",
    [
        *rows.TABLES,
        *rows.IN_BANDS,
        "conditioning of WAN_Animate2",
        "read by WAN_Animate2",
        "patches of WAN_Animate2",
        "setters",
    ],
)
def test_a_name_of_a_newer_comfyui_fails_by_its_name(kind):
    names = copy.deepcopy(VERSIONS["0.33.0"])
    places = {
        "conditioning of WAN_Animate2": names["conditioning"]["WAN_Animate2"],
        "read by WAN_Animate2": names["native"]["WAN_Animate2"]["options"],
        "patches of WAN_Animate2": names["native"]["WAN_Animate2"]["patches"],
    }
    if kind == "setters":
        names["setters"] |= {"set_something": [], "set_model_something": ["something"]}
        assert without_a_row(names) == ["setters: set_something", "setters: set_model_something"]
        return
    places.get(kind, names.get(kind)).append("something")
    assert without_a_row(names) == [f"{kind}: something"]


def test_no_row_is_of_a_name_that_no_comfyui_has():
    tables = rows.TABLES | rows.IN_BANDS | {"setters": rows.SETTERS}
    names = {kind: {name for version in VERSIONS.values() for name in version.get(kind, ())} for kind in tables}
    assert {kind: set(table) - names[kind] for kind, table in tables.items() if set(table) - names[kind]} == {}
    for family, table in rows.CONDITIONING.items():
        kinds = FAMILIES[family].native_classes
        found = {name for each in VERSIONS.values() for kind in kinds for name in each["conditioning"].get(kind, ())}
        assert set(table) <= found
    assert rows.CONDITIONING.keys() == FAMILIES.keys()
    read = {(option, kind) for each in VERSIONS.values() for kind in rows.KINDS for option in native(each, kind)["options"]}
    assert read == {(option, kind) for option, table in rows.READ.items() for kind in table} | rows.READ_BESIDE.items()


def native(names, kind):
    return names["native"].get(kind, {"options": (), "patches": ()})


def test_rows_by_outcome(measured):
    count = Counter(outcome for _, _, outcome in rows.all_rows())
    assert count.keys() == set(rows.OUTCOMES)
    for outcome, number in count.items():
        measured(f"rows of names that ComfyUI defines, {outcome}", number)
    measured("rows of ComfyUI's samplers and guidance in bands", sum(map(len, rows.IN_BANDS.values())))
