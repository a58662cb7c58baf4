"""The planner's table, for the Doctor's report and the command line."""

from collections.abc import Mapping

from .machine import Machine
from .modes import Mode
from .planner import Plan
from .prediction import Prediction, gigabytes

SHOWN = 12
"""Modes that are listed at most."""


def describe(plan: Plan) -> str:
    """The best ones, fastest first, and which to choose."""
    return "\n".join([summary(plan.costs.machine), *table(plan), *choices(plan)])


def summary(machine: Machine) -> str:
    """The machine's figures, as far as one line holds them."""
    links = machine.links
    text = f"{len(machine.devices)} x {machine.devices[0].kind}"
    if links.between:
        slowest = min(links.between.values(), key=lambda link: link.bandwidth)
        text += f", links {slowest.bandwidth / 1e9:.3g} GB/s, {slowest.latency * 1e6:.0f} us"
    if links.crowding > 1:
        text += f", {links.crowding:.2g} times slower when all send"
    if links.bridge:
        text += f", {links.bridge / 1e9:.3g} GB/s each way between groups of {links.socket}"
    return text


def table(plan: Plan, rehearsed: Mapping[Mode, float] | None = None) -> list[str]:
    """`rehearsed`: the Doctor's own seconds, which are listed behind the planned ones."""
    also = "" if rehearsed is None else ", rehearsed seconds"
    lines = [f"planned seconds{also}, against one device, largest memory of a rank, moved in a step over all ranks:"]
    one, fastest = plan.one_device, plan.predictions[:SHOWN]
    for found in (*fastest, *(() if one in fastest else (one,))):
        moved = f"{found.moved / 1e6:.0f} MB" if found.moved else "nothing"
        also = "" if rehearsed is None else f"{rehearsed[found.mode]:9.2f} s  "
        lines.append(
            f"{found.seconds:9.2f} s  {also}{one.seconds / found.seconds:5.2f}x  {gigabytes(found.most_memory):>8}  "
            f"{moved:>9}  {name(found.mode)}{'; does not fit: ' + found.lacks if found.lacks else ''}"
        )
    return lines


def beside(plan: Plan, rehearsed: Plan) -> str:
    """The table, beside what the Doctor rehearsed for the same workload."""
    seconds = {found.mode: found.seconds for found in rehearsed.predictions}
    seconds |= {plan.one_device.mode: rehearsed.one_device.seconds}
    head = f"what degrees auto goes by, from a calibration of a few seconds: {summary(plan.costs.machine)}"
    return "\n".join([head, *table(plan, seconds), *choices(plan)])


def choices(plan: Plan) -> list[str]:
    best, exact = plan.best, plan.best_exact
    if best is None:
        return ["nothing fits these devices"]
    lines = [f"best: {name(best.mode)}, {best.seconds:.2f} s"]
    if exact is None:
        lines.append("nothing that is exact throughout fits these devices")
    elif exact is not best:
        lines.append(f"best that is exact throughout: {name(exact.mode)}, {exact.seconds:.2f} s")
    return lines


def name(mode: Mode) -> str:
    if mode.device is not None:
        return "one device"
    return f"{mode} ({'exact' if mode.exact else 'approximate after the first step'})"


def said(found: Prediction, machine: Machine) -> str:
    """The choice in a line, for a node and the log."""
    names = ", ".join(machine.names[device] for device in found.mode.devices)
    if found.mode.device is not None:
        return f"one device, {names}, planned {found.seconds:.1f} s"
    return f"{found.mode.degrees} on {names}, planned {found.seconds:.1f} s"
