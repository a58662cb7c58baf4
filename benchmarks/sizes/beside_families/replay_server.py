"""Answers lines of JSON: {"mode": name} loads a rank and its messages, {"round": n} has it handle them n times."""

import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from cases import MODES, STEPS
from torch.testing._internal.distributed.fake_pg import FakeStore


def serve(host_time: Any, recorded: Any, said: TextIO) -> None:
    """`recorded(degrees, bands)`: the messages. Each round gives milliseconds of the CPU for a step."""
    from parallel_backend.core.degrees import Degrees
    from parallel_backend.rank.worker import Worker
    from parallel_backend.wire import messages as m
    from parallel_backend.wire.heartbeat import Heartbeat
    from parallel_backend.wire.rank_settings import RankSettings

    host_time.STEPS = STEPS
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    worker: Any = None
    steps: list[Any] = []

    def handled() -> float:
        began = time.thread_time()
        for message in steps:
            worker._handle(message)
        return (time.thread_time() - began) / STEPS * 1e3

    for line in sys.stdin:
        ask = json.loads(line)
        answer: dict[str, Any] = {}
        if "mode" in ask:
            if worker is not None:
                worker._outbox.close()
            if dist.is_initialized():
                dist.destroy_process_group()
            axes, bands = MODES[ask["mode"]]
            degrees = Degrees(**axes)
            log = recorded(degrees, bands)
            if degrees.world > 1:
                dist.init_process_group("fake", rank=0, world_size=degrees.world, store=FakeStore())
            settings = RankSettings(0, ("cpu",) * degrees.world, Path("nowhere"), 1, timedelta(minutes=1))
            worker = Worker(settings, host_time.Silent(), Heartbeat(), host_time.FakePeers(0, degrees.world))
            for message in log:
                worker._handle(message)
            steps = [each for each in log if isinstance(each, m.Step)]
        else:
            answer["ms"] = [handled() for _ in range(ask["round"])]
        print(json.dumps(answer), file=said, flush=True)
