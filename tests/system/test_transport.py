"""The product on a transport with NCCL's rules: nothing hangs, no rule is broken, and the result is Gloo's bit for bit."""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.client.call import ModelCall
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.core.communicators import communicators, connections
from parallel_backend.core.degrees import Degrees
from parallel_backend.rank.attention import ulysses
from parallel_backend.rank.comm import collectives
from parallel_backend.rank.comm.stage_link import StageLink
from parallel_backend.rank.stage import tensor_parallel
from testing import mini
from tests.campaigns.transport import cases
from tests.campaigns.transport.cases import Case, all_of_them, product
from tests.campaigns.transport.runner import RULES, Trials, rules_of, same, trials

pytestmark = pytest.mark.threads

DELAY = 0.001
QUICK = [
    product(Degrees(pipe=2)),
    product(Degrees(pipe=2, ulysses=2)),
    product(Degrees(ring=2, tensor=2)),
    product(Degrees(patch=2, ulysses=2, patch_mode="displaced")),
    cases.vae(2),
    cases.two_models(Degrees(patch=2, patch_mode="displaced"), Degrees(pipe=2)),
    cases.cancelled(Degrees(pipe=2)),
]
QUICK_NAMES = {case.name for case in QUICK}
ANY_ORDER = ("cancel ", "given up ", "two calls at once ", "unload and load pipe2")
"""Beginnings of names, beside products on two ranks and `two_models`: what starts or ends in the middle of something
else, of which the order of operations decides."""
TWO = {product(degrees).name for degrees in cases.PRODUCTS if degrees.world == 2}
KILLED = (Degrees(pipe=2), Degrees(ulysses=2))
WITH_GLOO = [
    *(degrees for degrees in cases.PRODUCTS if degrees.world == 2),
    *(Degrees(tensor=4), Degrees(ulysses=4), Degrees(pipe=2, ulysses=2), Degrees(ring=2, tensor=2)),
]
"""Each axis, groups of four, and two products, whose groups are those of their axes. That every pair of axes is exact on
Gloo is seen in test_exactness.py."""


@pytest.fixture(scope="module")
def at_work(thread_pools, tmp_path_factory) -> Iterator[Trials]:
    """Within the session's own threads, so that it ends before them."""
    with trials(tmp_path_factory.mktemp("transport")) as made:
        yield made


both = pytest.mark.parametrize("places", list(RULES), ids=lambda places: f"K={places}")


ENOUGH = 2
"""Communicators of a rank that have a transfer under way at once, at most: with so many places nothing can hang for want of
one, in whatever order they are given."""


def check(at_work: Trials, case: Case, places: int, *seeds: int) -> None:
    assert at_work.trials(case, [rules_of(places, seed, DELAY) for seed in seeds]) == [None] * len(seeds)
    assert 1 <= at_work.most_under_way <= ENOUGH


@both
@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_modes(at_work, case, places):
    check(at_work, case, places, 1)


FAMILIES_APART = ("wan-animate-2", "qwen-image-2.1")
"""A video alone, and whole text. All others make the same transfers as one of these."""


def everything() -> Iterator[pytest.param]:
    """Families, products at four ranks and what else differs in which transfers are made need one order, which shows those:
    the other is left to the full tier, and so are families that are like another one."""
    for case in all_of_them():
        for places in RULES:
            ordered = case.name.startswith(ANY_ORDER) or " beside " in case.name or case.name in TWO
            elsewhere = places > 1 and not ordered
            elsewhere |= case.name.startswith("family ") and case.name.removeprefix("family ") not in FAMILIES_APART
            if case.name not in QUICK_NAMES:
                yield pytest.param(case, places, id=f"{case.name}-K={places}", marks=[pytest.mark.full] if elsewhere else [])


@pytest.mark.slow
@pytest.mark.parametrize(("case", "places"), list(everything()))
def test_everything(at_work, case, places):
    check(at_work, case, places, 2)


@both
@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("case", list(all_of_them()), ids=lambda case: case.name)
def test_everything_under_more_delays(at_work, case, places):
    check(at_work, case, places, *range(3, 8))


@both
@pytest.mark.parametrize("degrees", KILLED, ids=str)
def test_a_rank_that_dies_is_named_and_the_next_ranks_work(at_work, degrees, places):
    assert at_work.kill(degrees, rules_of(places, 1, DELAY)) is None


