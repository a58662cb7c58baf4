"""How much Sol-Attn's work differs from head to head, on the trained mini models: is it worth to share heads out by it?

    python -m benchmarks.fidelity.head_density --out benchmarks/results/head_density_2cores_DATE.json

Model Sparse Attention's threshold (tau) takes another number of blocks for each head; SLA and VSA take as many for all. For
every self-attention of a run on one rank: the share of pairs of blocks that comfy-kitchen's formula sees exactly
(comfy_kitchen/backends/eager/sol_attn.py of 0.2.40, arXiv 2607.24027), by head, mean over the run. Blocks have 8 tokens,
since a sequence of 256 would have four of 64.

`spread`: standard deviation over the heads of a layer, as a share of their mean. `busiest`: how far the largest of N ranks
lies above the mean, worked out for heads that are normally distributed: of n heads' sum the spread is 1 / sqrt(n).
"""

import argparse
import math
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F

from benchmarks.harness import measuring, mini_model, mini_video
from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.pool import Pool
from testing.models import on_ranks
from testing.thread_ranks import thread_ranks

TAU, BLOCK = 1.3, 8
LAYERS = {"pictures": 5, "video": 4}
REAL = ((56, 2), (56, 4), (56, 8), (40, 2), (40, 4), (40, 8), (24, 2), (24, 4))
"""Heads and ranks: MiniMax H3, Wan, Flux."""


def densities(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """[H]: share of pairs of blocks that are seen exactly. query, key [B, H, T, D]."""
    count = query.shape[2] // BLOCK
    queries, keys = (x[:, :, : count * BLOCK].float().unflatten(2, (count, BLOCK)).mean(3) for x in (query, key))
    keys = keys - keys.mean(2, keepdim=True)
    scores = queries @ keys.transpose(-1, -2)
    deviation = torch.sqrt((queries.pow(2) * keys.pow(2).mean(2, keepdim=True)).sum(-1, keepdim=True))
    index = torch.arange(count)
    near = (index[None] - index[:, None]).abs() <= 1
    return ((scores > TAU * deviation) | near).float().mean((0, 2, 3))


def seen_in_a_run(model: str) -> torch.Tensor:
    """[calls, layers, H] of a run of 10 steps."""
    found, attend = [], F.scaled_dot_product_attention

    def noting(*arguments, **named):
        given = dict(zip(("query", "key"), arguments, strict=False)) | named
        query, key = given["query"], given["key"]
        if query.shape[-2] == key.shape[-2] >= 16 * BLOCK:
            found.append(densities(query, key))
        return attend(*arguments, **named)

    with ExitStack() as stack:
        start = stack.enter_context(thread_ranks())
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", noting))
        pool = Pool(("cpu",), start=start)
        stack.callback(pool.close)
        mini = mini_model if model == "pictures" else mini_video
        remote = on_ranks(pool, open_checkpoint(mini.WEIGHTS), Degrees(), "fp32", "auto", lambda: None)
        asked, noise = mini.requests(8)
        if model == "pictures":
            mini_model.sample_latents(remote, asked, noise, 10, 0, 3.0)
        else:
            mini_video.sample(remote, asked, noise, 10, 0, 2.0)
    return torch.stack(found).view(-1, LAYERS[model], found[0].shape[0])


def above_the_mean(ranks: int) -> float:
    """Expected largest of so many standard normal values."""
    return float(torch.randn(200_000, ranks, generator=torch.Generator().manual_seed(0)).amax(1).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    layers, spreads = [], []
    for model in LAYERS:
        for layer, of_heads in enumerate(seen_in_a_run(model).mean(0)):
            spread = float(of_heads.std(correction=0) / of_heads.mean())
            spreads.append(spread)
            shares = [round(float(each), 3) for each in of_heads]
            layers.append({"model": model, "layer": layer, "shares": shares, "spread": round(spread, 3)})
    # Two heads' deviation from their mean is smaller than that of many by sqrt(2), in the mean.
    spread = math.sqrt(2 * sum(each**2 for each in spreads) / len(spreads))
    busiest = [
        {"heads": heads, "ranks": ranks, "busiest": round(spread * above_the_mean(ranks) / math.sqrt(heads / ranks), 3)}
        for heads, ranks in REAL
    ]
    head = {"what": "head_density", "date": date.today().isoformat(), "hardware": measuring.hardware()}
    measuring.report(head | {"layers": layers, "spread": round(spread, 3), "worked_out": busiest}, options.out)


if __name__ == "__main__":
    main()
