"""What ranks do with a model of real size in one mode: their own code, on hollow devices (benchmarks/sizes/hollow).

A run is traced with a few blocks of each kind, and with one more of a kind: as all blocks of a kind are alike, each adds the
same to every figure. Stages that differ in their blocks are traced whole.
"""

import contextlib
import functools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

from benchmarks.sizes.hollow.account import Account
from benchmarks.sizes.hollow.ranks import hollow_pool
from benchmarks.sizes.real_models import MiniModel
from parallel_backend.client.call import ModelCall
from parallel_backend.client.memory_guard import request_of
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands
from parallel_backend.core.degrees import Degrees
from parallel_backend.own_class.calls.call_arguments import structure_of
from parallel_backend.placement.balance import even_stages
from parallel_backend.placement.memory_model import KV_COPIES, MemoryNeed, Request, memory_by_rank
from parallel_backend.placement.model_sizes import ModelSizes, model_sizes
from parallel_backend.processes.pool import Pool, wait_for
from parallel_backend.rank import stage_forward
from parallel_backend.wire.diagnosis import DeviceMemoryReport, ReadMemory
from testing.models import conditioning_of, on_ranks

Figures = dict[str, int]
"""Of one rank. "weights", "peak": bytes of the device for the weights, and at most for all else in a run. Of a step:
"kernels", "products" among them, "moved" bytes of kernels that are no product, "stops" of the host, bytes "to the host" and
"to the device", "to 1": bytes sent to rank 1, "count mul", "moved mul": kernels and bytes of an operation."""
WARM_UP, STEPS = 3, 5
"""Of a run with K/V buffers. Most memory is taken by a third exact step: both sets of old keys are there, and what was sent
to the next stage in the two steps before."""
LEAST = 2
"""Blocks of each kind on each stage of a traced model: fewer would hide a block's peak behind that of what is around it."""


def mode_name(degrees: Degrees) -> str:
    return "one rank" if degrees.world == 1 else str(degrees)


def bands_of(degrees: Degrees) -> int:
    """PipeFusion's patches: one for each stage."""
    return degrees.pipe


def keeps(degrees: Degrees) -> bool:
    """Whether the mode has K/V buffers."""
    return degrees.pipe > 1 or degrees.displaced


@dataclass(frozen=True)
class Trace:
    """One trace. `figures`: by rank."""

    figures: list[Figures]
    request: Request


def trace(real: MiniModel, degrees: Degrees) -> Trace:
    """A run of this model, whole."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        checkpoint = real.opened(real.save(Path(folder) / "model.safetensors"))  # first: it imports the model's class
        pool, accounts = stack.enter_context(hollow_pool(degrees.world))
        tensors = real.tensors()
        told = structure_of(tensors)  # no value can be read from a hollow device
        stack.enter_context(mock.patch.object(stage_forward, "structure_of", lambda _tensors: told))
        model = on_ranks(pool, checkpoint, degrees, "bf16", "sdpa", lambda: None, stage_split="even")
        weights = [account.allocated for account in accounts]
        inputs = Inputs(real.noise(), tensors, real.timestep)
        found = traced(pool, model, inputs, accounts)
        for figures, nbytes in zip(found, weights, strict=True):
            figures["peak"] -= nbytes
            figures["weights"] = nbytes
        conditioning = conditioning_of(model, model.built.patching.grid(tuple(real.noise().shape)), tensors)
        kept = KV_COPIES if keeps(degrees) else 0
        return Trace(found, request_of(conditioning, model.built, kept, bands_of(degrees)))


@dataclass(frozen=True)
class Inputs:
    """Of a call: the latent of all entries, conditioning tensors, and the time of the first step."""

    noise: torch.Tensor
    tensors: dict[str, torch.Tensor]
    timestep: float

    @property
    def entries(self) -> int:
        """Of the batch."""
        return len(self.noise)


def traced(pool: Pool, model: RemoteTransformer, inputs: Inputs, accounts: Sequence[Account]) -> list[Figures]:
    """By rank, of a run of the model, whose weights are in the peak."""
    if keeps(model.setup.degrees):
        return _in_bands(model, inputs, accounts)
    return _whole(pool, model, inputs, accounts)


def figures(real: MiniModel, degrees: Degrees) -> Trace:
    """As `trace`, of few blocks of each kind."""
    counts = [real.config[name] for name in real.depths]
    if degrees.pipe > 1 and (len(counts) > 1 or counts[0] % degrees.pipe):
        return trace(real, degrees)
    depths = [LEAST * degrees.pipe] * len(counts)
    few = trace(real.with_depths(*depths), degrees)
    whole = [dict(each) for each in few.figures]
    # Keys and values are known to the byte. All else is there at most as often as transfers overlap, which differs by a
    # hidden state from trace to trace, so that a difference of two peaks is not multiplied.
    besides = _beside_kept(few, real.with_depths(*depths), degrees)
    for number, count in enumerate(counts):
        deeper = real.with_depths(*(depth + degrees.pipe * (at == number) for at, depth in enumerate(depths)))
        more = trace(deeper, degrees)
        besides = list(map(max, besides, _beside_kept(more, deeper, degrees)))
        for found, less, plus in zip(whole, few.figures, more.figures, strict=True):
            for name in plus:
                added = (count // degrees.pipe - LEAST) * (plus[name] - less.get(name, 0))
                found[name] = found.get(name, 0) + added
    _, kept, _ = predicted(real, degrees, few.request)
    for found, beside, nbytes in zip(whole, besides, kept, strict=True):
        found["peak"] = beside + nbytes
    return Trace(whole, few.request)


def _beside_kept(found: Trace, real: MiniModel, degrees: Degrees) -> list[int]:
    """By rank, bytes at the peak beside weights, keys and values."""
    _, kept, _ = predicted(real, degrees, found.request)
    return [rank["peak"] - nbytes for rank, nbytes in zip(found.figures, kept, strict=True)]


def predicted(real: MiniModel, degrees: Degrees, request: Request) -> tuple[list[MemoryNeed], list[int], list[float]]:
    """By rank, the memory model's bytes of such a run, of these the keys and values that it keeps, and the bytes of a hidden
    state of the rank's tokens."""
    sizes = _sizes(real)
    spans = even_stages(len(sizes.block_bytes), degrees.pipe)
    tokens = request.image + (request.text if sizes.joint else 0)
    states = [
        (1 if degrees.pipe > 1 else request.entries_on(degrees, degrees.coordinate(rank))) * tokens / degrees.sequence
        for rank in range(degrees.world)
    ]
    needs = memory_by_rank(sizes, degrees, spans, (request,))
    return needs, [need.buffers for need in needs], [state * sizes.token_bytes for state in states]