@pytest.mark.parametrize(
    "degrees",
    [Degrees(ulysses=4), Degrees(pipe=4), Degrees(pipe=2, tensor=2), Degrees(patch=2, ring=2, patch_mode="displaced")],
    ids=cases.name,
)
def test_loading_opens_what_the_memory_model_counts_and_a_run_opens_no_more(at_work, degrees):
    def load_and_call(files, load, _pool):
        model, fabric = load(files.mini(), degrees), at_work.distributed.fabrics[-1:]
        opened = [fabric[0].opened(rank) for rank in range(4)] if fabric else None
        found = model.predict(ModelCall(*mini.inputs(cases.CONFIG)), cases.nothing)
        if opened is not None:
            assert opened == [(communicators(degrees, rank), connections(degrees, rank)) for rank in range(4)]
            assert opened == [fabric[0].opened(rank) for rank in range(4)]
        return [found]

    assert at_work.trial(cases.Case(f"opened {degrees}", load_and_call, rare=True), rules_of(8, 1, DELAY)) is None


def test_ranks_that_end_politely_have_waited_for_their_last_send(at_work):
    """A call outside of a run, whose output is there while its first stage has nothing more to do."""

    def one_call(files, load, _pool):
        return [load(files.mini(), Degrees(pipe=2)).predict(ModelCall(*mini.inputs(cases.CONFIG)), cases.nothing)]

    assert at_work.trial(cases.Case("one call", one_call), rules_of(8, 1, DELAY)) is None


@pytest.mark.parametrize(
    "degrees",
    [
        pytest.param(degrees, id=cases.name(degrees), marks=() if degrees in WITH_GLOO else pytest.mark.full)
        for degrees in cases.PRODUCTS
    ],
)
def test_the_mailbox_gives_what_gloo_gives(at_work, process_pools, degrees):
    """Bit for bit, so that what equals the one equals the other. Sums of four are added up in another order by Gloo."""
    case = product(degrees)

    def load(checkpoint: Checkpoint, degrees: Degrees) -> RemoteTransformer:
        return process_pools.mini(checkpoint.path, degrees, fresh=True)

    found = case.run(at_work.files, load, process_pools)
    with mock.patch.dict(ulysses.HEAD_GROUPS, cpu=1):  # as ranks in processes have it
        expected = at_work.on_mailbox(case)
    if degrees.tensor < 4:
        assert same(found, expected)
    else:
        assert max(map(mini.relative, found, expected)) <= 1e-5


def scribble(send):
    """StageLink.send, and then the tensor is used for something else."""

    def sent(link, tensor: torch.Tensor, overlap: bool) -> None:
        send(link, tensor, overlap)
        tensor.zero_()

    return sent


def without_waiting(exchange) -> torch.Tensor:
    """In the place of Exchange.wait."""
    return exchange.target


def halves_in_turn(all_reduce):
    """collectives.all_reduce in two calls, of which every other rank makes the second one first."""

    def reduced(x: torch.Tensor, axis, traffic) -> torch.Tensor:
        halves = list(x.reshape(-1).split(-(-x.numel() // 3)))
        for half in halves if axis.index == 0 else reversed(halves):
            all_reduce(half, axis, traffic)
        return x

    return reduced


@pytest.mark.parametrize(
    ("degrees", "at", "name", "fault", "words"),
    [
        (Degrees(pipe=2), StageLink, "send", scribble(StageLink.send), "sent was changed before"),
        (Degrees(pipe=2), StageLink, "await_sends", lambda *_, **__: None, "never waited for: rank 0's transfer to 1"),
        (Degrees(ulysses=2), collectives.Exchange, "wait", without_waiting, "values that are not finite"),
        (Degrees(tensor=2), tensor_parallel, "all_reduce", halves_in_turn(collectives.all_reduce), "sizes differ"),
    ],
    ids=["reused buffer", "sends not waited for", "receives not waited for", "another order"],
)
def test_faults_of_the_product_are_caught(at_work, degrees, at, name, fault, words):
    """The control of the tables above."""
    case = product(degrees)
    at_work.expected(case)
    with mock.patch.object(at, name, fault):
        assert words in (at_work.trial(case, rules_of(8, 1, DELAY)) or "nothing was caught")
