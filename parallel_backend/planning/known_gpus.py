"""Published speed, memory and PCIe links of GPUs, for predictions about GPUs that this machine does not have."""

import re
from dataclasses import dataclass

from parallel_backend.placement.links import Link
from parallel_backend.placement.residency import GB

PCIE_4 = 25e9
"""Bytes a second from page-locked host memory to a GPU with 16 lanes of PCIe 4.0: four fifths of the standard's 31.5e9.
Several GPUs that copy at once may be limited by the host's own memory, which is not modelled."""
X4, X8 = (Link(30e-6, bandwidth) for bandwidth in (4e9, 8e9))
"""4 and 8 lanes of PCIe 4.0 between two GPUs, if all GPUs send at once. x8 is fitted to published runs
(benchmarks/predictions/published.py). x4 is taken to be half of it."""


@dataclass(frozen=True)
class KnownGpu:
    operations: float
    """Operations a second that a model's blocks reach in bf16, not the data sheet's."""
    memory: int
    """Bytes."""


KNOWN = {
    name: KnownGpu(operations * 1e12, memory * GB)
    for name, operations, memory in (
        ("RTX 3060", 17, 12),
        ("RTX 3080", 40, 10),
        ("RTX 3090", 47, 24),
        ("RTX 3090 Ti", 53, 24),
        ("RTX 4060 Ti", 29, 16),
        ("RTX 4070", 39, 12),
        ("RTX 4070 SUPER", 47, 12),
        ("RTX 4070 Ti", 53, 12),
        ("RTX 4070 Ti SUPER", 59, 16),
        ("RTX 4080", 65, 16),
        ("RTX 4080 SUPER", 70, 16),
        ("RTX 4090", 110, 24),
        ("RTX 4090 D", 98, 24),
        ("RTX 5060 Ti", 32, 16),
        ("RTX 5070", 41, 12),
        ("RTX 5070 Ti", 59, 16),
        ("RTX 5080", 75, 16),
        ("RTX 5090", 140, 32),
        ("RTX 2000 Ada", 40, 16),
        ("RTX PRO 5000", 180, 48),
        ("L20", 80, 48),
        ("L40", 120, 48),
        ("A100", 150, 80),
        ("H20", 100, 96),
        ("H100", 550, 80),
        ("H200", 550, 141),
        ("GB200", 1400, 186),
    )
}
"""Name -> speed and memory. Of a GPU with several sizes of memory, the size that most have. GeForce: two thirds of the dense
bf16 operations with fp32 accumulation, at which these boards run at half of their rate. Two thirds is L40's share in
published runs. Source: appendices of NVIDIA's white papers on GA102, AD102 and RTX Blackwell; if one lists only "AI TOPS",
an eighth of those (Ada) or a sixteenth (Blackwell). Others: docs/planner.md."""
RUNS_OFF, PAIRS_OFF = (5, 22), (17, 38)
"""Errors in percent, median and largest: of the seconds of published runs on several GPUs, predicted from one GPU's
(benchmarks/predictions/published.py); of the published ratios of two GeForce GPUs' speeds (benchmarks/predictions/pairs.py).
"""
_MAKE_AND_SIZE = re.compile(r"NVIDIA |GeForce | Generation$| Blackwell$|[ -](SXM\d|\d+GB|HBM\d\w?)\b")


def known_gpu(kind: str) -> KnownGpu | None:
    """Return the GPU that torch names `kind`, such as NVIDIA GeForce RTX 3090. None for other ones, such as laptops'."""
    return KNOWN.get(_MAKE_AND_SIZE.sub("", kind))
