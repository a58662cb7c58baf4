"""Seconds a step of every mode over the links that users have, and the planner's predictions beside them.

    python -m benchmarks.speed.links --xdit-python build/xdit/bin/python --out benchmarks/results/links_2cores_DATE.json
    python -m benchmarks.speed.links --only "10 Gbit Ethernet" --cases ring+ulysses --rounds 1
    python -m benchmarks.speed.links --ranks 4 --no-plan
    python -m benchmarks.speed.links --real --only "10 Gbit Ethernet"

CPU ranks over the queue of harness/slow_link.py; `--real`: over two network namespaces and tc's queue instead, as a check
of it, without latency (needs root, two ranks). Transformer and sampler loop only. diffusers' Ulysses and ring, and xDiT
where an interpreter has it (`bash scripts/benchmark --with-xdit` makes one), run the same model over queues of the same
speed.

A link is as slow beside this model on this CPU as the real one is beside Flux-dev at 1024 pixels on its GPU. A block's
tensor of hidden states has s bytes and the block takes t seconds on one device, here and there; all that sequence and
tensor parallelism send is so many s a block. So a link of B bytes/s and latency L becomes B (s / t) / (s' / t') and
L t / t', where t is measured here by one rank's loop, and t' is the model's operations over what the GPU reaches
(predictions/presets.py). PipeFusion's hidden states cross once a step and stage: of 57 blocks there are fewer here, so its
share of a step is as many times too large.
"""

import argparse
import contextlib
import functools
import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.harness import measuring
from benchmarks.harness.linked_ranks import cabled_pool, slow_pool
from benchmarks.harness.measuring import Outcome, figure
from benchmarks.harness.pools import Pools
from benchmarks.harness.render import links_plot
from benchmarks.harness.slow_link import FULL_SPEED, Switch
from benchmarks.harness.subjects import FLUX_LIKE, Subject
from benchmarks.predictions.presets import HARDWARE, MODELS
from benchmarks.rivals.peers import DiffusersRanks, PeerFailed, XditRanks, xdit_version
from benchmarks.speed.two_ranks import EXACT
from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.core.cores import usable_cores
from parallel_backend.core.degrees import Degrees
from parallel_backend.planning.calibrated_costs import CalibratedCosts
from parallel_backend.planning.calibration import calibrate
from parallel_backend.planning.modes import Mode as Planned
from parallel_backend.planning.planner import advise
from parallel_backend.planning.prediction import Prediction, predict
from parallel_backend.planning.workload import workload_of
from parallel_backend.processes.pool import Pool
from testing import mini
from testing.models import on_ranks

STEPS = 6
MODEL, PIXELS = "flux-dev", 1024
WITHIN = 0.15
"""How far a prediction may be from the measured seconds."""


@dataclass(frozen=True)
class Real:
    """A link as it is sold: what of it a long message gets, bytes a second each way, and seconds of a short one."""

    bandwidth: float
    latency: float
    gpu: str
    """Beside which it is found; a name of presets.HARDWARE."""


LINKS = {
    "NVLink": Real(200e9, 30e-6, "A100"),
    "PCIe 4 x16": Real(25e9, 30e-6, "RTX 4090"),
    "100 Gbit Ethernet": Real(11.2e9, 60e-6, "RTX 4090"),
    "PCIe 3 x8": Real(6.3e9, 30e-6, "RTX 4090"),
    "PCIe through the host": Real(3.0e9, 30e-6, "RTX 4090"),
    "10 Gbit Ethernet": Real(1.12e9, 60e-6, "RTX 4090"),
}
"""NVLink and PCIe through the host (no P2P) as in presets.py; of PCIe's standards four fifths, of Ethernet's bits
nine tenths. Ethernet's latency is a guess."""


@dataclass(frozen=True)
class Mode:
    """`bands`: as in measuring.run_ranks."""

    degrees: Degrees
    bands: int = 0
    transfers: str = "full"


ONE = "one rank"


def modes_of(world: int) -> dict[str, Mode]:
    """The modes of `world` ranks, by name. Naive patches do without transfers, and are no picture to want: the floor."""
    return {
        "pipefusion M=2": Mode(Degrees(pipe=world), 2),
        "pipefusion M=4": Mode(Degrees(pipe=world), 4),
        "ulysses": Mode(Degrees(ulysses=world)),
        "ring": Mode(Degrees(ring=world)),
        "tensor": Mode(Degrees(tensor=world)),
        "displaced": Mode(Degrees(patch=world, patch_mode="displaced"), 1),
        "naive": Mode(Degrees(patch=world, patch_mode="naive")),
        "ulysses, int8": Mode(Degrees(ulysses=world), 0, "int8"),
        "displaced, residual": Mode(Degrees(patch=world, patch_mode="displaced"), 1, "residual"),
    }


