"""The speed of everything, beside its peers, in one command:

    bash scripts/benchmark --with-xdit
    bash scripts/benchmark --quick --only flux,overheads
    bash scripts/benchmark --only one-device --device cuda
    bash scripts/benchmark --only one-device --compiled --device cuda

The script installs what they need, xDiT in an environment of its own; where all is there, `python -m benchmarks` does.

Each part writes a dated JSON into benchmarks/results as soon as it is done; `python -m benchmarks.harness.render` makes
build/benchmarks.md and its plots of the newest ones. Parts that are not asked for by name and need another machine
are left out with a word.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.harness import measuring
from benchmarks.harness.subjects import FLUX_LIKE, FLUX_SCHNELL, GUIDED_FLUX_LIKE
from benchmarks.speed import first_picture, growth, one_device, overheads, two_ranks

RESULTS = Path(__file__).resolve().parent / "results"
Say = Callable[[str], None]


def _two_ranks(subject):
    return lambda given, say: two_ranks.run(subject, given.rounds, say, given.xdit_python, given.cases)


def _one_device(given: argparse.Namespace, say: Say) -> dict:
    """Flux's shapes on CUDA; on a CPU, where asked for by name, the small model of the other parts."""
    small = given.device == "cpu"
    sides = (given.side,) if given.side else (FLUX_LIKE.side,) if small else one_device.SIDES
    subject = FLUX_LIKE if small else FLUX_SCHNELL
    return one_device.run(given.rounds, say, given.device, subject, sides, layers=given.layers, compiled=given.compiled)


PARTS: dict[str, Callable[[argparse.Namespace, Say], dict]] = {
    "flux": _two_ranks(FLUX_LIKE),
    "guided": _two_ranks(GUIDED_FLUX_LIKE),
    "overheads": lambda given, say: overheads.run(given.rounds, say),
    "growth": lambda given, say: growth.run(1, say),
    "first-picture": lambda given, say: first_picture.run(1, say, given.with_vae),
    "one-device": _one_device,
}
ON_CUDA = ("one-device",)
"""Parts that say nothing on a CPU."""


def chosen(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(PARTS):
        raise argparse.ArgumentTypeError(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return names


def parse(arguments: list[str]) -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", type=chosen, help=f"comma list of {', '.join(PARTS)}")
    options.add_argument("--cases", type=lambda text: text.split(","), help="comma list of cases of the parts asked for")
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="for one-device")
    options.add_argument("--layers", type=int, help="blocks of one-device's model")
    options.add_argument("--side", type=int, help="of their latent, in latent pixels")
    options.add_argument("--with-vae", action="store_true", help="first-picture decodes the picture too")
    options.add_argument("--compiled", action="store_true", help="one-device compiles its blocks and diffusers'")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--quick", action="store_true", help="one round")
    options.add_argument("--xdit-python", type=Path, help="interpreter that has xfuser; without it xDiT is left out")
    options.add_argument("--out", type=Path, default=RESULTS)
    options.add_argument("--label", default="2cores", help="of the machine, for the results' names")
    given = options.parse_args(arguments)
    given.rounds = 1 if given.quick else given.rounds
    return given


def main(arguments: list[str]) -> None:
    given = parse(arguments)
    torch.set_num_threads(1)
    say = measuring.TimedLog()
    parts = given.only or [name for name in PARTS if name not in ON_CUDA or torch.cuda.is_available()]
    for name in sorted(set(PARTS) - set(parts)):
        say(f"left out: {name}, which " + ("is not in --only" if given.only else "needs a CUDA device"))
    for name in parts:
        say(f"== {name}")
        stolen = measuring.Stolen()
        result = PARTS[name](given, say) | {"stolen": stolen.share()}
        say(f"{name}: {measuring.keep(result, given.out, given.label)}")


if __name__ == "__main__":
    main(sys.argv[1:])
