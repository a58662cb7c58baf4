"""The calls, and the modes: axes of Degrees, and PipeFusion's bands (0: whole calls)."""

import torch

STEPS = 6
MODES: dict[str, tuple[dict[str, int], int]] = {
    "one rank": ({}, 0),
    "two stages": ({"pipe": 2}, 0),
    "Ulysses 2": ({"ulysses": 2}, 0),
    "two patches": ({"pipe": 2}, 2),
    "four patches": ({"pipe": 2}, 4),
}
SIZES: dict[str, tuple[tuple[tuple[int, ...], ...], tuple[int, int], float]] = {
    "krea-2": (((16, 1, 16, 8),), (8, 72), 1.0),
    "qwen-image": (((16, 1, 16, 8),), (8, 64), 1.0),
    "ltx-2.3": (((128, 6, 4, 4), (8, 11, 16)), (7, 192), 1.0),
    "minimax-h3": (((24, 4, 8, 8), (32, 2, 16)), (8, 24), 700.0),
}
"""Model -> latents, text [tokens, width], timestep."""


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def latents(name: str) -> torch.Tensor | tuple[torch.Tensor, ...]:
    parts = tuple(drawn(1, *shape) for shape in SIZES[name][0])
    return parts if len(parts) > 1 else parts[0]


def text(name: str) -> torch.Tensor:
    return drawn(1, *SIZES[name][1])
