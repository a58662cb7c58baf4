"""Checks CUDA graphs: whether micro-steps are captured with each attention kernel, and that replays give what calls give."""

import time

import torch

from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.core.attention_kernels import KERNELS, as_wish
from parallel_backend.core.degrees import Degrees

from . import tiny_model
from .findings import Findings, NotLookedAt
from .one_rank import SAME_KERNELS, rounding
from .session import SelfTestSession

CALLS = 5
"""The first is compared with a replay of its own, the second is captured, and the others are replayed. They differ by their
timestep, so that an output which a replay left as it was shows."""


def look_at_graphs(session: SelfTestSession, findings: Findings) -> None:
    """On one rank with each kernel, and in a pipeline with torch's. In half precision, which other kernels want."""
    if not session.settings.on_gpus:
        raise NotLookedAt("the ranks are on CPUs")
    one, dtype = session.reference(), session.settings.half or "fp32"
    limit = SAME_KERNELS if dtype == "fp32" else rounding(one, dtype)
    tries = [(Degrees(), name) for name in KERNELS if name in session.kernels and KERNELS[name].graphs]
    if session.world > 1 and torch.version.hip is None:  # where several ranks have none
        tries.append((Degrees(pipe=session.world), next(iter(KERNELS))))
    for degrees, name in tries:
        what = f"{KERNELS[name].title}, {degrees}"
        with findings.of(what):
            outputs, seconds = {}, {}
            for graphs in (False, True):
                model = session.load(degrees, dtype, attention=as_wish(name), graphs=graphs)
                outputs[graphs], seconds[graphs] = _calls(session, model)
            stats = model.close_run(0, session.poll)
            findings.expect(all(rank.replayed for rank in stats), f"{what}: nothing was replayed")
            for why in {rank.without_graphs for rank in stats} - {""}:
                findings.wrong.append(f"{what}: {why}")
            findings.at_most(f"{what}: replays from calls", tiny_model.relative(outputs[True], outputs[False]), limit)
            findings.note(f"{what}: ms of a call, and replayed", [round(1000 * seconds[each], 2) for each in (False, True)])


def _calls(session: SelfTestSession, model: RemoteTransformer) -> tuple[torch.Tensor, float]:
    """The outputs of CALLS calls, and the seconds of the last."""
    (x, timestep, named), outputs, seconds = tiny_model.call(), [], 0.0
    for number in range(CALLS):
        started = time.perf_counter()
        output = model.predict(tiny_model.on_ranks(x, timestep * (1 - number / 10), named), session.poll)
        outputs.append(tiny_model.as_one(output).float().cpu())
        seconds = time.perf_counter() - started
    return torch.stack(outputs), seconds
