"""diffusers' own context parallelism, Ulysses and ring, on two CPU processes over Gloo: the baseline of modes.py.

As shipped (diffusers 0.42) it does not run on CPUs. `adapt_to_cpu` changes two things, in these processes only; the
model, its plan, the collectives and the arithmetic around the attention are diffusers' own, with its defaults.
"""

import functools
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from diffusers import ContextParallelConfig
from diffusers.models import attention_dispatch
from diffusers.utils import logging

from benchmarks.common import Outcome, run_plain
from parallel_backend.mesh import join, leave
from tests import tiny

RANKS = 2
STOP_SECONDS = 5
GROUP_TIMEOUT = timedelta(minutes=30)

shipped_attention = attention_dispatch._native_attention_forward_op


def attention_with_lse(
    ctx: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    **context: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """As diffusers calls its attention ops: [B, n, heads, d] x 3 -> the same, and log-sum-exp [B, n, heads] if asked."""
    if not return_lse:
        return shipped_attention(ctx, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, **context)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )
    return out.transpose(1, 2), lse.transpose(1, 2)


def adapt_to_cpu() -> None:
    """The two things without which it stops on a CPU."""
    # `enable_parallelism` computes `rank % torch.accelerator.device_count()`, which is 0 here. The device that it makes
    # of it ("cpu", the accelerator type torch reports) is only noted in the config.
    torch.accelerator.device_count = lambda: 1
    # The ring joins its chunks by their log-sum-exp. "native", the only backend for context parallelism that takes fp32
    # on a CPU, refuses to return it, although the kernel behind it computes it: the same kernel, then, called by name.
    # Ulysses asks for none and runs what is shipped.
    attention_dispatch._native_attention_forward_op = attention_with_lse


@functools.cache
def parallel_model(path: Path, mode: str) -> torch.nn.Module:
    model = tiny.whole_model(path)
    model.enable_parallelism(config=ContextParallelConfig(**{f"{mode}_degree": RANKS}))
    return model


def serve(rank: int, path: Path, rendezvous: Path, connection: Connection) -> None:
    """A rank's life: (mode, steps) in, (seconds, sample, bytes of weights) out, until the connection ends."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()  # "experimental feature", once for each model
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames a collective that diffusers calls
    join(rank, ("cpu",) * RANKS, rendezvous, GROUP_TIMEOUT)
    adapt_to_cpu()
    while True:
        try:
            mode, steps = connection.recv()
        except EOFError:
            break
        model = parallel_model(path, mode)
        outcome = run_plain(model, steps, start=dist.barrier)
        connection.send((outcome.seconds, outcome.sample.numpy(), sum(weight.nbytes for weight in model.parameters())))
    leave()


class DiffusersRanks:
    """Two processes that keep the model of `path` in each mode that was asked for."""

    def __init__(self, path: Path):
        self._directory = TemporaryDirectory(prefix="diffusers-ranks-")
        context = torch.multiprocessing.get_context("spawn")
        self._connections, self._processes = [], []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            arguments = (rank, path, Path(self._directory.name) / "store", theirs)
            process = context.Process(target=serve, args=arguments, name=f"diffusers rank {rank}", daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, mode: str, steps: int) -> Outcome:
        """Seconds of the slower rank. Raises EOFError if a rank ended; its traceback is on stderr."""
        for connection in self._connections:
            connection.send((mode, steps))
        answers = [connection.recv() for connection in self._connections]
        seconds, samples, weight_bytes = zip(*answers, strict=True)
        return Outcome(max(seconds), torch.from_numpy(samples[0]), weight_bytes=weight_bytes)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(STOP_SECONDS)
            process.kill()
        self._directory.cleanup()