@functools.lru_cache(maxsize=8)
def _sizes(real: MiniModel) -> ModelSizes:
    """The sizes of this model. Its class takes seconds to build, and modes ask for it one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = real.opened(real.save(Path(folder) / "model.safetensors"))
        return model_sizes(checkpoint, "bf16", "cuda")


def _whole(pool: Pool, model: RemoteTransformer, inputs: Inputs, accounts: Sequence[Account]) -> list[Figures]:
    """Two exact calls: what is made once comes with the first."""
    peaks = [0] * len(accounts)
    for number in range(2):
        for account in accounts:
            account.begin()
        timestep = torch.full((inputs.entries,), inputs.timestep * (1 - number / 10))
        model.predict(ModelCall(inputs.noise, timestep, inputs.tensors), lambda: None)
        # Ranks without an output may still be at work when it comes; they answer behind their work.
        wait_for(pool.ask(ReadMemory(), DeviceMemoryReport), lambda: None)
        peaks = [max(peak, account.peak) for peak, account in zip(peaks, accounts, strict=True)]
    return [_read(account) | {"peak": peak} for account, peak in zip(accounts, peaks, strict=True)]


def _in_bands(model: RemoteTransformer, inputs: Inputs, accounts: Sequence[Account]) -> list[Figures]:
    """Runs of STEPS steps and of one less: what they differ by is a step with old keys."""
    prompt = Prompt(inputs.tensors, {}, 1.0, inputs.timestep)
    runs: list[list[Figures]] = []
    for steps in (STEPS - 1, STEPS - 1, STEPS):  # what is made once comes with the first
        for account in accounts:
            account.begin()
        sample_in_bands(model, inputs.noise, linear_sigmas(steps), prompt, bands_of(model.setup.degrees), WARM_UP)
        runs.append([_read(account) for account in accounts])
    first, fewer, more = runs
    return [
        {name: plus[name] - less.get(name, 0) for name in plus} | {"peak": max(run["peak"] for run in (once, less, plus))}
        for once, less, plus in zip(first, fewer, more, strict=True)
    ]


def _read(account: Account) -> Figures:
    return {
        "peak": account.peak,
        "kernels": account.kernels.total(),
        "products": account.products,
        "moved": account.moved.total(),
        "stops": account.stops,
        **{name: account.copied[name] for name in ("to the host", "to the device")},
        **{f"to {rank}": nbytes for rank, nbytes in account.sent.items()},
        **{f"count {name}": count for name, count in account.kernels.items()},
        **{f"moved {name}": nbytes for name, nbytes in account.moved.items()},
    }
