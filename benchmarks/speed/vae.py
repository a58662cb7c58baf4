"""A VAE decoder of SD's sizes, random weights, whole in this process and in bands on 1, 2 and 4 CPU ranks. Linux only.

    python -m benchmarks.speed.vae --side 512 --out benchmarks/results/vae_sd_NAME_DATE.json

For each rank: seconds of CPU time, which other work on the machine stretches less than the seconds on the clock, and memory
at the peak above what the process had before (weights included there).
"""

import argparse
import os
import time
from contextlib import closing
from datetime import date
from pathlib import Path

import torch

from benchmarks.harness import measuring
from parallel_backend.client.vae import RemoteDecoder
from parallel_backend.processes.pool import Pool

from .first_picture import autoencoder, decoder_weights

WIDTHS = (128, 256, 512, 512)


def figures(watch: measuring.Watch) -> list[dict[str, float]]:
    """By process."""
    each = zip(watch.cpu_seconds(), watch.peak_bytes(), watch.resident_bytes, strict=True)
    return [{"cpu_seconds": round(cpu, 1), "peak_MB": round((peak - before) / 1e6)} for cpu, peak, before in each]


def measure(ranks: int, weights: dict[str, torch.Tensor], latent: torch.Tensor, expected: torch.Tensor) -> dict:
    with closing(Pool(("cpu",) * ranks, threads=1)) as pool:
        decoder = RemoteDecoder(pool, "vae", lambda: weights)
        decoder.decode(latent[:, :, :ranks, :1], lambda: None)
        watch, started = measuring.Watch(pool.pids), time.perf_counter()
        found = decoder.decode(latent, lambda: None)
        return {
            "seconds": round(time.perf_counter() - started, 1),
            "by_rank": figures(watch),
            "MB_sent_by_rank": [round(sum(sent.values()) / 1e6, 1) for sent in decoder.bytes_sent],
            "largest_difference": float((found - expected).abs().max()),
        }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--side", type=int, default=512, help="of the picture, in pixels")
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    torch.set_num_threads(1)
    vae, side = autoencoder(4, WIDTHS), given.side // 8
    latent = torch.randn(1, 4, side, side, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        vae.decode(latent[:, :, :1, :1])
        watch, started = measuring.Watch([os.getpid()]), time.perf_counter()
        expected = vae.decode(latent).sample
    whole = {"seconds": round(time.perf_counter() - started, 1), **figures(watch)[0]}
    weights = decoder_weights(vae)
    result = {
        "date": date.today().isoformat(),
        "hardware": measuring.hardware(),
        "model": f"AutoencoderKL of widths {WIDTHS}, random weights, fp32, one picture of {given.side} x {given.side}",
        "scope": "decoding; no loading",
        "whole": whole,
        "ranks": {str(ranks): measure(ranks, weights, latent, expected) for ranks in (1, 2, 4)},
    }
    measuring.report(result, given.out)


if __name__ == "__main__":
    main()
