"""Models on the ranks of a pool, with settings that tests and benchmarks name one by one."""

from typing import Any, NoReturn

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.client.call import Conditioning, ModelCall, PostedCall, TokenLayout
from parallel_backend.client.loading import load_model
from parallel_backend.client.memory_guard import MakeRoom, no_room
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.setup import Setup
from parallel_backend.placement.memory_model import Request
from parallel_backend.processes.pool import LoadProgress, Poll, Pool

from .mini import for_tensor


def nobody() -> None:
    """A Poll that never gives up."""


class Cancelled(BaseException):
    """As ComfyUI's InterruptProcessingException, no Exception in recent versions."""


def cancel() -> NoReturn:
    """A Poll that gives up at once."""
    raise Cancelled


def on_ranks(
    pool: Pool,
    checkpoint: Checkpoint,
    degrees: Degrees,
    dtype: str,
    attention: str,
    poll: Poll,
    stage_split: str = "even",
    progress: LoadProgress = lambda doing, fraction: None,
    make_room: MakeRoom = no_room,
    expected: Request | None = None,
    keep_others: bool = False,
    **others: Any,
) -> RemoteTransformer:
    """The checkpoint's model on the ranks of `pool`, see loading.load_model. `others`: further fields of Setup.

    A checkpoint of the mini class (mini.opened) may be one of other tensor ranks."""
    if "own_class" not in others:
        checkpoint = for_tensor(checkpoint, degrees.tensor)
        others["own_class"] = checkpoint.built.own
    setup = Setup(checkpoint.path, dtype, pool.devices, degrees, attention, stage_split, **others)
    return load_model(pool, checkpoint, setup, poll, progress, make_room, expected, keep_others)


def conditioning_of(
    model: RemoteTransformer, grid: tuple[int, ...], tensors: dict[str, torch.Tensor], first_replica: int = 0, sound: int = 0
) -> Conditioning:
    """The ranks' copy of these conditioning tensors. `sound`: tokens of the companion latent."""
    call = ModelCall(torch.empty(0), torch.empty(0), tensors, first_replica=first_replica)
    return model.conditioning(call, TokenLayout(grid, companion_tokens=sound))


def whole_call(
    model: RemoteTransformer, x: torch.Tensor, timestep: torch.Tensor, tensors: dict[str, torch.Tensor], run: int = 0
) -> PostedCall:
    """A call for the whole latent `x`, not posted yet. `run`: see PostedCall."""
    patching = model.built.patching
    conditioning = conditioning_of(model, patching.grid(tuple(x.shape)), tensors)
    return PostedCall(patching.pack(x), timestep, conditioning, conditioning.token_order.span, run=run)
