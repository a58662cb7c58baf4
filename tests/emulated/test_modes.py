"""Every mode, product and family, transfers, Cancel, other models: emulated devices give what CPU ranks give.

The cases are those of the strict transport (tests/campaigns/transport/cases.py), whose rules NCCL holds them to here too.
"""

import functools

import pytest

from testing.cases import all_cases
from tests.campaigns.transport.cases import Case, all_of_them, family

pytestmark = pytest.mark.threads

QUICK = ("product ring2", "product patch2", "product pipe2-ulysses2")
DEFAULT = "product tensor2", "product batch2", "transfers in fp8", "naive patches", "transfers of changes", "cancel patch2"
"""Each kind of transfer and of group; what is left is the same transfers in other products."""
QUICK_FAMILIES = ("wan-animate-2",)
DEFAULT_FAMILIES = ("qwen-image-2.1",)
"""Whole text. Others make the same transfers as one of these, and the strict transport has all of them."""


def tier(name: str, quick: tuple[str, ...], default: tuple[str, ...]) -> list[pytest.MarkDecorator]:
    return [] if name in quick else [pytest.mark.slow] if name in default else [pytest.mark.slow, pytest.mark.full]


def of_modes() -> list[pytest.param]:
    made = [case for case in all_of_them() if not case.name.startswith("family ")]
    assert {*QUICK, *DEFAULT} <= {case.name for case in made}
    return [pytest.param(case, id=case.name, marks=tier(case.name, QUICK, DEFAULT)) for case in made]


def of_families() -> list[pytest.param]:
    made = all_cases()
    assert {*QUICK_FAMILIES, *DEFAULT_FAMILIES} <= {case.name for case in made}
    return [
        pytest.param(family(case), id=case.name, marks=tier(case.name, QUICK_FAMILIES, DEFAULT_FAMILIES)) for case in made
    ]


@pytest.mark.parametrize("case", [*of_modes(), *of_families()])
def test_devices_give_what_cpu_ranks_give(both, files, case: Case):
    both.check(functools.partial(case.run, files))
