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
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from diffusers import FluxTransformer2DModel
from PIL import Image
from safetensors.torch import load_file
from training import Training, draw_sigmas, options, start

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from parallel_backend.quickstart import codec
from parallel_backend.quickstart.prompt import CELLS, NULL, encode_symbols
from scripts.digits import read_digits, sample_pictures

log = logging.getLogger("train_quickstart")

MODEL_CONFIG = {
    "patch_size": 1,
    "in_channels": 64,  # 16 latent channels x 2x2 packing
    "num_layers": 1,  # double-stream blocks
    "num_single_layers": 4,
    "attention_head_dim": 128,
    "num_attention_heads": 2,  # hidden width 256
    "joint_attention_dim": 32,  # width of a text token, see prompt.py
    "pooled_projection_dim": 16,
    "guidance_embeds": False,
    "axes_dims_rope": (16, 56, 56),
}

GRID = 16  # tokens per side: 256 pixels / 8 per latent / 2 per token
BLANK_SHARE = 0.04  # of the cells
DROP_SHARE = 0.1  # of the prompts, for classifier-free guidance
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


def loss(model: FluxTransformer2DModel, size: int, generator: torch.Generator) -> torch.Tensor:
    """The mean squared error of the velocity on fresh pictures."""
    pictures, symbols = sample_pictures(size, generator, BLANK_SHARE)
    dropped = torch.rand(size, generator=generator) < DROP_SHARE
    symbols[dropped] = NULL
    x0 = pack(codec.process_in(codec.encode(pictures)))
    noise = torch.randn(x0.shape, generator=generator)
    sigma = draw_sigmas(size, generator)
    x = torch.lerp(x0, noise, sigma[:, None, None])
    return (predict(model, x, symbols, sigma, mixed=True) - (noise - x0)).square().mean()


def load_model(state: dict[str, torch.Tensor], dtype: torch.dtype) -> FluxTransformer2DModel:
    """A model that computes in `dtype` with weights rounded to bfloat16, as they ship."""
    model = FluxTransformer2DModel(**MODEL_CONFIG)
    model.load_state_dict({name: value.bfloat16().float() for name, value in state.items()})
    return model.to(dtype).eval()


def check(average: dict[str, torch.Tensor], sheet: Path) -> None:
    """Judge the averaged weights of a training under way."""
    judge(load_model(average, torch.float32), 64, GUIDANCE, sheet, mixed=True)


def evaluate(args: argparse.Namespace) -> None:
    model = load_model(load_file(args.weights), getattr(torch, args.dtype))
    log.info("%s, weights rounded to bfloat16, computing in %s, %d Euler steps", args.weights, args.dtype, STEPS)
    for guidance in args.guidance:
        judge(model, args.prompts, guidance, args.out / f"sheet-cfg{guidance:g}.png")


def main() -> None:
    parser = options(__doc__, "quickstart-training", minutes=58, batch=24, threads=2)
    parser.add_argument("--prompts", type=int, default=400)
    parser.add_argument("--guidance", type=float, nargs="+", default=[3.0, 1.0, 2.0, 4.0])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    start(args)
    if args.evaluate:
        evaluate(args)
    else:
        Training(args, new_model, loss).run(check)


if __name__ == "__main__":
    main()
