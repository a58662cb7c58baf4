"""What becomes of a model call's conditioning, and of the entries of its transformer_options, is what its row says."""

import pytest

from parallel_backend.families import FAMILIES
from tests.nodes import rows
from tests.nodes.calls import passes, refuses, with_
from tests.nodes.rows import COMPUTED, HARMLESS, KINDS, PASSED, REFUSED, VERSIONS, every


def unread(module, family, name, value):
    """What of transformer_options is refused."""
    return list(module("model.patches.reach").unread({name: value}, family))


VALUES = {
    "rope_options": {"scale_x": 2.0},
    "patches": {"double_block": [print]},
    "patches_replace": {"dit": {("double_block", 0): print}},
}
"""Of entries that not every value changes anything for."""


@every(rows.OPTIONS)
def test_entries_of_transformer_options(module, name, outcome):
    for kind, family in KINDS.items():
        expected = rows.READ.get(name, {}).get(kind, outcome)
        refused = unread(module, family, name, VALUES.get(name, {"a": [print]}))
        assert bool(refused) == (expected == REFUSED), kind
        assert all(name in each.described() or name in NAMED_OTHERWISE for each in refused)


NAMED_OTHERWISE = ("patches", "patches_replace", "optimized_attention_override")


def test_the_table_of_readers_has_the_native_models_that_read_an_entry(module):
    found = module("model.patches.reach").READ_BY
    expected = {name: {kind for kind, outcome in table.items() if outcome != HARMLESS} for name, table in rows.READ.items()}
    assert {name: set(kinds) for name, kinds in found.items() if kinds} == {
        name: kinds for name, kinds in expected.items() if kinds
    }


def test_an_unknown_entry_is_refused_by_its_name(module):
    (refused,) = unread(module, FAMILIES["qwen-image-2.1"], "of_a_newer_comfyui", 1)
    assert "of_a_newer_comfyui" in refused.described()


def remaining(module, family, table, name):
    """The functions of a node that the native model runs, and that are refused."""
    key = name if table == "patches" else ("double_block", 0)
    functions = [sample_function] if table == "patches" else {name: {key: sample_function}}
    options = {table: {name: functions} if table == "patches" else functions}
    config = next(with_(family, ""))[0]
    _, left = module("model.patches.block_patches").block_changes(family, config, options, 1, "auto")
    return [each for entry, value in left.items() for each in unread(module, family, entry, value)]


def sample_function(*_arguments):
    """What a node has put there."""


@every(rows.PATCHES)
def test_patches(module, name, outcome):
    natives = [version["native"] for version in VERSIONS.values()]
    run_by = {kind for kind in KINDS for native in natives if name in native.get(kind, {"patches": ()})["patches"]}
    assert bool(run_by) == (outcome == REFUSED)
    for kind, family in KINDS.items():
        refused = remaining(module, family, "patches", name)
        assert bool(refused) == (kind in run_by), kind
        assert all(f"'{name}'" in each.described() for each in refused)


@every(rows.REPLACEMENTS)
def test_replacements(module, name, outcome):
    assert outcome == REFUSED
    for family in FAMILIES.values():
        (refused,) = remaining(module, family, "patches_replace", name)
        assert f"'{name}'" in refused.described()


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_conditioning(module, family):
    reach = module("model.patches.reach")
    for name, outcome in (rows.CONDITIONING[family.name] | rows.ALWAYS).items():
        known = name in family.inputs.accepts
        if name == "c_crossattn":
            assert passes(family, "context")
            continue
        if not known:
            assert outcome in (REFUSED, COMPUTED) if name not in reach.HARMLESS else outcome == HARMLESS
            refusing(reach, family, name)
        elif refuses(family, name):
            assert outcome == REFUSED, name
        else:
            assert (outcome == PASSED) == passes(family, name), name
            assert outcome != REFUSED


def refusing(reach, family, name):
    """An argument that the family does not know is refused by its name, but for harmless ones."""
    if name in reach.HARMLESS:
        reach.refuse_what_does_not_reach_the_ranks({}, [name], family)
        return
    with pytest.raises(ValueError, match=f"'{name}' conditioning"):
        reach.refuse_what_does_not_reach_the_ranks({}, [name], family)
