"""Machines and models that are not there: published hardware, and models' sizes without their files."""

from dataclasses import dataclass, replace

from benchmarks.predictions.bridge import BridgedLinks
from parallel_backend.own_class.built.built_class import StreamKeys, pairs_of
from parallel_backend.placement.links import Link, alike
from parallel_backend.placement.model_sizes import ModelSizes
from parallel_backend.placement.pipeline_model import HOP_SECONDS
from parallel_backend.planning.calibrated_costs import BlockCost, Calibration, DeviceCost
from parallel_backend.planning.known_gpus import KNOWN, PCIE_4, X8, KnownGpu
from parallel_backend.planning.machine import Device, Machine
from parallel_backend.planning.workload import Workload

BF16 = 2
"""Bytes of a value."""
PCIE_5 = 2 * PCIE_4
"""See PCIE_4; for PCIe 5.0."""
LAUNCH = 0.6e-3
"""Seconds that a block takes beside its arithmetic where PyTorch starts its kernels one by one; compiled ones: nothing."""


@dataclass(frozen=True)
class Hardware:
    name: str
    gpu: KnownGpu
    link: Link
    launch: float = LAUNCH
    """See LAUNCH."""
    socket: int = 0
    bridge: float = 0.0
    """See BridgedLinks."""
    copies: float = PCIE_4
    """Bytes a second from host memory to a device."""

    def calibration(self, count: int, model: "Model", hop: float = HOP_SECONDS) -> Calibration:
        """So many of these devices, as they run this model."""
        cost = DeviceCost({"blocks": model.block(self)}, BlockCost(0.0, 0.0, 0.0))
        devices = tuple(Device(f"cuda:{index}", self.name, self.gpu.memory, copies=self.copies) for index in range(count))
        links = BridgedLinks(alike(count, self.link), 1.0, self.socket, self.bridge)
        return Calibration(Machine(devices, links), (cost,) * count, hop)


def with_block(calibration: Calibration, block: BlockCost) -> Calibration:
    """The same with every block as costly as this one."""
    costs = tuple(replace(cost, blocks=dict.fromkeys(cost.blocks, block)) for cost in calibration.costs)
    return replace(calibration, costs=costs)


