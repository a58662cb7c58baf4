"""The product on a transport with NCCL's rules: nothing hangs, no rule is broken, and the result is Gloo's bit for bit."""

import itertools
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.client.call import ModelCall
from parallel_backend.client.remote_transformer import RemoteTransformer
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
ANY_ORDER = ("cancel ", "given up ", "two calls at once ", "unload and load pipe2")
"""Beginnings of names: what starts or ends in the middle of something else, of which the order of operations decides."""
WITH_GLOO = [*(degrees for degrees in cases.PRODUCTS if degrees.world == 2), Degrees(tensor=4), Degrees(pipe=2, ulysses=2)]


@pytest.fixture(scope="module")
def at_work(thread_pools, tmp_path_factory) -> Iterator[Trials]:
    """Within the session's own threads, so that it ends before them."""
    with trials(tmp_path_factory.mktemp("transport")) as made:
        yield made


both = pytest.mark.parametrize("places", list(RULES), ids=lambda places: f"K={places}")


def check(at_work: Trials, case: Case, places: int, seed: int) -> None:
    """With two communicators of a rank under way at once, at most, nothing can hang for want of one, in whatever order."""
    assert at_work.trials(case, [rules_of(places, seed, DELAY)]) == [None]
    assert 1 <= at_work.most_under_way <= 2


@both
@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_modes(at_work, case, places):
    check(at_work, case, places, 1)


def everything() -> Iterator[pytest.param]:
    """What differs in which transfers are made needs one order, which shows those: the other is left to the full tier."""
    done = {case.name for case in QUICK}
    for case, places in itertools.product(all_of_them(), RULES):
        marks = [pytest.mark.full] if places > 1 and not case.name.startswith(ANY_ORDER) else []
        if case.name not in done:
            yield pytest.param(case, places, id=f"{case.name}-K={places}", marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "places"), list(everything()))
def test_everything(at_work, case, places):
    check(at_work, case, places, 2)


@both
@pytest.mark.parametrize("degrees", [Degrees(pipe=2), Degrees(ulysses=2)], ids=str)
def test_a_rank_that_dies_is_named_and_the_next_ranks_work(at_work, degrees, places):
    assert at_work.kill(degrees, rules_of(places, 1, DELAY)) is None


@pytest.mark.parametrize(
    "degrees",
    [Degrees(ulysses=4), Degrees(pipe=2, tensor=2)],
    ids=cases.name,
)
def test_a_call_opens_no_communicator_that_loading_has_not(at_work, degrees):
    def load_and_call(files, load, _pool):
        model, fabric = load(files.mini(), degrees), at_work.distributed.fabrics[-1:]
        opened = [fabric[0].opened(rank) for rank in range(4)] if fabric else None
        found = model.predict(ModelCall(*mini.inputs(cases.CONFIG)), cases.nobody)
        if opened is not None:
            assert opened == [fabric[0].opened(rank) for rank in range(4)]
        return [found]

    assert at_work.trial(cases.Case(f"opened {degrees}", load_and_call, rare=True), rules_of(8, 1, DELAY)) is None


@pytest.mark.parametrize("degrees", WITH_GLOO, ids=cases.name)
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
