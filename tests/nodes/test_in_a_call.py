"""What becomes of the entries of a model call's transformer_options is what its row says."""

import pytest

from tests.nodes import rows
from tests.nodes.rows import PASSED, REFUSED, every, sample_function

OF_NODES = {
    "patches": {"double_block": [sample_function]},
    "patches_replace": {"dit": {("double_block", 0): sample_function}},
    "optimized_attention_override": sample_function,
}
"""Entries with nodes' functions."""


def told(module, options, ours=()):
    return module("model.patches.reach").told_to_own_class(options, ours)


@every(rows.OPTIONS)
def test_entries_of_transformer_options(module, name, outcome):
    if outcome == REFUSED:
        with pytest.raises(ValueError, match=r"^model: .*(double_block|dit|attention kernel)"):
            told(module, {name: OF_NODES[name]})
    else:
        assert told(module, {name: 0.5}) == ({name: 0.5} if outcome == PASSED else {})


def test_an_entry_that_no_rank_can_read_is_refused_by_its_name(module):
    with pytest.raises(ValueError, match=r"^model: .*of_a_newer_comfyui"):
        told(module, {"of_a_newer_comfyui": sample_function})


def test_entries_of_this_pack_are_sent_if_the_class_takes_them(module):
    assert told(module, {"parallel_dit_one": 1, "parallel_dit_other": 2}, ("parallel_dit_one",)) == {"parallel_dit_one": 1}


@every(rows.PATCHES)
def test_patches(module, name, outcome):
    assert outcome == REFUSED
    with pytest.raises(ValueError, match=f"^model: .*'{name}'"):
        told(module, {"patches": {name: [sample_function]}})


@every(rows.REPLACEMENTS)
def test_replacements(module, name, outcome):
    assert outcome == REFUSED
    with pytest.raises(ValueError, match=f"^model: .*'{name}'"):
        told(module, {"patches_replace": {name: {("double_block", 0): sample_function}}})
