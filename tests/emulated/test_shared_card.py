"""Two ranks on one card, which talk by Gloo, by way of host memory."""

import functools
from collections.abc import Iterator

import pytest

from tests.campaigns.transport.cases import Case, Files, all_of_them
from tests.support.cpu_and_gpu import Both, both_kinds
from tests.support.fake_cuda import ADA

pytestmark = pytest.mark.threads

CASES = "product pipe2", "product ulysses2", "VAE bands on 2"


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    with both_kinds(ADA, devices=lambda world: ("cuda:0",) * world, nccl=False) as made:
        yield made


@pytest.mark.parametrize("case", [case for case in all_of_them() if case.name in CASES], ids=lambda case: case.name)
def test_two_ranks_on_one_card(both: Both, files: Files, case: Case):
    both.check(functools.partial(case.run, files))
