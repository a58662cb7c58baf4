"""A rank that sends what cannot be is named, and nothing of it reaches a picture."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from unittest import mock

import pytest
import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.client.measurements import measured_blocks, measured_links
from parallel_backend.client.vae import RemoteVAE
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.pool import RankError
from parallel_backend.quickstart.model import mini_flux
from parallel_backend.wire import messages as m
from parallel_backend.wire.channel import Channel
from testing import mini

pytestmark = pytest.mark.threads


@pytest.mark.parametrize(
    "wrong",
    [
        lambda output: replace(output, rank=1),
        lambda output: replace(output, seq=output.seq + 1000),
        lambda output: replace(output, value=output.value[1:]),
        lambda output: replace(output, value=output.value[:, :1]),
        lambda output: replace(output, value=torch.cat((output.value, output.value[:, :1]), 1)),
        lambda output: replace(output, value=output.value.mean()),
        lambda output: replace(output, value=output.value[..., :-2]),
        lambda output: replace(output, value=output.value.long()),
    ],
)
def test_outputs_that_cannot_be_end_the_pool_and_name_the_rank(remote, monkeypatch, wrong: Callable):
    model, send = remote(Degrees(), fresh=True), Channel.send

    def tampered(channel: Channel, message: object, *rest: int | None, **named: int | None) -> None:
        send(channel, wrong(message) if isinstance(message, m.Output) else message, *rest, **named)

    monkeypatch.setattr(Channel, "send", tampered)
    with pytest.raises(RankError, match=r"^Parallel DiT: rank 0 \(cpu\) sent an invalid message: "):
        model.predict(ModelCall(*mini.inputs()), lambda: None)
    assert isinstance(model.pool.error, RankError)


def done(replies: list) -> Future:
    future = Future()
    future.set_result(replies)
    return future


def pool_of(*parts) -> mock.Mock:
    """A pool whose two ranks answer what they are told to."""
    pool = mock.Mock(devices=("cpu", "cpu"), ready=done([]), part_ranks=())
    pool.refuse.side_effect = lambda rank, why: RankError(why)
    pool.ask.side_effect = lambda _message, _reply: done(list(parts))
    pool.ask_each.side_effect = [done([m.VAEBegun(rank, True, 0) for rank in range(2)]), done(list(parts))]
    return pool


def decoded(*shapes) -> None:
    """Bands of a picture of 3 rows of latent and 2 columns come from two ranks."""
    pool = pool_of(*[m.VAEOutput(rank, torch.zeros(shape)) for rank, shape in enumerate(shapes)])
    RemoteVAE(pool, "a", "decoder", None).run(torch.zeros(1, 4, 3, 2), 1, lambda: None)


@pytest.mark.parametrize(
    "shapes",
    [
        ((1, 3, 16, 16), (1, 3, 16, 16)),
        ((1, 3, 16, 16), (1, 3, 1, 16)),
        ((1, 3, 16, 16), (3, 8, 16)),
        ((1, 3, 16, 16), (2, 3, 8, 16)),
        ((1, 3, 16, 17), (1, 3, 8, 16)),
    ],
)
def test_a_band_of_a_picture_has_to_be_the_ranks_own(shapes):
    with pytest.raises(RankError, match="a band of an image"):
        decoded(*shapes)
    decoded((1, 3, 16, 16), (1, 3, 8, 16))


SIZES = (1, 1000)
TIMES = ((1, 1e-5), (1000, 1e-4))
BLOCKS = m.Probed(1, {"a": (0.2, 0.1), "b": (0.3, 0.1)}, (0.1, 0.0), None)
LINKS = m.LinksProbed(1, "a device", 2**30, 2**34, {}, 0.1)


def blocks(**changes) -> None:
    """The second one of two ranks measured so."""
    pool = pool_of(replace(BLOCKS, rank=0), replace(BLOCKS, **changes))
    measured_blocks(pool, m.Probe("", "fp32", own_class=mini_flux()), ["a", "b", "b"], lambda: None)


def links(**changes) -> None:
    measured_links(pool_of(replace(LINKS, rank=0, links={1: TIMES}), replace(LINKS, **changes)), SIZES, lambda: None)


@pytest.mark.parametrize(
    ("measured", "changes"),
    [
        (blocks, {"blocks": {}}),
        (blocks, {"blocks": {"a": (0.2, 0.1)}}),
        (blocks, {"blocks": {"a": (0.2, 0.1, 0.1), "b": (0.3,)}}),
        (blocks, {"blocks": {"a": (0.2, 0.0), "b": (0.3, 0.1)}}),
        (blocks, {"ends": (0.1, -0.1)}),
        (links, {"links": {0: TIMES}}),
        (links, {"together": -1.0}),
        (links, {"rank": 0, "links": {1: TIMES[:1]}}),
        (links, {"rank": 0, "links": {1: ((1, 1e-5), (1001, 1e-4))}}),
    ],
)
def test_measurements_that_cannot_be_are_refused(measured, changes):
    with pytest.raises(RankError, match="measurements that cannot be"):
        measured(**changes)
    measured()
