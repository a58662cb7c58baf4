"""What ranks do with a model of real size in one mode: their own code, on hollow devices (testing/hollow).

A run is traced with a few blocks of each kind, and with one more of a kind: as all blocks of a kind are alike, each adds the
same to every figure. A pipeline of a model with two kinds of blocks is traced whole.
"""

import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.client.call import ModelCall
from parallel_backend.client.memory_guard import request_of
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands
from parallel_backend.core.degrees import Degrees
from parallel_backend.families.base.patching import latents_of
from parallel_backend.placement.balance import even_stages
from parallel_backend.placement.memory_model import KV_COPIES, MemoryNeed, Request, memory_by_rank
from parallel_backend.placement.model_sizes import model_sizes
from testing.hollow.account import Account
from testing.hollow.ranks import hollow_pool
from testing.models import conditioning_of, on_ranks
from testing.real_sizes import RealModel

Figures = dict[str, int]
"""Of one rank. "weights", "peak": bytes of the device for the weights, and at most for all else in a run. Of a step:
"kernels", "products" among them, "moved" bytes of kernels that are no product, "stops" of the host, bytes "to the host" and
"to the device", "to 1": bytes sent to rank 1, "count mul", "moved mul": kernels and bytes of an operation."""
WARM_UP, STEPS = 2, 4
"""Of a run with K/V buffers. Most memory is taken by a second exact step, where both sets of old keys are there."""
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


def trace(real: RealModel, degrees: Degrees) -> Trace:
    """A run of this model, whole."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        checkpoint = open_checkpoint(real.save(Path(folder) / "model.safetensors"))  # first: it imports the model's class
        pool, accounts = stack.enter_context(hollow_pool(degrees.world))
        model = on_ranks(pool, checkpoint, degrees, "bf16", "sdpa", lambda: None, stage_split="even")
        weights = [account.allocated for account in accounts]
        found = _in_bands(model, real, accounts) if keeps(degrees) else _whole(model, real, accounts)
        for figures, nbytes in zip(found, weights, strict=True):
            figures["peak"] -= nbytes
            figures["weights"] = nbytes
        shapes = [tuple(latent.shape) for latent in latents_of(real.noise())]
        patching = model.family.patching
        conditioning = conditioning_of(
            model, patching.grid(shapes[0]), real.tensors(), sound=patching.companion_tokens(tuple(shapes))
        )
        kept = KV_COPIES if keeps(degrees) else 0
        return Trace(found, request_of(conditioning, model.family, kept, bands_of(degrees)))


def figures(real: RealModel, degrees: Degrees) -> Trace:
    """As `trace`, of few blocks of each kind."""
    if degrees.pipe > 1 and len(real.depths) > 1:
        return trace(real, degrees)
    depths, counts = [LEAST * degrees.pipe] * len(real.depths), [real.config[name] for name in real.depths]
    # With blocks of one kind every stage has the same number here; later the first ones may have one more.
    stages = [len(span) for span in even_stages(counts[0], degrees.pipe)] if len(counts) == 1 else [sum(counts)]
    few = trace(real.with_depths(*depths), degrees)
    whole = [dict(each) for each in few.figures]
    for number, count in enumerate(counts):
        more = trace(real.with_depths(*(depth + degrees.pipe * (at == number) for at, depth in enumerate(depths))), degrees)
        for rank, (less, plus) in enumerate(zip(few.figures, more.figures, strict=True)):
            blocks = stages[degrees.coordinate(rank).pipe] if len(counts) == 1 else count
            for name in plus:
                whole[rank][name] = whole[rank].get(name, 0) + (blocks - LEAST) * (plus[name] - less.get(name, 0))
    return Trace(whole, few.request)


def predicted(real: RealModel, degrees: Degrees, request: Request) -> tuple[list[MemoryNeed], list[float]]:
    """By rank, the memory model's bytes of such a run, and the bytes of a hidden state of the rank's tokens."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = open_checkpoint(real.save(Path(folder) / "model.safetensors"))
        sizes = model_sizes(checkpoint, "bf16", "cuda")
    spans = even_stages(len(sizes.block_bytes), degrees.pipe)
    tokens = request.image + (request.text if sizes.joint else request.padding)
    states = [
        (1 if degrees.pipe > 1 else request.entries_on(degrees, degrees.coordinate(rank))) * tokens / degrees.sequence
        for rank in range(degrees.world)
    ]
    return memory_by_rank(sizes, degrees, spans, (request,)), [state * sizes.token_bytes for state in states]


def _whole(model: RemoteTransformer, real: RealModel, accounts: Sequence[Account]) -> list[Figures]:
    """Two exact calls: what is made once comes with the first."""
    tensors, peaks = real.tensors(), [0] * len(accounts)
    for number in range(2):
        for account in accounts:
            account.begin()
        timestep = torch.full((real.entries,), real.timestep * (1 - number / 10))
        model.predict(ModelCall(real.noise(), timestep, tensors), lambda: None)
        peaks = [max(peak, account.peak) for peak, account in zip(peaks, accounts, strict=True)]
    return [_read(account) | {"peak": peak} for account, peak in zip(accounts, peaks, strict=True)]


def _in_bands(model: RemoteTransformer, real: RealModel, accounts: Sequence[Account]) -> list[Figures]:
    """Runs of STEPS steps and of one less: what they differ by is a step with old keys."""
    prompt = Prompt(real.tensors(), {}, 1.0, real.timestep)
    runs: list[list[Figures]] = []
    for steps in (STEPS - 1, STEPS - 1, STEPS):  # what is made once comes with the first
        for account in accounts:
            account.begin()
        sample_in_bands(model, real.noise(), linear_sigmas(steps), prompt, bands_of(model.setup.degrees), WARM_UP)
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
        "stops": account.stops.total(),
        **{name: account.copied[name] for name in ("to the host", "to the device")},
        **{f"to {rank}": nbytes for rank, nbytes in account.sent.items()},
        **{f"count {name}": count for name, count in account.kernels.items()},
        **{f"moved {name}": nbytes for name, nbytes in account.moved.items()},
    }
