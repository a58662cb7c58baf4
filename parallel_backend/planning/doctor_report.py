"""What the doctor found, in words: the report of the node."""

from parallel_backend.core.degrees import AXES, WIDGETS
from parallel_backend.wire.messages import LinksProbed

from .doctor import AS_GOOD, Findings
from .links import Machine
from .modes import Mode
from .prediction import Prediction, Rehearsals, gigabytes

SHOWN = 10
"""So many modes are listed, and those of a single degree however slow they are."""


def describe(findings: Findings) -> str:
    situation = findings.situation
    parts = [
        _subject(situation),
        _machine(situation.machine),
        _blocks(situation),
        _table(findings),
        _impossible(findings),
        _advice(findings),
    ]
    return "\n\n".join(part for part in parts if part)


def settings(mode: Mode, machine: Machine) -> str:
    """The widgets that make this mode, to be copied."""
    degrees = mode.degrees
    devices = machine.devices if mode.device is None else (machine.devices[mode.device],)
    loader = {WIDGETS[axis]: getattr(degrees, axis) for axis in ("pipe", "tensor", "batch")} | {"devices": ",".join(devices)}
    config = {WIDGETS[axis]: getattr(degrees, axis) for axis in ("ulysses", "ring")}
    if degrees.patch > 1:
        config |= {"patch_mode": degrees.patch_mode, "patch_degree": degrees.patch}
    lines = [
        f"Parallel DiT Loader: {_listed(loader)}",
        f"Ulysses Config (or the parallel_config of this node): {_listed(config)}",
    ]
    if mode.bands > 1:
        sampler = {"num_pipeline_patch": mode.bands, "warmup_steps": 1}
        lines.append(f"PipeFusion Sampler or Apply PipeFusion: {_listed(sampler)}")
    return "\n".join(lines)


def _listed(widgets: dict[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in widgets.items())


def _subject(situation: Rehearsals) -> str:
    subject = situation.subject
    return (
        f"{subject.name}: {subject.kind}, {subject.dtype}, {len(subject.blocks)} blocks, {_size(subject.weight_bytes)} of "
        f"weights\nlatent {' x '.join(map(str, subject.shape))}: {subject.image} image and {subject.text} text tokens, "
        f"{subject.entries} in the batch of a model call, {subject.steps} steps"
    )


def _machine(machine: Machine) -> str:
    lines = [f"rank {found.rank}: {machine.devices[found.rank]}, {_device(found)}" for found in machine.ranks]
    pairs = {(found.rank, other): reached for found in machine.ranks for other, reached in found.peers.items()}
    if pairs:
        without = [f"{one}-{two}" for (one, two), reached in pairs.items() if one < two and not reached]
        lines.append(f"P2P access: {'not between ' + ', '.join(without) if without else 'between all of them'}")
    if machine.links:
        links = (
            f"{one}-{two} {link.bandwidth / 1e9:.3g} GB/s, {link.latency * 1e6:.0f} us"
            for (one, two), link in machine.links.items()
        )
        lines.append(f"links one way: {'; '.join(links)}")
    return "\n".join(lines)


def _device(found: LinksProbed) -> str:
    if found.free_bytes is None:
        return found.name
    return f"{found.name}, {gigabytes(found.free_bytes)} free of {gigabytes(found.total_bytes)}"


def _blocks(situation: Rehearsals) -> str:
    seconds, blocks = situation.block_seconds(), situation.subject.blocks
    lines = [
        f"{name} ({blocks.count(name)} like it): {', '.join(f'{1000 * rank[name]:.3g}' for rank in seconds)} ms"
        for name in situation.subject.kept
    ]
    return "\n".join(["one block, whole picture, by rank, all at work:", *lines])


def _table(findings: Findings) -> str:
    one = findings.one_rank
    known = "" if one.lacks else ", against one device"
    lines = [f"predicted seconds{known}, largest memory of a rank, moved in a step over all ranks:"]
    shown = [found for place, found in enumerate(findings.predictions) if place < SHOWN or _single(found.mode)]
    for found in shown:
        faster = "" if one.lacks else f"  {one.seconds / found.seconds:5.2f}x"
        memory = max(memory.total for memory in found.memory)
        lines.append(
            f"{found.seconds:9.2f} s{faster}  {_size(memory):>8}  {_size(found.moved) if found.moved else 'nothing':>8}  "
            f"{_named(found.mode, findings)}{'; does not fit: ' + found.lacks if found.lacks else ''}"
        )
    if left := len(findings.predictions) - len(shown):
        lines.append(f"and {left} more, none of them faster")
    if any(memory.activations is None for found in shown for memory in found.memory):
        lines.append("memory of CPU ranks: weights and K/V buffers only")
    return "\n".join(lines)


def _single(mode: Mode) -> bool:
    return sum(getattr(mode.degrees, axis) > 1 for axis in AXES) <= 1


def _named(mode: Mode, findings: Findings) -> str:
    if mode.device is not None:
        return f"one device ({findings.situation.machine.devices[mode.device]})"
    return f"{mode} ({'exact' if mode.exact else 'keys of other patches a step old after the first step'})"


def _impossible(findings: Findings) -> str:
    """Of single degrees only: products fail for the same reasons."""
    lines = [why for degrees, why in findings.refused.items() if _single(Mode(degrees))]
    return "\n".join(["not possible:", *lines]) if lines else ""


def _advice(findings: Findings) -> str:
    best, one = findings.advice, findings.one_rank
    if best is None:
        return (
            "advice: nothing fits these devices. Use a smaller picture, weight_dtype fp8_e4m3fn, or more devices with "
            "pipefusion_degree."
        )
    machine, mode = findings.situation.machine, best.mode
    if mode.device is not None:
        kind = "CPU rank" if machine.on_cpus else "GPU"
        reasons = [f"advice: stay on one {kind} ({machine.devices[mode.device]}), {best.seconds:.2f} s"]
        others = [found for found in findings.predictions if not found.lacks and found is not best]
        if others:
            reasons.append(
                f"the best of the others, {others[0].mode}, takes {others[0].seconds:.2f} s: less than "
                f"{100 * (AS_GOOD - 1):.0f} % would be gained"
            )
    else:
        reasons = [f"advice: {mode}, {best.seconds:.2f} s"]
        if one.lacks:
            reasons.append(f"no single device can run this model: one {one.lacks}")
        reasons += _beside(best, findings)
    return "\n".join([*reasons, settings(mode, machine)])


def _beside(best: Prediction, findings: Findings) -> list[str]:
    """What else could be chosen, and why it was not."""
    lines = []
    quicker = [found for found in findings.predictions if found.lacks and found.seconds < best.seconds]
    if quicker and quicker[0].mode.device is None:
        lines.append(f"{quicker[0].mode} would be faster, but does not fit: {quicker[0].lacks}")
    if not best.mode.exact:
        exact = next((found for found in findings.predictions if found.mode.exact and not found.lacks), None)
        if exact is not None:
            lines.append(f"the fastest that is exact throughout: {_named(exact.mode, findings)}, {exact.seconds:.2f} s")
    return lines


def _size(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"
