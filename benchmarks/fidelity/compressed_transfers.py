"""What one byte for each value costs and saves Ulysses: pictures of the mini model, bytes, and time on links of given speed.

    python -m benchmarks.fidelity.compressed_transfers --images 40 --out benchmarks/results/compressed_transfers_X.json

Pictures: PSNR to the run with full transfers, and digits read, two ranks. Time: packing and unpacking of one block's values
of Flux at 1024 x 1024 is measured, in bf16 on a CUDA device where there is one, and the time on a link is worked out from
the bytes: nothing is sent. `break_even_gigabytes_per_second`: on slower links it pays.
"""

import argparse
import math
import statistics
import time
from datetime import date
from pathlib import Path

import torch

from benchmarks.harness import measuring
from benchmarks.harness.mini_model import CHUNK, judge, opened, requests, sample
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.pool import Pool
from parallel_backend.rank.comm.transfer_codec import KINDS, Codec
from testing.models import on_ranks

TOKENS, HEADS, SIZE = 4096 + 512, 24, 128  # Flux at 1024 x 1024
LINKS = (1, 3, 6, 12, 25)  # GB/s


def pictures(count: int, steps: int, ranks: int) -> list[dict]:
    symbols, noise = requests(count)
    pool = Pool(("cpu",) * ranks, threads=1)
    rows, exact = [], None
    for kind in ("full", *KINDS):
        model = on_ranks(pool, opened(), Degrees(ulysses=ranks), "fp32", "auto", lambda: None, transfer_dtype=kind)
        images = sample(model, symbols, noise, steps, 0, 3.0)
        exact = images if exact is None else exact
        stats = model.close_run(model.open_run(), lambda: None)
        sent = sum(rank.bytes_sent.get("ulysses", 0) for rank in stats)
        batches = math.ceil(count / CHUNK)
        row = {"transfer_dtype": kind, **judge(images, exact, symbols)}
        rows.append(row | {"megabytes_per_step_fp32": round(sent / steps / batches / 1e6, 2)})
        print(rows[-1], flush=True)
    pool.close()
    return rows


def codec_seconds(kind: str, ranks: int, device: torch.device, dtype: torch.dtype) -> float:
    """Of packing and unpacking what one rank sends and receives in one block: q, k, v, and the output."""
    codec, values = Codec(kind), 4 * TOKENS // ranks * HEADS * SIZE * (ranks - 1) // ranks
    x = torch.randn(values, device=device).to(dtype)
    packed, out = torch.empty(codec.nbytes(values, SIZE), dtype=torch.uint8, device=device), torch.empty_like(x)
    taken = []
    for _ in range(8):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter() if device.type == "cuda" else time.thread_time()
        codec.encode(x, SIZE, packed)
        codec.decode(packed, SIZE, out)
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append((time.perf_counter() if device.type == "cuda" else time.thread_time()) - started)
    return statistics.median(taken[2:])


def times(ranks: int) -> dict:
    """One block of Flux, one rank: milliseconds of packing, and on links."""
    cuda = torch.cuda.is_available()
    device, dtype = (torch.device("cuda"), torch.bfloat16) if cuda else (torch.device("cpu"), torch.float32)
    values = 4 * TOKENS // ranks * HEADS * SIZE * (ranks - 1) // ranks
    full = values * dtype.itemsize
    rows: dict = {"device": torch.cuda.get_device_name() if cuda else "CPU, 1 thread", "dtype": str(dtype)}
    rows["full"] = {"megabytes": round(full / 1e6, 2), "link_ms": {f"{g} GB/s": round(full / g / 1e6, 2) for g in LINKS}}
    for kind in KINDS:
        packing, packed = codec_seconds(kind, ranks, device, dtype), Codec(kind).nbytes(values, SIZE)
        rows[kind] = {
            "megabytes": round(packed / 1e6, 2),
            "packing_ms": round(1000 * packing, 3),
            "link_and_packing_ms": {f"{g} GB/s": round(packed / g / 1e6 + 1000 * packing, 2) for g in LINKS},
            "break_even_gigabytes_per_second": round((full - packed) / packing / 1e9, 2),
        }
        print(kind, rows[kind], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=40)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "date": date.today().isoformat(),
        "hardware": measuring.hardware(),
        "images": options.images,
        "steps": options.steps,
        "ranks": options.ranks,
        "pictures": pictures(options.images, options.steps, options.ranks),
        "one_block_of_flux_1024": times(options.ranks),
    }
    measuring.report(result, options.out)


if __name__ == "__main__":
    main()
