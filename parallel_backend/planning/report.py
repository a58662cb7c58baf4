"""A plan as text: Parallel Doctor's report, and the choice in one line."""

from collections.abc import Mapping

from parallel_backend.core.degrees import AXES, WIDGETS, Degrees

from .known_gpus import PAIRS_OFF, RUNS_OFF
from .machine import Device, Machine
from .memory import gigabytes
from .modes import Mode
from .planner import AS_GOOD, Plan
from .prediction import Prediction
from .workload import Workload

SHOWN = 10
"""Number of modes that are listed. Modes of a single degree are always listed too."""


def describe(plan: Plan) -> str:
    """Parallel Doctor's report."""
    costs = plan.costs
    parts = [_workload(costs.workload), _machine(costs.machine), _table(plan), _impossible(plan), _advice(plan)]
    return "\n\n".join(part for part in parts if part)


def verdict(plan: Plan) -> str:
    """Return the Doctor's advice in one line, with the gain over one device."""
    best, one = plan.best, plan.one_device
    if plan.doubt or best is None:
        return _advice(plan).splitlines()[0]
    gain = f", {one.seconds / best.seconds:.2f} x one device" * (best.mode.device is None and not one.lacks)
    return f"{_advice(plan).splitlines()[0]}{gain}"


def describe_another(today: Plan, more: Plan) -> str:
    """What another GPU, the last device of `more`, would add to the machine of `today`: the part of the report."""
    before, steps = today.best or today.one_device, more.costs.workload.steps
    best_of: dict[Degrees, Prediction] = {}
    for prediction in more.predictions:
        best_of.setdefault(prediction.mode.degrees, prediction)
    against = "" if before.lacks else f", against {_short(before.mode, today)}"
    lines = [verdict_on_another(today, more), f"seconds a step{against}, largest memory of a rank:"]
    for prediction in list(best_of.values())[:SHOWN]:
        lines.append(f"{prediction.seconds / steps:9.3f} s{_gain(before, prediction)}  {_held(prediction, more)}")
    (runs, runs_most), (pairs, pairs_most) = RUNS_OFF, PAIRS_OFF
    lines.append(
        f"All of this is predicted. From one GPU's seconds, published runs on several GPUs are predicted {runs} % off in "
        f"the median and {runs_most} % at most. The speed of a GPU of another kind is from data sheets: among GeForce GPUs "
        f"{pairs} % off in the median and {pairs_most} % at most, beside other GPUs more."
    )
    return "\n".join(lines)


def verdict_on_another(today: Plan, more: Plan) -> str:
    """Return the answer in a line: what another GPU, the last device of `more`, would add to the machine of `today`."""
    before, best, asked = today.best, more.best, f"with {more.costs.machine.devices[-1].kind}, predicted"
    if best is None:
        return f"{asked}: nothing fits"
    if before is not None and before.seconds < AS_GOOD * best.seconds:
        return f"{asked}: no gain"
    mode = best.mode if best.mode.device is None else more.costs.machine.names[best.mode.device]
    step = f"{mode}, {best.seconds / more.costs.workload.steps:.3g} s a step"
    without = "without it nothing fits" if before is None else f"{before.seconds / best.seconds:.2f} x without it"
    return f"{asked}: {step}, {without}"


def choice(prediction: Prediction, machine: Machine) -> str:
    """Return the choice in one line, for a node and the log."""
    names = ", ".join(machine.names[device] for device in prediction.mode.devices)
    if prediction.mode.device is not None:
        return f"one device, {names}, planned {prediction.seconds:.1f} s"
    return f"{prediction.mode.degrees} on {names}, planned {prediction.seconds:.1f} s"


def settings(mode: Mode, machine: Machine) -> str:
    """Return the widgets' values for this mode, for the user to copy."""
    degrees = mode.degrees
    devices = [machine.names[device] for device in mode.devices]
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


def _listed(widgets: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in widgets.items())


def _workload(workload: Workload) -> str:
    return (
        f"{workload.name}: {workload.kind}, {workload.dtype}, {len(workload.blocks)} blocks, "
        f"{_size(workload.sizes.weight_bytes)} of weights\n"
        f"latent {' x '.join(map(str, workload.shape))}: {workload.image} image and {workload.text} text tokens, "
        f"{workload.entries} in the batch of a model call, {workload.steps} steps"
    )


def _machine(machine: Machine) -> str:
    lines = [f"rank {rank}: {device.name}, {_device(device)}" for rank, device in enumerate(machine.devices)]
    if machine.links.between:
        links = (
            f"{one}-{two} {link.bandwidth / 1e9:.3g} GB/s, {link.latency * 1e6:.0f} us"
            for (one, two), link in machine.links.between.items()
        )
        lines.append(f"links one way: {'; '.join(links)}")
    return "\n".join(lines)


