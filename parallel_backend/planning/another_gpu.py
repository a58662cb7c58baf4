"""Parallel Doctor's `another_gpu`: the gain from adding a GPU that this machine does not have."""

from dataclasses import dataclass, replace

from parallel_backend.core.setup import Offload
from parallel_backend.placement.gpu_overheads import CONTEXT
from parallel_backend.placement.residency import GB

from .calibrated_costs import BlockCost, CalibratedCosts, DeviceCost
from .known_gpus import KNOWN, PCIE_4, X4, X8, known_gpu
from .machine import Device
from .planner import Plan, plan

NONE, SAME = "none", "the same GPU again"
CARDS = ("RTX 3060", "RTX 3090", "RTX 4090", "RTX 5060 Ti", "RTX 5070 Ti", "RTX 5080", "RTX 5090")
"""Names in KNOWN."""
SLOTS = {"PCIe x4": (X4, PCIE_4 * 4 / 16), "PCIe x8": (X8, PCIE_4 * 8 / 16)}
"""Slot -> its link to another GPU, and bytes a second of copies from host memory."""


@dataclass(frozen=True)
class AnotherGpu:
    card: str
    """SAME, or a name in KNOWN."""
    slot: str

    @property
    def name(self) -> str:
        return self.card if self.card == SAME else f"{self.card} {KNOWN[self.card].memory // GB} GB"

    def __str__(self) -> str:
        return f"{self.name}, {self.slot}"


CHOICES = {str(choice): choice for choice in (AnotherGpu(card, slot) for card in (SAME, *CARDS) for slot in SLOTS)}
"""Value of the widget, other than NONE -> the GPU."""


def with_another(costs: CalibratedCosts, another: AnotherGpu) -> CalibratedCosts:
    """Return the costs with `another` after the devices that were measured.

    Its blocks cost those of the first device, times the ratio of both GPUs' known operations. What does not grow with the
    tokens is the host's and stays. Raises ValueError if the first device's speed is not known.
    """
    machine, links, first = costs.machine, costs.machine.links, costs.machine.devices[0]
    memory = first.total if another.card == SAME else KNOWN[another.card].memory
    link, copies = SLOTS[another.slot]
    device = Device(
        name=another.name,
        kind=f"{first.kind}, {another.slot}" if another.card == SAME else str(another),
        memory=None if memory is None else memory - CONTEXT,
        total=memory,
        copies=copies if first.copies else 0.0,
    )
    alone = replace(link, bandwidth=link.bandwidth * links.crowding)  # the slot's figures are for GPUs that all send
    number = len(machine.devices)
    links = replace(links, between=links.between | {(other, number): alone for other in range(number)})
    of_another = _scaled(costs.calibration.costs[0], 1.0, _times_as_slow(first, another))
    calibration = replace(
        costs.calibration,
        machine=replace(machine, devices=(*machine.devices, device), links=links),
        costs=(*costs.calibration.costs, of_another),
    )
    return replace(costs, calibration=calibration)


def plans(found: Plan, more: CalibratedCosts, offload: Offload) -> tuple[Plan, Plan]:
    """Return plans of the machine of `found` and of `more`, the same with another GPU, at the pace of the rehearsal.

    All devices are as much slower than calibrated as the one that was rehearsed alone, unless that one streams weights.
    """
    one = found.one_device
    planned = next(each for each in found.predictions if each.mode == one.mode)
    pace = 1.0 if one.most_streamed else one.seconds / planned.seconds

    def at_pace(costs: CalibratedCosts) -> Plan:
        devices = tuple(_scaled(cost, pace, pace) for cost in costs.calibration.costs)
        return plan(replace(costs, calibration=replace(costs.calibration, costs=devices)), offload=offload)

    return at_pace(found.costs), at_pace(more)


def _times_as_slow(first: Device, another: AnotherGpu) -> float:
    if another.card == SAME:
        return 1.0
    present = known_gpu(first.kind)
    if present is None:
        raise ValueError(
            f"another_gpu: the speed of {first.name} ({first.kind}) relative to other GPUs is not known. Choose "
            f"'{SAME}', or {NONE}."
        )
    return present.operations / KNOWN[another.card].operations


def _scaled(cost: DeviceCost, fixed: float, token: float) -> DeviceCost:
    """Return the cost with each BlockCost's `fixed` and `token` multiplied by these factors."""

    def scaled(part: BlockCost) -> BlockCost:
        return replace(part, fixed=fixed * part.fixed, token=token * part.token)

    return DeviceCost({name: scaled(block) for name, block in cost.blocks.items()}, scaled(cost.around))
