"""Attention with its log-sum-exp, which a ring needs: torch's flash kernel against cuDNN's, from 4k to 33k tokens.

python -m benchmarks.one_gpu.log_sum_exp --out log_sum_exp.json
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from .kept import keep, parser

TOKENS = (4096, 8192, 16384, 33280)
HEADS, SIZE, CALLS = 24, 128, 5


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)
    return out, lse


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)
    return out, lse.reshape(q.shape[:3])


def milliseconds(kernel: Callable[..., Any], *qkv: torch.Tensor) -> float:
    kernel(*qkv)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(CALLS):
        kernel(*qkv)
    torch.cuda.synchronize()
    return round((time.perf_counter() - began) / CALLS * 1e3, 3)


@torch.inference_mode()
def main() -> None:
    out = parser(__doc__).parse_args().out
    rows: dict[int, Any] = {}
    random = torch.Generator("cuda").manual_seed(0)
    for tokens in TOKENS:
        shape = (3, 1, HEADS, tokens, SIZE)
        qkv = torch.randn(shape, generator=random, device="cuda", dtype=torch.bfloat16).unbind()
        (one, one_lse), (two, two_lse) = flash(*qkv), cudnn(*qkv)
        rows[tokens] = {
            "flash_ms": milliseconds(flash, *qkv),
            "cudnn_ms": milliseconds(cudnn, *qkv),
            "largest_difference": float((one.float() - two.float()).abs().max()),
            "largest_difference_of_lse": float((one_lse.float() - two_lse.float()).abs().max()),
        }
        gains = ", ".join(f"{size}: {row['flash_ms'] / row['cudnn_ms']:.2f}x" for size, row in rows.items())
        keep(out, {"summary": f"cuDNN's speed by flash's, {gains}", "by_tokens": rows})


if __name__ == "__main__":
    main()
