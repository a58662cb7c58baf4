"""ComfyUI's VAEs of real widths with random weights, fp32, in bands on 1, 2 and 4 CPU ranks. Linux, ComfyUI's Python.

    python -m benchmarks.speed.vae wan21 --comfyui FOLDER --out benchmarks/results/vae_wan21_NAME_DATE.json

For each rank: seconds of CPU time, which other work on the machine stretches less than the seconds on the clock, and memory
at the peak above what the process had before (weights included there).
"""

import argparse
import importlib
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import measuring
from parallel_backend.client.vae import Made, Part, RemoteVAE
from parallel_backend.processes.pool import Pool
from testing.vaes import made_of, randomise

SETTINGS = (("comfy.cli_args", "args.cpu", True),)


@dataclass(frozen=True)
class Subject:
    """One part of a VAE, and what it is given."""

    what: str
    kind: str
    """ComfyUI's class below comfy.ldm."""
    part: Part
    shape: tuple[int, ...]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    unit: int = 1
    """Rows of the input that stay together."""


_KL = {"double_z": True, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128, "ch_mult": [1, 2, 4, 4]}
_KL |= {"num_res_blocks": 2, "attn_resolutions": [], "z_channels": 4}
_SD = {"ddconfig": _KL, "embed_dim": 4}
_HUNYUAN = {"ddconfig": _KL | {"z_channels": 16, "conv3d": True, "time_compress": 4}, "embed_dim": 16}
_WAN = {"dim": 96, "z_dim": 16, "temperal_downsample": [False, True, True]}
_KL_CLASS, _WAN_CLASS = "models.autoencoder.AutoencoderKL", "wan.vae.WanVAE"
_LTX_CLASS = "lightricks.vae.causal_video_autoencoder.VideoVAE"
_VIDEO = (1, 3, 9, 256, 256)
SUBJECTS = {
    "sd": Subject("SD's decoder, a picture of 512 x 512", _KL_CLASS, "decoder", (1, 4, 64, 64), _SD),
    "sd-encode": Subject("SD's encoder, 512 x 512", _KL_CLASS, "encoder", (1, 3, 512, 512), _SD, 8),
    "wan21": Subject("Wan 2.1's decoder, 9 frames of 256 x 256", _WAN_CLASS, "decoder", (1, 16, 3, 32, 32), _WAN),
    "wan21-encode": Subject("Wan 2.1's encoder, 9 frames of 256 x 256", _WAN_CLASS, "encoder", _VIDEO, _WAN, 8),
    "hunyuan": Subject("HunyuanVideo's decoder, 9 frames of 128 x 128", _KL_CLASS, "decoder", (1, 16, 3, 16, 16), _HUNYUAN),
    "ltx": Subject("LTX-Video 0.9's decoder, 17 frames of 256 x 256", _LTX_CLASS, "decoder", (1, 128, 3, 8, 8)),
}


def figures(watch: measuring.Watch) -> list[dict[str, float]]:
    """By process."""
    each = zip(watch.cpu_seconds(), watch.peak_bytes(), watch.resident_bytes, strict=True)
    return [{"cpu_seconds": round(cpu, 1), "peak_MB": round((peak - before) / 1e6)} for cpu, peak, before in each]


def measure(subject: Subject, ranks: int, made: Made, x: torch.Tensor) -> tuple[dict, torch.Tensor]:
    """Figures, and what came of x."""
    with closing(Pool(("cpu",) * ranks, threads=1)) as pool:
        remote = RemoteVAE(pool, "vae", subject.part, lambda: made)
        corner = x[..., : max(2, ranks) * subject.unit, : 2 * subject.unit]
        remote.run(corner, subject.unit, lambda: None)
        watch, started = measuring.Watch(pool.whole.ranks.pids), time.perf_counter()
        output = remote.run(x, subject.unit, lambda: None)
        return {
            "seconds": round(time.perf_counter() - started, 1),
            "by_rank": figures(watch),
        }, output


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("subject", choices=SUBJECTS)
    options.add_argument("--comfyui", type=Path, default=Path.home() / "ComfyUI")
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    torch.set_num_threads(1)
    sys.path.append(str(given.comfyui))
    importlib.import_module("comfy.cli_args").args.cpu = True
    subject = SUBJECTS[given.subject]
    module, _, name = f"comfy.ldm.{subject.kind}".rpartition(".")
    with torch.inference_mode():
        model = randomise(getattr(importlib.import_module(module), name)(**subject.arguments), seed=0)
    made = made_of(model, subject.part, str(given.comfyui), SETTINGS)
    x = torch.randn(subject.shape, generator=torch.Generator().manual_seed(1))
    found, outputs = {}, []
    for ranks in (1, 2, 4):
        found[str(ranks)], output = measure(subject, ranks, made, x)
        outputs.append(output)
        found[str(ranks)]["largest_difference"] = float((output - outputs[0]).abs().max() / outputs[0].abs().max())
    result = {
        "date": date.today().isoformat(),
        "hardware": measuring.hardware(),
        "model": f"{subject.what}, random weights, fp32",
        "scope": "one run of the part; no loading. Differences are from one rank's result, as a part of its largest value.",
        "weights_MB": round(sum(tensor.nbytes for tensor in made.tensors.values()) / 1e6),
        "ranks": found,
    }
    measuring.report(result, given.out)


if __name__ == "__main__":
    main()
