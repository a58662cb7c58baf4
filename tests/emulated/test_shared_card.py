"""Two ranks on one card, which talk by Gloo, by way of host memory."""

import functools
from collections.abc import Iterator

import pytest

from tests.campaigns.transport.cases import Case, Files, all_of_them
from tests.support.cpu_and_gpu import Both, both_kinds
from tests.support.fake_cuda import ADA

pytestmark = pytest.mark.threads

QUICK = ("product pipe2", "product ulysses2")
DEFAULT = ("product tensor2", "VAE bands on 2")
FULL = (
    *("product patch2", "transfers in int8", "pipe2 beside pipe2", "product ring2", "product batch2"),
    *("transfers of changes", "cancel pipe2", "naive patches"),
)


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    with both_kinds(ADA, devices=lambda world: ("cuda:0",) * world, nccl=False) as made:
        yield made


def of_shared() -> Iterator[pytest.param]:
    for case in all_of_them():
        if case.name in (*QUICK, *DEFAULT, *FULL):
            marks = [pytest.mark.slow] * (case.name not in QUICK) + [pytest.mark.full] * (case.name in FULL)
            yield pytest.param(case, id=case.name, marks=marks)


@pytest.mark.parametrize("case", of_shared())
def test_two_ranks_on_one_card(both: Both, files: Files, case: Case):
    both.check(functools.partial(case.run, files))
