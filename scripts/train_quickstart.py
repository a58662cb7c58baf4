"""Train and judge the quickstart model on a CPU.

Train (one hour on two cores):    python scripts/train_quickstart.py --minutes 58 --out /tmp/train
Go on after SIGTERM or a crash:   the same with --resume; a larger --minutes prolongs a finished run
Judge:                            python scripts/train_quickstart.py --evaluate --weights /tmp/train/ema.safetensors

The learning rate is a function of elapsed wall-clock time over --minutes, so that a slow or busy machine also reaches
the end of the decay; it takes fewer steps then. OMP_WAIT_POLICY=PASSIVE in the environment helps where other programs
want the same cores. Written to --out: `ema.safetensors` (averaged weights in diffusers' key layout, float32),
`checkpoint.pt` (everything to resume), `STATUS` (log), PNG contact sheets.
"""

import argparse
import logging
import math
import os
import signal
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import FluxTransformer2DModel
from PIL import Image
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from parallel_backend.quickstart import codec
from parallel_backend.quickstart.digits import read_digits, sample_pictures
from parallel_backend.quickstart.model import MODEL_CONFIG
from parallel_backend.quickstart.prompt import CELLS, NULL, encode_symbols

log = logging.getLogger("train_quickstart")

GRID = 16  # tokens per side: 256 pixels / 8 per latent / 2 per token
BLANK_SHARE = 0.04  # of the cells
DROP_SHARE = 0.1  # of the prompts, for classifier-free guidance
WARM_UP = 0.02  # of the time budget
BETAS = (0.9, 0.99)
WEIGHT_DECAY = 0.01
CLIP = 1.0
EMA_DECAY = 0.998
STEPS = 20  # Euler steps of a judged picture
GUIDANCE = 3.0


def pack(latents: torch.Tensor) -> torch.Tensor:
    """Model space [B, 16, 2h, 2w] -> tokens [B, h*w, 64]: "b c (h ph) (w pw) -> b (h w) (c ph pw)"."""
    cells = latents.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))
    return cells.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpack(tokens: torch.Tensor) -> torch.Tensor:
    """Inverse of `pack` for a square picture: tokens [B, 256, 64] -> model space [B, 16, 32, 32]."""
    cells = tokens.unflatten(1, (GRID, GRID)).unflatten(3, (codec.CHANNELS, 2, 2))
    return cells.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


def image_ids() -> torch.Tensor:
    """Positions [0, row, column] of the image tokens, [256, 3] float32."""
    ids = torch.zeros(GRID, GRID, 3)
    ids[..., 1] = torch.arange(GRID)[:, None]
    ids[..., 2] = torch.arange(GRID)[None, :]
    return ids.flatten(0, 1)


def predict(
    model: FluxTransformer2DModel, x: torch.Tensor, symbols: torch.Tensor, sigma: torch.Tensor, mixed: bool
) -> torch.Tensor:
    """Velocity (noise - picture) of noisy tokens x [B, 256, 64] at sigma [B] for prompts [B, 4] int64, float32.

    `mixed` runs a float32 model's matrix products in bfloat16; otherwise all is computed in the model's dtype.
    """
    context, pooled = encode_symbols(symbols)
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        velocity = model(
            hidden_states=x.to(model.dtype),
            encoder_hidden_states=context.to(model.dtype),
            pooled_projections=pooled.to(model.dtype),
            timestep=sigma.to(model.dtype),
            img_ids=image_ids(),
            txt_ids=torch.zeros(CELLS, 3),
            return_dict=False,
        )[0]
    return velocity.float()


def new_model() -> FluxTransformer2DModel:
    """A fresh model whose blocks start as the identity (adaLN-zero) and whose output starts at zero."""
    model = FluxTransformer2DModel(**MODEL_CONFIG)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            modulation = name.endswith(("norm.linear", "norm1.linear", "norm1_context.linear", "norm_out.linear"))
            if modulation or name == "proj_out":
                torch.nn.init.zeros_(module.weight)
            else:
                torch.nn.init.xavier_uniform_(module.weight)
            torch.nn.init.zeros_(module.bias)
    return model


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


@torch.no_grad()
def generate(
    model: FluxTransformer2DModel, symbols: torch.Tensor, guidance: float, seed: int, mixed: bool, batch: int = 50
) -> torch.Tensor:
    """Prompts [B, 4] int64 -> pictures [B, 256, 256] in 0..1: Euler on linear sigmas."""
    generator = torch.Generator().manual_seed(seed)
    sigmas = torch.linspace(1, 0, STEPS + 1)
    pictures = []
    for part in symbols.split(batch):
        x = torch.randn(len(part), GRID * GRID, MODEL_CONFIG["in_channels"], generator=generator)
        for sigma, following in pairwise(sigmas):
            at = sigma.expand(len(part))
            velocity = predict(model, x, part, at, mixed)
            if guidance != 1:
                nothing = torch.full_like(part, NULL)
                negative = predict(model, x, nothing, at, mixed)
                velocity = negative + guidance * (velocity - negative)
            x = x + (following - sigma) * velocity
        pictures.append(codec.decode(codec.process_out(unpack(x))))
    return torch.cat(pictures)


