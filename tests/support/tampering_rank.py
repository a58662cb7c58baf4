"""Ranks that compute as ever and send something else than they have computed."""

import dataclasses
import functools
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from parallel_backend.wire.rank_settings import RankSettings

TWICE = "the same once more"


def others(output) -> dict[str, list]:
    """What is sent in an Output's place, by name."""
    value, change = output.value, functools.partial(dataclasses.replace, output)
    return {
        "another rank's number": [change(rank=output.rank + 1)],
        "a micro-step that there was not": [change(seq=output.seq + 1000)],
        TWICE: [output, output],
        "an entry less": [change(value=value[1:])],
        "one token for all": [change(value=value[:, :1])],
        "a token more": [change(value=torch.cat((value, value[:, :1]), 1))],
        "no axes": [change(value=value.mean())],
        "half the channels": [change(value=value[..., :-2])],
        "whole numbers": [change(value=value.long())],
    }


def tampering(how: str, settings: RankSettings, connection: Connection) -> None:
    """A rank's entry, as entry.main."""
    from parallel_backend.rank.start.entry import main
    from parallel_backend.wire.channel import Channel
    from parallel_backend.wire.sampling import Output

    send: Callable = Channel.send

    def tampered(channel: Channel, message: object, *rest: int | None, **named: int | None) -> None:
        output = isinstance(message, Output)
        if output and how == TWICE and message.rank == 1:
            time.sleep(1.0)  # the other one's second output comes before the first of this one
        for each in others(message)[how] if output else [message]:
            send(channel, each, *rest, **named)

    Channel.send = tampered
    main(settings, connection)
