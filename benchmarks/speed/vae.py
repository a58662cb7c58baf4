"""VAEs of real widths with random weights, fp32, in bands on 1, 2 and 4 CPU ranks. Linux only.

    python -m benchmarks.speed.vae wan21 --out benchmarks/results/vae_wan21_NAME_DATE.json

For each rank: seconds of CPU time, which other work on the machine stretches less than the seconds on the clock, and memory
at the peak above what the process had before (weights included there).
"""

import argparse
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import measuring
from parallel_backend.processes.pool import Pool
from parallel_backend.vaes import VAES
from parallel_backend.vaes.base import Part, Weights
from testing import tiny
from testing.vaes import OnRanks


@dataclass(frozen=True)
class Subject:
    """One part of a VAE, and what it is given."""

    what: str
    kind: str
    part: Part
    config: Mapping[str, Any]
    shape: tuple[int, ...]
    scale: int
    channels: int
    """Of its output."""


_WAN = {"dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "channels": 3}
_WAN |= {"is_residual": False, "patch": 1}
_WAN22 = {"dim": 128, "z_dim": 48, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "channels": 12}
_WAN22 |= {"is_residual": True, "patch": 2}
_HUNYUAN = {"channels": 3, "widths": [128, 256, 512, 512], "z": 16, "chunked": True, "quant": True}
_KL = _HUNYUAN | {"z": 4, "times": [0, 0, 0], "chunked": False}
_HUNYUAN_15 = {"kind": "video", "channels": 3, "z": 32, "chunked": True}
_HUNYUAN_IMAGE = {"kind": "image", "channels": 3, "z": 64, "chunked": False}
_LTX_ENCODER = [["compress_space_res", 2], ["compress_time_res", 2], ["compress_all_res", 2], ["compress_all_res", 2]]
_LTX = {
    "channels": 3,
    "blocks": {
        "encoder": [block for name, times in _LTX_ENCODER for block in (["res_x", 4], [name, {"multiplier": times}])],
        "decoder": [["res_x", 5], *[["compress_all", {"residual": True, "multiplier": 2}], ["res_x", 5]] * 3],
    },
    "padding_modes": {"encoder": "zeros", "decoder": "reflect"},
    "patch_size": 4,
    "latent_channels": 128,
    "latent_log_var": "uniform",
    "norm_layer": "pixel_norm",
    "causal_decoder": False,
    "timed": False,
    "timestep": 0.05,
}
_UP, _DOWN = {"in_time": [True, True, False]}, {"in_time": [False, True, True]}
SUBJECTS = {
    "sd": Subject(
        "SD's decoder, a picture of 512 x 512", "AutoencoderKL", "decoder", _KL | {"layers": 3}, (1, 4, 64, 64), 8, 3
    ),
    "wan21": Subject(
        "Wan 2.1's decoder, 9 frames of 256 x 256", "AutoencoderKLWan", "decoder", _WAN | _UP, (1, 16, 3, 32, 32), 8, 3
    ),
    "wan21-encode": Subject(
        "Wan 2.1's encoder, 9 frames of 256 x 256", "AutoencoderKLWan", "encoder", _WAN | _DOWN, (1, 3, 9, 256, 256), 8, 16
    ),
    "wan22": Subject(
        "Wan 2.2's decoder at half its width, 5 frames of 256 x 256",
        "AutoencoderKLWan",
        "decoder",
        _WAN22 | _UP,
        (1, 48, 2, 16, 16),
        16,
        3,
    ),
    "sd-encode": Subject(
        "SD's encoder, a picture of 512 x 512",
        "AutoencoderKL",
        "encoder",
        _KL | {"layers": 2},
        (1, 3, 512, 512),
        8,
        4,
    ),
    "hunyuan": Subject(
        "HunyuanVideo's decoder, 9 frames of 128 x 128",
        "HunyuanVideo",
        "decoder",
        _HUNYUAN | {"layers": 3, "times": [2, 2, 1]},
        (1, 16, 3, 16, 16),
        8,
        3,
    ),
    "hunyuan-encode": Subject(
        "HunyuanVideo's encoder, 9 frames of 128 x 128",
        "HunyuanVideo",
        "encoder",
        _HUNYUAN | {"layers": 2, "times": [1, 2, 2]},
        (1, 3, 9, 128, 128),
        8,
        16,
    ),
    "hunyuan15": Subject(
        "HunyuanVideo 1.5's decoder at a quarter of its width, 9 frames of 256 x 256",
        "HunyuanVideo 1.5",
        "decoder",
        _HUNYUAN_15
        | {"widths": [256, 256, 128, 64, 32], "layers": 3}
        | {"factors": [[2, 2, 2], [2, 2, 2], [1, 2, 2], [1, 2, 2]]},
        (1, 32, 3, 16, 16),
        16,
        3,
    ),
    "hunyuan-image": Subject(
        "HunyuanImage 2.1's decoder at half its width, a picture of 512 x 512",
        "HunyuanImage 2.1",
        "decoder",
        _HUNYUAN_IMAGE | {"widths": [512, 512, 256, 256, 128, 64], "layers": 3, "factors": [[2, 2]] * 5},
        (1, 64, 16, 16),
        32,
        3,
    ),
    "ltx": Subject(
        "LTX-Video's decoder at half its width, 17 frames of 256 x 256",
        "LTX-Video",
        "decoder",
        _LTX | {"width": 512},
        (1, 128, 3, 8, 8),
        32,
        3,
    ),
    "ltx-encode": Subject(
        "LTX-Video's encoder at half its width, 17 frames of 256 x 256",
        "LTX-Video",
        "encoder",
        _LTX | {"width": 64},
        (1, 3, 17, 256, 256),
        32,
        128,
    ),
    "cosmos": Subject(
        "Cosmos' decoder, 9 frames of 256 x 256",
        "Cosmos",
        "decoder",
        {"latent_channels": 16, "widths": [256, 512, 512, 512], "layers": 3},
        (1, 16, 2, 32, 32),
        8,
        3,
    ),
    "h3": Subject(
        "2 of the 36 layers of MiniMax H3's decoder, 4 tiles of 256 x 256, 28 frames",
        "AutoencoderKLMiniMaxH3",
        "decoder",
        {"quant": [24, 24], "in_channels": 24, "out_channels": 3, "num_layers": 2}
        | {"num_attention_heads": 32, "num_register_tokens": 4},
        (4, 24, 7, 16, 16),
        16,
        3,
    ),
}


def figures(watch: measuring.Watch) -> list[dict[str, float]]:
    """By process."""
    each = zip(watch.cpu_seconds(), watch.peak_bytes(), watch.resident_bytes, strict=True)
    return [{"cpu_seconds": round(cpu, 1), "peak_MB": round((peak - before) / 1e6)} for cpu, peak, before in each]


def measure(subject: Subject, ranks: int, weights: Weights, x: torch.Tensor) -> tuple[dict, torch.Tensor]:
    """Figures, and what came of x."""
    unit = subject.scale if subject.part == "encoder" else 1
    with closing(Pool(("cpu",) * ranks, threads=1)) as pool:
        remote = OnRanks(pool, "vae", lambda: weights, kind=subject.kind, part=subject.part)
        independent = VAES[subject.kind].independent
        run = remote.tiles if independent else lambda x: remote.decode(x, lambda: None)
        run(x[:ranks, ..., :2, :2] if independent else x[..., : max(2, ranks) * unit, : 2 * unit])
        watch, started = measuring.Watch(pool.pids), time.perf_counter()
        found = run(x)
        return {
            "seconds": round(time.perf_counter() - started, 1),
            "by_rank": figures(watch),
            "MB_sent_by_rank": [round(sum(sent.values()) / 1e6, 1) for sent in remote.bytes_sent],
        }, found.clone()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("subject", choices=SUBJECTS)
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    torch.set_num_threads(1)
    subject = SUBJECTS[given.subject]
    config = dict(subject.config)
    model = tiny.randomise(VAES[subject.kind].build(subject.part, config), seed=0)
    weights = Weights(config, dict(model.state_dict()), subject.scale, subject.channels)
    x = torch.randn(subject.shape, generator=torch.Generator().manual_seed(1))
    found, outputs = {}, []
    for ranks in (1, 2, 4):
        found[str(ranks)], output = measure(subject, ranks, weights, x)
        outputs.append(output)
        found[str(ranks)]["largest_difference"] = float((output - outputs[0]).abs().max() / outputs[0].abs().max())
    result = {
        "date": date.today().isoformat(),
        "hardware": measuring.hardware(),
        "model": f"{subject.what}, random weights, fp32",
        "scope": "one run of the part; no loading. Differences are from one rank's result, as a part of its largest value.",
        "weights_MB": round(sum(tensor.nbytes for tensor in weights.tensors.values()) / 1e6),
        "ranks": found,
    }
    measuring.report(result, given.out)


if __name__ == "__main__":
    main()