def random_prompts(count: int, seed: int) -> torch.Tensor:
    """Prompts of four digits, [count, 4] int64."""
    return torch.randint(10, (count, CELLS), generator=torch.Generator().manual_seed(seed))


def contact_sheet(pictures: torch.Tensor, path: Path, columns: int = 8) -> None:
    """Write pictures [B, 256, 256] in 0..1 as one PNG at half size."""
    rows = [torch.cat(list(row), 1) for row in pictures[: len(pictures) // columns * columns].split(columns)]
    grey = (torch.cat(rows) * 255).round().byte().numpy()
    Image.fromarray(grey).resize((grey.shape[1] // 2, grey.shape[0] // 2), Image.Resampling.BOX).save(path)


def judge(
    model: FluxTransformer2DModel, count: int, guidance: float, sheet: Path, mixed: bool = False, seed: int = 1
) -> float:
    """The share of digits that are read as prompted, over `count` random prompts."""
    prompts = random_prompts(count, seed)
    pictures = generate(model, prompts, guidance, seed, mixed)
    right = read_digits(pictures) == prompts.numpy()
    contact_sheet(pictures[:64], sheet)
    wrong = np.bincount(prompts.numpy()[~right], minlength=10).tolist()
    log.info("guidance %.1f: %.2f %% of %d digits as prompted; wrong per digit %s",
             guidance, 100 * right.mean(), right.size, wrong)  # fmt: skip
    return float(right.mean())


class Training:
    """Model, averaged weights, optimiser and clock of one run; `step` is one update, `save` makes it resumable."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
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
        """One update on fresh pictures; returns the loss."""
        size = self.args.batch
        pictures, symbols = sample_pictures(size, self.generator, BLANK_SHARE)
        dropped = torch.rand(size, generator=self.generator) < DROP_SHARE
        symbols[dropped] = NULL
        x0 = pack(codec.process_in(codec.encode(pictures)))
        noise = torch.randn(x0.shape, generator=self.generator)
        sigma = draw_sigmas(size, self.generator)
        x = torch.lerp(x0, noise, sigma[:, None, None])
        velocity = predict(self.model, x, symbols, sigma, mixed=True)
        loss = (velocity - (noise - x0)).square().mean()
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

    def averaged_model(self) -> FluxTransformer2DModel:
        return load_model(self.average, torch.float32)


def load_model(state: dict[str, torch.Tensor], dtype: torch.dtype) -> FluxTransformer2DModel:
    """A model that computes in `dtype` with weights rounded to bfloat16, as they ship."""
    model = FluxTransformer2DModel(**MODEL_CONFIG)
    model.load_state_dict({name: value.bfloat16().float() for name, value in state.items()})
    return model.to(dtype).eval()


def train(args: argparse.Namespace) -> None:
    run = Training(args)
    log.info("%.2f M parameters, budget %.1f min", sum(p.numel() for p in run.model.parameters()) / 1e6, args.minutes)
    budget = 60 * args.minutes
    saved = checked = run.seconds
    mean = None
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    while run.seconds < budget and not stopping.is_set():
        loss = run.step()
        mean = loss if mean is None else 0.98 * mean + 0.02 * loss
        if run.steps % 100 == 0:
            log.info("step %d, %.1f of %.1f min, loss %.4f, %.2f s/step", run.steps, run.seconds / 60, args.minutes,
                     mean, (run.seconds - run.before) / (run.steps - run.first))  # fmt: skip
        if run.seconds - saved > 60 * args.save_minutes:
            run.save()
            saved = run.seconds
        if run.seconds - checked > 60 * args.check_minutes and budget - run.seconds > 60 * args.check_minutes / 2:
            judge(run.averaged_model(), 64, GUIDANCE, args.out / f"sheet-step{run.steps}.png", mixed=True)
            checked = run.seconds
    run.save()
    log.info("end of training: %d steps, %.1f min, loss %.4f", run.steps, run.seconds / 60, mean or math.nan)


def evaluate(args: argparse.Namespace) -> None:
    model = load_model(load_file(args.weights), getattr(torch, args.dtype))
    log.info("%s, weights rounded to bfloat16, computing in %s, %d Euler steps", args.weights, args.dtype, STEPS)
    for guidance in args.guidance:
        judge(model, args.prompts, guidance, args.out / f"sheet-cfg{guidance:g}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=58, help="wall-clock budget, all resumes together")
    parser.add_argument("--out", type=Path, default=Path("quickstart-training"))
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-minutes", type=float, default=3)
    parser.add_argument("--check-minutes", type=float, default=14, help="judge 64 prompts this often")
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--weights", type=Path, help="diffusers key layout; default: OUT/ema.safetensors")
    parser.add_argument("--prompts", type=int, default=400)
    parser.add_argument("--guidance", type=float, nargs="+", default=[3.0, 1.0, 2.0, 4.0])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.weights = args.weights or args.out / "ema.safetensors"
    handlers = [logging.StreamHandler(), logging.FileHandler(args.out / "STATUS")]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", handlers=handlers)
    torch.set_num_threads(args.threads)
    if args.evaluate:
        evaluate(args)
    else:
        train(args)


if __name__ == "__main__":
    main()