@dataclass(frozen=True)
class Model:
    layers: int
    hidden: int
    heads: int
    weights: float
    """Parameters in the blocks."""
    others: float
    """Parameters around the blocks."""
    text: int
    """Tokens of a prompt."""
    joint: bool = True
    """Text runs through the blocks, rather than being looked at by them."""
    prompts: int = 1
    """Prompts of a model call: two with classifier-free guidance."""
    side: int = 16
    """Pixels along a token's side."""
    frames: int = 1
    """Frames of a video's latent."""
    operations: int = 0
    """Those of a block's linear layers for a token, in hidden^2. 0: as many as are usual."""
    sharing: int = 1
    """Heads of keys and values, where several query heads share one."""

    def block(self, on: Hardware) -> BlockCost:
        # Cross attention has two more layers for each of the image's tokens.
        linear = self.operations or (24 if self.joint else 28)
        return BlockCost(on.launch, linear * self.hidden**2 / on.gpu.operations, pairs_of(self.hidden) * 24 / linear)

    def workload(
        self,
        name: str,
        height: int,
        width: int,
        steps: int,
        warm_up: int = 1,
        text_in_bands: bool = False,
        weight_bytes: int = BF16,
    ) -> Workload:
        """A picture of so many pixels, in bf16. `weight_bytes`: of a value of the blocks' weights."""
        rows, columns = height // self.side, width // self.side
        each = round(self.weights * weight_bytes / self.layers)
        outer = round(self.others * BF16 / 2)
        sizes = ModelSizes(
            block_bytes=(each,) * self.layers,
            ends=2 * outer,
            attention=((StreamKeys(True, (1,), self.hidden // self.heads),),) * self.layers,
            heads=self.heads,
            sharing=self.sharing,
            head_size=self.hidden // self.heads,
            hidden=self.hidden,
            itemsize=BF16,
            joint=self.joint,
        )
        return Workload(
            name=name,
            kind=name,
            dtype="bf16",
            shape=(1, 16, height // 8, width // 8),
            entries=self.prompts,
            steps=steps,
            prompt=self.text,
            blocks=("blocks.0",) * self.layers,
            sizes=sizes,
            grid=(self.frames, rows, columns) if self.frames > 1 else (rows, columns),
            text=self.text if self.joint else 0,
            warm_up=warm_up,
            text_in_bands=text_in_bands,
        )


MODELS = {
    "flux-dev": Model(57, 3072, 24, 11.8e9, 0.1e9, 512),
    "chroma": Model(57, 3072, 24, 8.8e9, 0.1e9, 512, prompts=2),
    "flux-schnell": Model(57, 3072, 24, 11.8e9, 0.1e9, 256),
    "sd3-medium": Model(24, 1536, 24, 2.0e9, 0.05e9, 333, prompts=2),
    "pixart": Model(28, 1152, 16, 0.6e9, 0.01e9, 120, joint=False, prompts=2),
    "hunyuan-video": Model(60, 3072, 24, 12.8e9, 0.2e9, 256, frames=33),
    "z-image": Model(30, 3840, 30, 5.4e9, 0.75e9, 256),
    "flux2-dev": Model(56, 6144, 48, 31.9e9, 0.4e9, 512),
    "qwen-image": Model(60, 3072, 24, 20.4e9, 0.04e9, 256, prompts=2),
    "qwen-image-2.1": Model(32, 4096, 32, 7.0e9, 0.13e9, 200, operations=26),
    "krea-2": Model(28, 6144, 48, 12.2e9, 0.66e9, 256, operations=23, sharing=4),
    "wan-2.2-14b": Model(40, 5120, 40, 14.2e9, 0.1e9, 512, joint=False, prompts=2, frames=21),
    "ltx-2.3": Model(48, 4096, 32, 20.6e9, 1.4e9, 1024, joint=False, side=32, frames=16),
    "minimax-h3": Model(50, 5376, 56, 18.2e9, 0.85e9, 512, side=32, frames=37, operations=27),
}
"""By the name that the command line takes. Their blocks count as alike, although Flux's and HunyuanVideo's are of two kinds:
both have 12 hidden^2 weights for a token. MiniMax H3 is the pruned model. The frames are those of five seconds. The words of
Qwen-Image 2.1 count in each step, although they run once a run.
"""
OLD_SERVER, X16 = Link(30e-6, 3e9), Link(30e-6, 14e9)
"""PCIe, if all GPUs send at once: L40 in the servers of the PipeFusion paper; 16 lanes of PCIe 4.0. Fitted to published runs
(published.py)."""
NVLINK_400, NVLINK_450, NVLINK_900 = (Link(30e-6, bandwidth) for bandwidth in (200e9, 300e9, 600e9))
"""Two thirds of the data sheets."""
HARDWARE = {
    "L40": Hardware("L40 (PCIe)", KNOWN["L40"], OLD_SERVER, socket=4, bridge=2.0e9),
    "L20": Hardware("L20 (PCIe x16)", KNOWN["L20"], X16),
    "RTX PRO 5000": Hardware("RTX PRO 5000 (PCIe x16)", KNOWN["RTX PRO 5000"], X16, copies=PCIE_5),
    "RTX 4090": Hardware("RTX 4090 (PCIe x8)", KNOWN["RTX 4090"], X8),
    "RTX 4090 x16": Hardware("RTX 4090 (PCIe x16)", KNOWN["RTX 4090"], X16),
    "RTX 3090": Hardware("RTX 3090 (PCIe x8)", KNOWN["RTX 3090"], X8),
    "RTX 3090 x16": Hardware("RTX 3090 (PCIe x16)", KNOWN["RTX 3090"], X16),
    "RTX 4080": Hardware("RTX 4080 (PCIe x8)", KNOWN["RTX 4080"], X8),
    "RTX 2000 Ada": Hardware("RTX 2000 Ada (PCIe x8)", KNOWN["RTX 2000 Ada"], X8),
    "A100": Hardware("A100 (NVLink)", KNOWN["A100"], NVLINK_400),
    "H20": Hardware("H20 (NVLink)", KNOWN["H20"], NVLINK_450, copies=PCIE_5),
    "H100": Hardware("H100 (NVLink)", KNOWN["H100"], NVLINK_450, copies=PCIE_5),
    "H200": Hardware("H200 (NVLink)", KNOWN["H200"], NVLINK_450, copies=PCIE_5),
    "GB200": Hardware("GB200 (NVLink)", KNOWN["GB200"], NVLINK_900, copies=PCIE_5),
}
"""By the name that the command line takes. L40 in two sockets of four, without P2P."""
