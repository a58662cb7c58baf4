"""Machines and models that are not there: published hardware, and models' sizes without their files."""

from dataclasses import dataclass

from parallel_backend.client.placement.pipeline_model import HOP_SECONDS
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.validate import check_model

from .cost_model import Job
from .links import Link
from .machine import BlockCost, Device, Links, Machine, alike, pairs_of
from .workload import Workload

GB = 10**9
BF16 = 2


LAUNCH = 0.6e-3
"""Seconds that a block takes beside its arithmetic where PyTorch starts its kernels one by one; compiled ones: nothing."""


@dataclass(frozen=True)
class Hardware:
    """`operations`: a second that a model's blocks reach in bf16, not the data sheet's. `memory`: bytes of a device.

    `launch`: see LAUNCH. `socket`, `bridge`: see machine.Links.
    """

    name: str
    operations: float
    memory: int
    link: Link
    launch: float = LAUNCH
    socket: int = 0
    bridge: float = 0.0

    def machine(self, count: int, model: "Model", hop: float = HOP_SECONDS) -> Machine:
        """So many of these devices, as they run this model."""
        blocks, nothing = {"blocks": model.block(self)}, BlockCost(0.0, 0.0, 0.0)
        devices = tuple(Device(f"cuda:{index}", self.name, blocks, nothing, self.memory) for index in range(count))
        return Machine(devices, Links(alike(count, self.link), 1.0, self.socket, self.bridge), hop=hop)


@dataclass(frozen=True)
class Model:
    """`weights`: parameters in the blocks; `others`: around them. `text`: tokens of a prompt. `side`: pixels of a token.

    `joint`: see cost.Job. `prompts`: of a model call, two with classifier-free guidance. `frames` of latents of a video.
    """

    layers: int
    hidden: int
    heads: int
    weights: float
    others: float
    text: int
    joint: bool = True
    prompts: int = 1
    side: int = 16
    frames: int = 1

    def block(self, on: Hardware) -> BlockCost:
        linear = 24 if self.joint else 28  # cross attention has two more layers for each of the image's tokens
        return BlockCost(on.launch, linear * self.hidden**2 / on.operations, pairs_of(self.hidden) * 24 / linear)

    def job(self, name: str, height: int, width: int, steps: int, warm_up: int = 1, text_in_bands: bool = False) -> Job:
        """A picture of so many pixels, in bf16."""
        rows, columns = height // self.side, width // self.side
        each = round(self.weights * BF16 / self.layers)
        outer = round(self.others * BF16 / 2)

        def check(degrees: Degrees) -> None:
            check_model(degrees, heads=self.heads, blocks=self.layers)

        subject = Workload(
            name=name,
            kind=name,
            dtype="bf16",
            shape=(1, 16, height // 8, width // 8),
            entries=self.prompts,
            steps=steps,
            prompt=self.text,
            blocks=("blocks.0",) * self.layers,
            block_bytes=(each,) * self.layers,
            first_bytes=outer,
            last_bytes=outer,
            shared_bytes=0,
            text=self.text,
            image=self.frames * rows * columns,
            rows=rows,
            token_bytes=BF16 * self.hidden,
            carried=(0,) * (self.layers + 1),
            check=check,
            warm_up=warm_up,
        )
        return Job(subject, self.joint, text_in_bands)


MODELS = {
    "flux-dev": Model(57, 3072, 24, 11.8e9, 0.1e9, 512),
    "flux-schnell": Model(57, 3072, 24, 11.8e9, 0.1e9, 256),
    "sd3-medium": Model(24, 1536, 24, 2.0e9, 0.05e9, 333, prompts=2),
    "pixart": Model(28, 1152, 16, 0.6e9, 0.01e9, 120, joint=False, prompts=2),
    "hunyuan-video": Model(60, 3072, 24, 12.8e9, 0.2e9, 256, frames=33),
}
"""By the name that the command line takes. Their blocks count as alike, although Flux's and HunyuanVideo's are of two kinds:
both have 12 hidden^2 weights for a token.
"""
HARDWARE = {
    "L40": Hardware("L40 (PCIe)", 120e12, 48 * GB, Link(30e-6, 3.0e9), socket=4, bridge=2.0e9),
    "A100": Hardware("A100 (NVLink)", 150e12, 80 * GB, Link(30e-6, 200e9)),
    "H100": Hardware("H100 (NVLink)", 550e12, 80 * GB, Link(30e-6, 300e9)),
}
"""By the name that the command line takes: L40 on PCIe, in two sockets of four, without P2P; A100 and H100 on NVLink, at two
thirds of its data sheet. Where each figure is from: docs/planner.md.
"""
