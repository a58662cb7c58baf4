"""Every mode and product, transfers, Cancel, other models: emulated devices give what CPU ranks give.

The cases are those of the strict transport (tests/campaigns/transport/cases.py), whose rules NCCL holds them to here too.
"""

import functools

import pytest

from tests.campaigns.transport.cases import Case, all_of_them

pytestmark = pytest.mark.threads

QUICK = ("product ring2", "product patch2", "product pipe2-ulysses2")
DEFAULT = (
    *("product tensor2", "product batch2", "transfers in fp8", "naive patches", "transfers of changes", "cancel patch2"),
    "VAE bands on 2",
)
"""Each kind of transfer and of group; what is left is the same transfers in other products."""


def tier(name: str) -> list[pytest.MarkDecorator]:
    return [] if name in QUICK else [pytest.mark.slow] if name in DEFAULT else [pytest.mark.slow, pytest.mark.full]


def of_modes() -> list[pytest.param]:
    made = list(all_of_them())
    assert {*QUICK, *DEFAULT} <= {case.name for case in made}
    return [pytest.param(case, id=case.name, marks=tier(case.name)) for case in made]


@pytest.mark.parametrize("case", of_modes())
def test_devices_give_what_cpu_ranks_give(both, files, case: Case):
    both.check(functools.partial(case.run, files))
