"""What the scripts that train miniature models share: the clock, the optimiser, averaged weights, checkpoints, the loop."""

import argparse
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

log = logging.getLogger("training")

WARM_UP = 0.02  # of the time budget
BETAS = (0.9, 0.99)
WEIGHT_DECAY = 0.01
CLIP = 1.0
EMA_DECAY = 0.998


def options(description: str | None, out: str, minutes: float, batch: int, threads: int) -> argparse.ArgumentParser:
    """The options that every training has; `out` is the folder it writes to."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=minutes, help="wall-clock budget, all resumes together")
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=threads)
    parser.add_argument("--save-minutes", type=float, default=3)
    parser.add_argument("--check-minutes", type=float, default=14, help="judge 64 prompts this often")
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--weights", type=Path, help="default: OUT/ema.safetensors")
    return parser


def start(args: argparse.Namespace) -> None:
    """Make the folder, log to it and to the terminal, and set the threads."""
    args.out.mkdir(parents=True, exist_ok=True)
    args.weights = args.weights or args.out / "ema.safetensors"
    handlers = [logging.StreamHandler(), logging.FileHandler(args.out / "STATUS")]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", handlers=handlers)
    torch.set_num_threads(args.threads)


def draw_sigmas(count: int, generator: torch.Generator) -> torch.Tensor:
    """Noise levels [count] in 0..1: half uniform, half logit-normal around 0.7.

    A picture of smooth strokes shows through heavy noise, so which digit goes where is decided at high sigma.
    """
    uniform = torch.rand(count, generator=generator)
    high = torch.sigmoid(torch.randn(count, generator=generator) + 0.8)
    return torch.where(torch.arange(count) % 2 == 0, uniform, high)


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up, then half a cosine to zero; progress in 0..1 is elapsed time over the budget."""
    if progress < WARM_UP:
        return peak * (progress / WARM_UP + 0.01)
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - WARM_UP) / (1 - WARM_UP))))


class Training:
    """Model, averaged weights, optimiser and clock of one run; `step` is one update, `save` makes it resumable.

    `new_model` makes a fresh model, after the seed is set. `loss` is of the model, a batch size and the run's generator.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        new_model: Callable[[], nn.Module],
        loss: Callable[[nn.Module, int, torch.Generator], torch.Tensor],
    ):
        self.args, self._loss = args, loss
        self.generator = torch.Generator().manual_seed(args.seed)
        torch.manual_seed(args.seed)
        self.model = new_model()
        self.average = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=args.lr, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
        )
        self.steps = 0
        self.before = 0.0  # seconds trained before this process
        if args.resume:
            self._load()
        self.first = self.steps  # of this process
        self.started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Training time so far, of earlier processes too."""
        return self.before + time.monotonic() - self.started

    def _load(self) -> None:
        state: dict[str, Any] = torch.load(self.args.out / "checkpoint.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.average = state["average"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.steps, self.before = state["steps"], state["seconds"]

    def save(self) -> None:
        """Write both files under temporary names and rename them, so that a reader never meets half a file."""
        state = {
            "model": self.model.state_dict(), "average": self.average, "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(), "steps": self.steps, "seconds": self.seconds,
        }  # fmt: skip
        torch.save(state, self.args.out / "checkpoint.pt.part")
        save_file(self.average, self.args.out / "ema.safetensors.part")
        for name in ("checkpoint.pt", "ema.safetensors"):
            os.replace(self.args.out / f"{name}.part", self.args.out / name)

    def step(self) -> float:
        """One update on a fresh batch; returns the loss."""
        loss = self._loss(self.model, self.args.batch, self.generator)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.seconds / (60 * self.args.minutes), self.args.lr)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        # Early weights are forgotten faster, or the average would start from noise.
        keep = min(EMA_DECAY, (1 + self.steps) / (10 + self.steps))
        with torch.no_grad():
            parameters = self.model.state_dict()
            torch._foreach_lerp_(list(self.average.values()), [parameters[name] for name in self.average], 1 - keep)
        return loss.item()

    def run(self, judge: Callable[[dict[str, torch.Tensor], Path], object]) -> None:
        """Train to the end of the budget or until SIGTERM; `judge` the averaged weights now and then, with a PNG's path."""
        args, budget = self.args, 60 * self.args.minutes
        parameters = sum(value.numel() for value in self.model.parameters()) / 1e6
        log.info("%.2f M parameters, budget %.1f min", parameters, args.minutes)
        saved = checked = self.seconds
        mean = None
        stopping = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stopping.set())
        while self.seconds < budget and not stopping.is_set():
            loss = self.step()
            mean = loss if mean is None else 0.98 * mean + 0.02 * loss
            if self.steps % 100 == 0:
                log.info("step %d, %.1f of %.1f min, loss %.4f, %.2f s/step", self.steps, self.seconds / 60, args.minutes,
                         mean, (self.seconds - self.before) / (self.steps - self.first))  # fmt: skip
            if self.seconds - saved > 60 * args.save_minutes:
                self.save()
                saved = self.seconds
            if self.seconds - checked > 60 * args.check_minutes and budget - self.seconds > 60 * args.check_minutes / 2:
                judge(self.average, args.out / f"sheet-step{self.steps}.png")
                checked = self.seconds
        self.save()
        log.info("end of training: %d steps, %.1f min, loss %.4f", self.steps, self.seconds / 60, mean or math.nan)