DIFFUSERS = {"diffusers ulysses": "ulysses", "diffusers ring": "ring"}
XDIT = {"xDiT pipefusion": "pipe", "xDiT ulysses": "ulysses"}
"""The degree of each."""


@dataclass(frozen=True)
class Scale:
    """Of a model on this machine to the real one on a GPU."""

    size: float
    """Of the bytes of a tensor of hidden states."""
    time: float
    """Of the seconds of a block."""

    def link(self, real: Real) -> tuple[float, float]:
        """(bytes a second, latency)."""
        return real.bandwidth * self.size / self.time, real.latency * self.time


def scale(subject: Subject, step: float, gpu: str) -> Scale:
    """`step`: seconds that one rank takes for one. A block's operations are those that the planner counts."""
    model = MODELS[MODEL]
    tokens = (PIXELS // model.side) ** 2 + model.text
    block = model.block(HARDWARE[gpu]).work(tokens, tokens)
    size = (subject.tokens + subject.text) * subject.width * 4 / (tokens * model.hidden * 2)  # fp32 here, bf16 there
    return Scale(size, step / sum(subject.blocks) / block)


class Bench:
    """Ranks at links whose speed is set, and one rank alone."""

    def __init__(self, subject: Subject, checkpoint: Checkpoint, pool: Pool, alone: Pool):
        self._subject, self._checkpoint, self._pool, self._alone = subject, checkpoint, pool, alone

    def one(self) -> Outcome:
        return self._run(self._alone, Mode(Degrees()))

    def run(self, mode: Mode) -> Outcome:
        return self._run(self._pool, mode)

    def _run(self, pool: Pool, mode: Mode) -> Outcome:
        model = on_ranks(pool, self._checkpoint, mode.degrees, "fp32", "auto", lambda: None, transfer_dtype=mode.transfers)
        return measuring.run_ranks(model, self._subject, bands=mode.bands)

    def planned(self, modes: dict[str, Mode]) -> dict[str, Prediction]:
        """Runs as the planner sees them, by a calibration over the links as they are now. It does not know naive patches."""
        subject = self._subject
        shape = (1, *subject.latent)
        run = (shape, subject.entries, subject.steps, subject.text)
        calibration = calibrate(self._pool, self._checkpoint, "fp32", lambda: None)

        def prediction(mode: Mode) -> Prediction:
            costs = CalibratedCosts(calibration, workload_of(self._checkpoint, "fp32", "cpu", *run, mode.transfers))
            alone = 0 if mode.degrees.world == 1 else None
            return predict(costs, Planned(mode.degrees, max(1, mode.bands), alone))

        return {name: prediction(mode) for name, mode in modes.items() if not mode.degrees.naive}


class Peers:
    """Processes of others, each kind at a switch of its own. A context: it ends them."""

    def __init__(self, subject: Subject, path: Path, xdit_python: Path | None, world: int):
        self._stack, self._switches, self._world = ExitStack(), [], world
        self.runs: dict[str, Callable[[], Outcome]] = {}
        diffusers = self._stack.enter_context(contextlib.closing(DiffusersRanks(subject, path, self._links(), world)))
        self.runs |= {name: functools.partial(diffusers.run, mode) for name, mode in DIFFUSERS.items()}
        for name, axis in XDIT.items() if xdit_python else ():
            patches = world if axis == "pipe" else 1
            ranks = XditRanks(xdit_python, subject, path, {axis: world}, patches, self._links(), world)
            self.runs[f"{name} M={patches}" if axis == "pipe" else name] = self._stack.enter_context(
                contextlib.closing(ranks)
            ).run

    def _links(self) -> Path:
        folder = Path(self._stack.enter_context(TemporaryDirectory(prefix="slow-links-")))
        self._switches.append(Switch(folder, self._world))
        self._switches[-1].set(FULL_SPEED, 0.0)
        return folder

    def set(self, bandwidth: float, latency: float) -> None:
        for switch in self._switches:
            switch.set(bandwidth, latency)

    def __enter__(self) -> "Peers":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _auto(plans: list[dict[str, Prediction]], cases: dict[str, list[float]], modes: dict[str, Mode]) -> dict:
    """What `degrees` auto takes, round by round, and its seconds over those of the fastest that it may take.

    `cases`: measured seconds of a step. It takes exact modes, and where the sampler pipelines the others (planner.choose).
    """
    medians = {name: statistics.median(seconds) for name, seconds in cases.items()}
    full = {ONE, *(name for name, mode in modes.items() if mode.transfers == "full")}
    exact = [name for name in plans[0] if name in full and plans[0][name].mode.exact]
    close = [name for name in plans[0] if name in full and not plans[0][name].mode.exact]
    said = {}
    for which, allowed in {"exact": exact, "pipelined": exact + close}.items():
        chosen = [advise([plan[name] for name in allowed]) for plan in plans]
        names = [next(name for name in allowed if plan[name] is one) for plan, one in zip(plans, chosen, strict=True)]
        best = min(allowed, key=medians.__getitem__)
        over = [round(medians[name] / medians[best], 3) for name in names]
        said[which] = {"chosen": names, "fastest": best, "over_fastest": over}
    return said


def _row(outcomes: list[Outcome], one: list[Outcome], planned: list[float], steps: int) -> dict:
    seconds = [each / steps for each in measuring.seconds(outcomes)]
    difference = mini.relative(outcomes[0].sample, one[0].sample)
    said = {
        "seconds_per_step": figure(seconds, 4),
        "speed_up": figure(measuring.ratios(one, outcomes)),
        "sent_MB_per_step": measuring.moved(outcomes[0], steps),
        "relative_difference": float(f"{difference:.2g}"),
        "exact": difference < EXACT,
    }
    if planned:
        ratio = statistics.median(plan / took for plan, took in zip(planned, seconds, strict=True))
        said |= {"planned_seconds_per_step": figure(planned, 4), "planned_over_measured": round(ratio, 3)}
    return said


@contextlib.contextmanager
def _ranks(real: bool, world: int) -> Iterator[tuple[Pool, Callable[[float, float], None]]]:
    """Ranks, and what sets the bytes a second and the latency of their links."""
    if real:
        with cabled_pool() as (pool, cable):
            yield pool, lambda rate, _latency: cable.set(rate)
    else:
        with slow_pool(world) as (pool, switch):
            yield pool, switch.set


def run(
    subject: Subject,
    rounds: int,
    say: Callable[[str], None],
    only: list[str] | None = None,
    cases: list[str] | None = None,
    real: bool = False,
    plan: bool = True,
    latency: bool = True,
    peers: bool = True,
    xdit_python: Path | None = None,
    world: int = 2,
) -> dict:
    """The result. `only`: of LINKS; `cases`: of modes_of(world), the number of ranks. `real`: over the kernel's queue, which
    peers are not on. `latency`: False leaves it out, as `real` does. Every round measures one rank, then each link's
    predictions, modes and peers."""
    links = {name: LINKS[name] for name in only or LINKS}
    every = modes_of(world)
    modes = {name: every[name] for name in cases or every}
    xdit = {"xdit": xdit_version(xdit_python)} if xdit_python else {}
    one: list[Outcome] = []
    found: dict[str, dict[str, list[Outcome]]] = {name: defaultdict(list) for name in links}
    planned: dict[str, list[dict[str, Prediction]]] = {name: [] for name in links}
    scaled: dict[str, tuple[float, float]] = {}
    left_out: dict[str, str] = {}
    with TemporaryDirectory() as directory, ExitStack() as stack:
        path = subject.save(Path(directory))
        subject.for_others(path)
        checkpoint = subject.opened(path)
        pool, set_links = stack.enter_context(_ranks(real, world))
        bench = Bench(subject, checkpoint, pool, stack.enter_context(Pools())(1))
        others = stack.enter_context(Peers(subject, path, xdit_python, world)) if peers and not real else None
        for turn in range(rounds):
            one.append(bench.one())
            step = one[-1].seconds / subject.steps
            say(f"round {turn + 1}/{rounds}  {ONE}: {step:.3f} s a step")
            if not turn:  # the links stay as they are, so that rounds can be compared
                shared = step * max(1.0, world / usable_cores())  # a rank of more ranks than cores has a share of a core
                scaled = {name: scale(subject, shared, link.gpu).link(link) for name, link in links.items()}
            for name in links:
                bandwidth, seconds = scaled[name]
                speed = (bandwidth, seconds if latency else 0.0)
                set_links(*speed)
                plans = bench.planned({ONE: Mode(Degrees()), **modes}) if plan else {}
                planned[name] += [plans] if plan else []
                for mode, own in modes.items():
                    found[name][mode].append(bench.run(own))
                    took = found[name][mode][-1].seconds / subject.steps
                    said = f", planned {plans[mode].seconds / subject.steps:.3f}" if mode in plans else ""
                    say(f"round {turn + 1}/{rounds}  {name:22} {bandwidth / 1e6:7.1f} MB/s  {mode:22} {took:.3f} s{said}")
                if others is not None:
                    others.set(*speed)
                    for peer, measure in list(others.runs.items()):
                        try:
                            outcome = measure()
                        except PeerFailed as error:  # as xDiT's pipeline on more ranks than blocks of a kind
                            left_out[peer] = str(error)
                            say(f"left out: {peer}, {error}")
                            del others.runs[peer]
                            continue
                        found[name][peer].append(outcome)
                        took = found[name][peer][-1].seconds / subject.steps
                        say(f"round {turn + 1}/{rounds}  {name:22} {bandwidth / 1e6:7.1f} MB/s  {peer:22} {took:.3f} s")
            if not real:
                set_links(FULL_SPEED, 0.0)

    def by_step(link: str, mode: str) -> list[float]:
        return [plans[mode].seconds / subject.steps for plans in planned[link] if mode in plans]

    return measuring.head("links", subject, rounds) | {
        "ranks": world,
        "cores": os.cpu_count(),
        "queue": "tc tbf between two network namespaces" if real else "benchmarks/harness/slow_link.py",
        "stands_for": f"{MODEL} at {PIXELS} x {PIXELS} in bf16",
        "within": WITHIN,
        **xdit,
        "left_out": left_out,
        "one_rank_seconds_per_step": figure([each / subject.steps for each in measuring.seconds(one)], 4),
        "links": {
            name: {
                "real_GB_per_second": link.bandwidth / 1e9,
                "real_latency_us": round(1e6 * link.latency),
                "gpu": link.gpu,
                "gpu_operations_per_second": HARDWARE[link.gpu].gpu.operations,
                "MB_per_second": round(scaled[name][0] / 1e6, 2),
                "latency_us": round(1e6 * scaled[name][1]) if latency and not real else 0,
                "auto": _auto(planned[name], _by_step({ONE: one, **found[name]}, subject.steps), modes) if plan else {},
                "cases": {
                    mode: _row(outcomes, one, by_step(name, mode), subject.steps) for mode, outcomes in found[name].items()
                },
            }
            for name, link in links.items()
        },
    }


def _by_step(outcomes: Mapping[str, list[Outcome]], steps: int) -> dict[str, list[float]]:
    return {name: [each / steps for each in measuring.seconds(runs)] for name, runs in outcomes.items()}


def _chosen(known: dict[str, object], text: str) -> list[str]:
    names = text.split("+")
    if unknown := set(names) - set(known):
        raise argparse.ArgumentTypeError(f"no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return names


def main() -> None:
    options = measuring.parser(__doc__)
    options.set_defaults(rounds=2, steps=STEPS)
    options.add_argument("--only", type=functools.partial(_chosen, LINKS), help="links, with + between them")
    options.add_argument("--cases", type=functools.partial(_chosen, modes_of(2)), help="modes, with + between them")
    options.add_argument("--side", type=int, help="of the latent")
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--real", action="store_true", help="the kernel's queue")
    options.add_argument("--no-latency", action="store_true")
    options.add_argument("--no-plan", action="store_true", help="without the planner's predictions")
    options.add_argument("--no-peers", action="store_true")
    options.add_argument("--xdit-python", type=Path, help="an interpreter that has xfuser")
    options.add_argument("--plot", type=Path)
    given = options.parse_args()
    torch.set_num_threads(1)
    subject, stolen = FLUX_LIKE.at(side=given.side, steps=given.steps), measuring.Stolen()
    result = run(
        subject,
        given.rounds,
        measuring.TimedLog(),
        given.only,
        given.cases,
        given.real,
        not given.no_plan,
        not given.no_latency,
        not given.no_peers,
        given.xdit_python,
        given.ranks,
    ) | {"stolen": stolen.share()}
    measuring.report(result, given.out)
    if given.plot:
        links_plot(result, given.plot)


if __name__ == "__main__":
    main()
