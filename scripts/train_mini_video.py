"""Train and judge the mini video model of the benchmarks on a CPU: quickstart/mini_wan.py, one moving digit in eight frames.

Train (one core):                 python scripts/train_mini_video.py --minutes 70 --out /tmp/train
Go on after SIGTERM or a crash:   the same with --resume; a larger --minutes prolongs a finished run
Judge:                            python scripts/train_mini_video.py --evaluate --out /tmp/train
Write the file in bfloat16:       the same with --export benchmarks/assets/moving-digits.safetensors

The learning rate is a function of elapsed wall-clock time over --minutes. --compile makes steps about a third faster
after one or two minutes. Written to --out: `ema.safetensors` (averaged weights, float32),
`checkpoint.pt` (everything to resume), `STATUS` (log), PNG contact sheets (a video is a row).
"""

import argparse
import logging
import sys
from itertools import pairwise
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from training import Training, draw_sigmas, options, start

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import moving_digits as data
from benchmarks.harness.mini_video import START, requests
from parallel_backend.quickstart.mini_wan import MiniWan

log = logging.getLogger("train_mini_video")

DROP_SHARE = 0.1  # of the prompts, for classifier-free guidance
STEPS = 20  # Euler steps of a judged video
GUIDANCE = 2.0


def new_model() -> MiniWan:
    """A fresh model whose blocks start as the identity and whose output starts at zero."""
    model = MiniWan(nn)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            if name == "head.head" or name.endswith(("time_projection.1", "cross_attn.o")):
                nn.init.zeros_(module.weight)
            else:
                nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    for name, parameter in model.named_parameters():
        if name.endswith("modulation"):
            nn.init.zeros_(parameter)
    return model


def predict(model: nn.Module, x: torch.Tensor, prompts: torch.Tensor, sigma: torch.Tensor, mixed: bool) -> torch.Tensor:
    """Velocity (noise - video) of noisy latents x at sigma [B] for prompts [B, 2], float32.

    `mixed` runs matrix products in bfloat16.
    """
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        velocity = model(x, 1000 * sigma, data.encode_prompts(prompts))
    return velocity.float()


def loss(model: nn.Module, size: int, generator: torch.Generator) -> torch.Tensor:
    """The mean squared error of the video that the velocity points at, on fresh videos.

    By the velocity's own error most of the signal is sharpness at little noise, and what moves where is learned last.
    """
    videos, prompts = data.sample_videos(size, generator)
    prompts[torch.rand(size, generator=generator) < DROP_SHARE] = -1
    x0 = data.encode(videos)
    noise = torch.randn(x0.shape, generator=generator)
    sigma = draw_sigmas(size, generator)
    x = torch.lerp(x0, noise, sigma[:, None, None, None, None])
    error = predict(model, x, prompts, sigma, mixed=True) - (noise - x0)
    return (sigma.square() * error.square().flatten(1).mean(1)).mean()


@torch.no_grad()
def generate(model: nn.Module, x: torch.Tensor, prompts: torch.Tensor, guidance: float, mixed: bool) -> torch.Tensor:
    """Latents `x` with noise to START, and their prompts [B, 2] -> videos: Euler on linear sigmas."""
    videos = []
    for latents, part in zip(x.split(16), prompts.split(16), strict=True):
        for sigma, following in pairwise(torch.linspace(START, 0, STEPS + 1)):
            at = sigma.expand(len(part))
            velocity = predict(model, latents, part, at, mixed)
            if guidance != 1:
                negative = predict(model, latents, torch.full_like(part, -1), at, mixed)
                velocity = negative + guidance * (velocity - negative)
            latents = latents + (following - sigma) * velocity
        videos.append(data.decode(latents))
    return torch.cat(videos)


def contact_sheet(videos: torch.Tensor, path: Path, columns: int = 2) -> None:
    """Write videos [B, T, H, W] in 0..1 as one PNG at half size: a video is a row of frames."""
    strips = videos.transpose(1, 2).flatten(2)
    rows = [torch.cat(list(row), 1) for row in strips[: len(strips) // columns * columns].split(columns)]
    grey = (torch.cat(rows) * 255).round().byte().numpy()
    Image.fromarray(grey).resize((grey.shape[1] // 2, grey.shape[0] // 2), Image.Resampling.BOX).save(path)


def judge(
    state: dict[str, torch.Tensor], sheet: Path, count: int = 32, guidance: float = GUIDANCE, mixed: bool = True
) -> None:
    """Log the share of frames that are read as prompted, over `count` videos with noise to START."""
    model = MiniWan(nn)
    model.load_state_dict({name: value.bfloat16().float() for name, value in state.items()})
    prompts, x = requests(count)
    videos = generate(model.eval(), x, prompts, guidance, mixed)
    right = data.read_videos(videos, prompts).float()
    contact_sheet(videos[:24], sheet)
    log.info("guidance %.1f: %.2f %% of %d frames as prompted, by frame %s", guidance, 100 * right.mean(), right.numel(),
             [round(share, 2) for share in right.mean(0).tolist()])  # fmt: skip


def main() -> None:
    parser = options(__doc__, "mini-video-training", minutes=70, batch=8, threads=1)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--export", type=Path, help="write the weights there in bfloat16")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--guidance", type=float, nargs="+", default=[1.0, 2.0, 3.0])
    args: argparse.Namespace = parser.parse_args()
    start(args)
    if args.export:
        save_file({name: value.bfloat16() for name, value in load_file(args.weights).items()}, args.export)
        return
    if args.evaluate:
        for guidance in args.guidance:
            sheet = args.out / f"sheet-cfg{guidance:g}.png"
            judge(load_file(args.weights), sheet, args.prompts, guidance, mixed=False)
        return
    run = Training(args, new_model, loss)
    if args.compile:
        run.model.compile()
    run.run(judge)


if __name__ == "__main__":
    main()
