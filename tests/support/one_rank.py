"""One rank's whole model in this process, without a client."""

import itertools
from pathlib import Path
from typing import Any

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.core.block_changes import UNCHANGED, BlockChanges
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.setup import Setup
from parallel_backend.core.spans import Span
from parallel_backend.rank.engine import Engine
from parallel_backend.rank.loaded_stage import LoadedStage
from parallel_backend.wire import messages as m
from parallel_backend.wire.heartbeat import Heartbeat
from testing import mini
from testing.emulated_device import EmulatedCopies
from tests.support.alone import nobody


class OneRank:
    """An Engine. `opened`: the file, of the mini class (mini.py) if None; `resident`: as that of Load; `copies`: of its
    device; `settings`: of Setup."""

    def __init__(
        self,
        path: Path,
        dtype: str = "fp32",
        resident: tuple[int, ...] = (),
        copies: EmulatedCopies | None = None,
        opened: Checkpoint | None = None,
        **settings: Any,
    ):
        self.checkpoint = opened or mini.opened(path)
        self.built = self.checkpoint.built
        blocks = (Span(0, len(self.built.own.blocks)),)
        setup = Setup(path, dtype, ("cpu",), Degrees(), "sdpa", own_class=self.built.own, **settings)
        load = m.Load(setup, blocks, (1.0,), resident=resident)
        self.stage = LoadedStage(0, torch.device("cpu"), load, lambda fraction: None, nobody(), Heartbeat(), copies)
        self.engine = Engine(0, load, self.stage)
        self._seq = itertools.count(1)

    def put(
        self, x: torch.Tensor, tensors: dict[str, torch.Tensor], number: int = 1, changes: BlockChanges = UNCHANGED
    ) -> None:
        """A conditioning for latents of the shape of `x`."""
        grid = self.built.patching.grid(tuple(x.shape))
        self.engine.put_conditioning(m.PutConditioning(number, grid, 0, len(x), tensors, changes=changes))
        self.token_order = self.built.token_order(grid)

    def step(
        self,
        x: torch.Tensor,
        timestep: torch.Tensor,
        run: int = 0,
        tokens: Span | None = None,
        with_text: bool = True,
        conditioning: int = 1,
    ) -> torch.Tensor:
        """A micro-step's output: [B, tokens, C]. `tokens`: of the latent's, all of them if None."""
        span = self.token_order.span if tokens is None else tokens
        packed = self.built.patching.pack_all((x,))[:, span.slice]
        step = m.Step(
            next(self._seq), run, conditioning, span, with_text, False, True, Span(0, len(x)), timestep, (), (), packed
        )
        return self.engine.step(step, None).value

    def predict(self, x: torch.Tensor, timestep: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """An exact call's output: [B, tokens, C]."""
        self.put(x, tensors)
        return self.step(x, timestep)