def _device(device: Device) -> str:
    if device.memory is None or device.total is None:
        return device.kind
    return f"{device.kind}, {gigabytes(device.memory)} free of {gigabytes(device.total)}"


def _table(plan: Plan) -> str:
    """Return the table of modes, fastest first by plan."""
    one, rehearsed = plan.one_device, {prediction.mode: prediction for prediction in plan.rehearsed}
    columns = "planned seconds, rehearsed seconds" if rehearsed else "planned seconds"
    against = "" if one.lacks else ", against one device"
    lines = [f"{columns}{against}, largest memory of a rank:"]
    shown = [prediction for place, prediction in enumerate(plan.predictions) if place < SHOWN or _single(prediction.mode)]
    shown += [known for mode, known in rehearsed.items() if all(mode != each.mode for each in shown)]
    for planned in shown:
        known = rehearsed.get(planned.mode, planned)
        tried = f"{known.seconds:9.2f} s" if planned.mode in rehearsed else ""
        second = f"{tried:>11}" if rehearsed else ""
        lines.append(f"{planned.seconds:9.2f} s{second}{_gain(one, known)}  {_held(known, plan)}")
    if left := len(plan.predictions) - len(shown):
        lines.append(f"and {left} more, none of them faster")
    return "\n".join(lines)


def _gain(before: Prediction, after: Prediction) -> str:
    """Return how many times as fast `after` is as `before`, as text. Empty if `before` does not fit."""
    return "" if before.lacks else f"  {before.seconds / after.seconds:5.2f}x"


def _held(prediction: Prediction, plan: Plan) -> str:
    lacks = f"; does not fit: {prediction.lacks}" if prediction.lacks else ""
    size = _size(prediction.most_memory)
    return f"{size:>8}  {_named(prediction.mode, plan)}{_streamed(prediction)}{lacks}"


def _streamed(prediction: Prediction) -> str:
    """Return the streamed bytes of weights. Empty if none are streamed."""
    return f"; streams {_size(prediction.most_streamed)} a micro-step" if prediction.most_streamed else ""


def _single(mode: Mode) -> bool:
    return sum(getattr(mode.degrees, axis) > 1 for axis in AXES) <= 1


def _short(mode: Mode, plan: Plan) -> str:
    return str(mode) if mode.device is None else f"one device ({plan.costs.machine.names[mode.device]})"


def _named(mode: Mode, plan: Plan) -> str:
    if mode.device is not None:
        return _short(mode, plan)
    return f"{mode} ({'exact' if mode.exact else 'keys of other patches a step old after the first step'})"


def _impossible(plan: Plan) -> str:
    """Return why modes with a single degree above 1 are not possible. Combined modes fail for the same reasons."""
    lines = [reason for degrees, reason in plan.refused.items() if _single(Mode(degrees))]
    return "\n".join(["not possible:", *lines]) if lines else ""


def _advice(plan: Plan) -> str:
    best, one = plan.best, plan.one_device
    if plan.doubt:
        return f"advice: none, because {plan.doubt}."
    if best is None:
        return (
            "advice: nothing fits these devices. Use a smaller image, weight_dtype fp8_e4m3fn, or more devices with "
            "pipefusion_degree."
        )
    machine, mode = plan.costs.machine, best.mode
    if mode.device is not None:
        kind = "CPU rank" if machine.on_cpus else "GPU"
        reasons = [f"advice: stay on one {kind} ({machine.names[mode.device]}), {best.seconds:.2f} s"]
        others = [other for other in plan.predictions if not other.lacks and other.mode.device is None]
        if others:
            other, tokens = others[0], plan.costs.workload.tokens
            share = best.seconds / other.mode.degrees.world
            reasons += [
                f"the best of the others, {other.mode}, takes {other.seconds:.2f} s: a gain below "
                f"{100 * (AS_GOOD - 1):.0f} %",
                f"a model call has {tokens} tokens, too few for several {kind}s and these links: computation alone, "
                f"split evenly, would take {share:.2f} s of the {other.seconds:.2f}; more {kind}s do not shorten the "
                "other part",
            ]
    else:
        reasons = [f"advice: {mode}, {best.seconds:.2f} s"]
        if one.lacks:
            reasons.append(f"no single device can run this model: one {one.lacks}")
        elif one.most_streamed:
            reasons.append(f"no single device holds this model: one takes {one.seconds:.2f} s{_streamed(one)}")
        exact = next((other for other in plan.predictions if other.mode.exact and not other.lacks), None)
        if exact is not None and not mode.exact:
            reasons.append(f"the fastest that is exact throughout: {_named(exact.mode, plan)}, {exact.seconds:.2f} s")
    return "\n".join([*reasons, settings(mode, machine)])


def _size(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"
