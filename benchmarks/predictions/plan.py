"""The planner's table for devices that are not there.

    python -m benchmarks.predictions.plan --device L40 --count 4 --model flux-dev --size 1024 --steps 28
    python -m benchmarks.predictions.plan --device L40 --count 2 --block-ms 6 --bandwidth 12 --memory 24

Transformer only: loading, text encoders and VAE are not in it. What the presets stand on: docs/planner.md.
"""

import argparse
import sys
from dataclasses import replace

from benchmarks.predictions.presets import HARDWARE, MODELS, with_block
from parallel_backend.core.setup import ALLOWED, Offload
from parallel_backend.placement.links import Link
from parallel_backend.placement.residency import GB, offload_of
from parallel_backend.planning.calibrated_costs import CalibratedCosts
from parallel_backend.planning.planner import plan
from parallel_backend.planning.report import describe


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def whole(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def size(text: str) -> tuple[int, int]:
    """Width and height of `1024` or `1280x720`."""
    sides = [int(part) for part in text.lower().split("x")]
    if len(sides) not in (1, 2) or any(side < 16 or side % 16 for side in sides):
        raise argparse.ArgumentTypeError(f"{text}: use a side such as 1024, or 1280x720, in multiples of 16")
    return sides[0], sides[-1]


def offload(text: str) -> Offload:
    try:
        return offload_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.predictions.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=HARDWARE, default="L40", help="a preset, where no other figure is given")
    parser.add_argument("--count", type=whole, default=4, help="devices")
    parser.add_argument("--model", choices=MODELS, default="flux-dev")
    parser.add_argument("--size", type=size, default=(1024, 1024), help="a side in pixels, or 1280x720")
    parser.add_argument("--steps", type=whole, default=28)
    parser.add_argument("--warmup", type=int, default=1, help="first steps of PipeFusion that are exact")
    parser.add_argument("--prompts", type=whole, help="of a model call: 2 with cfg above 1")
    parser.add_argument("--block-ms", type=positive, help="of one block, the whole picture, one prompt")
    parser.add_argument("--bandwidth", type=positive, help="of a link, GB/s one way")
    parser.add_argument("--latency", type=positive, help="of a link, microseconds")
    parser.add_argument("--memory", type=positive, help="of a device, GB")
    parser.add_argument("--copies", type=positive, help="from host memory to a device, GB/s, for weights that are streamed")
    parser.add_argument(
        "--offload", type=offload, default=ALLOWED, help="as the loader's widget: auto, none, or GB to leave free"
    )
    parser.add_argument(
        "--transfer-dtype",
        choices=("full", "int8", "residual"),
        default="full",
        help="of what Ulysses and displaced patches send",
    )
    return parser.parse_args(given)


def costs_of(options: argparse.Namespace) -> CalibratedCosts:
    """What the options say, where they differ from the preset."""
    width, height = options.size
    model, hardware = MODELS[options.model], HARDWARE[options.device]
    if options.prompts:
        model = replace(model, prompts=options.prompts)
    link = hardware.link
    if options.bandwidth:  # one link for all: the preset's bridge is that of its own machine
        link, hardware = Link(link.latency, options.bandwidth * 1e9), replace(hardware, socket=0, bridge=0.0)
    if options.latency:
        link = Link(options.latency / 1e6, link.bandwidth)
    hardware = replace(hardware, link=link)
    if options.memory:
        hardware = replace(hardware, gpu=replace(hardware.gpu, memory=int(options.memory * GB)))
    if options.copies:
        hardware = replace(hardware, copies=options.copies * 1e9)
    workload = model.workload(options.model, height, width, options.steps, options.warmup)
    workload = replace(workload, sizes=replace(workload.sizes, transfer_dtype=options.transfer_dtype))
    calibration = hardware.calibration(options.count, model)
    if options.block_ms:
        seconds, block = options.block_ms / 1000, model.block(hardware)
        fixed = min(block.fixed, seconds / 2)
        work = block.work(workload.tokens, workload.tokens)
        calibration = with_block(calibration, replace(block, fixed=fixed, token=block.token * (seconds - fixed) / work))
    return CalibratedCosts(calibration, workload)


def main(given: list[str] | None = None) -> None:
    options = arguments(given)
    costs = costs_of(options)
    if (links := costs.machine.links).bridge:
        sys.stdout.write(f"a bridge of {links.bridge / 1e9:.3g} GB/s each way between groups of {links.socket} devices\n")
    sys.stdout.write(describe(plan(costs, offload=options.offload)) + "\n")


if __name__ == "__main__":
    main()
