"""The ratio of two GPUs' speeds by planning/known_gpus.py, beside published ratios of the same work on both.

    python -m benchmarks.predictions.pairs

No device is needed.
"""

import statistics
from dataclasses import dataclass

from parallel_backend.planning.known_gpus import KNOWN


@dataclass(frozen=True)
class Pair:
    slower: str
    faster: str
    ratio: float
    """Published."""
    work: str

    @property
    def off(self) -> float:
        """The known ratio's relative error."""
        return KNOWN[self.faster].operations / KNOWN[self.slower].operations / self.ratio - 1


PAIRS = (
    Pair("RTX 3090", "RTX 4090", 6.93 / 4.08, "SDXL 1024, PyTorch: onediff 998"),
    Pair("RTX 3090", "RTX 4090", 13.92 / 7.21, "SDXL 1024, compiled by nexfort: onediff 998"),
    Pair("RTX 3090", "RTX 4090", 15.931 / 7.417, "SDXL, compiled by oneflow: onediff 1014"),
    Pair("RTX 3090", "RTX 4090", 39.285 / 17.125, "SD 2 768, compiled by oneflow: onediff 1014"),
    Pair("RTX 5070 Ti", "RTX 4090", 1190.24 / 714.44, "Qwen3 4B, prefill of 10,000 tokens: pegainfer 69"),
    Pair("RTX 5070 Ti", "RTX 4090", 1012.58 / 714.76, "Qwen3.5 4B, prefill of 10,000 tokens: pegainfer 69"),
    Pair("RTX 4090 D", "H100", 30.5 / 9.77, "Wan 14B 480p, Diffusers: LightX2V's README"),
    Pair("RTX 4090 D", "H100", 22.66 / 7.35, "Wan 14B 480p, FastVideo: LightX2V's README"),
    Pair("RTX 4090 D", "H100", 20.26 / 5.18, "Wan 14B 480p, LightX2V: its README"),
)
GEFORCE = tuple(pair for pair in PAIRS if pair.faster.startswith("RTX"))


def main() -> None:
    print("| work | GPUs | published ratio | off by |\n|---|---|---|---|")
    for pair in PAIRS:
        print(f"| {pair.work} | {pair.slower}, {pair.faster} | {pair.ratio:.2f} | {100 * pair.off:+.0f} % |")
    errors = [abs(pair.off) for pair in GEFORCE]
    print(f"\nGeForce: median {100 * statistics.median(errors):.0f} %, worst {100 * max(errors):.0f} %")


if __name__ == "__main__":
    main()
