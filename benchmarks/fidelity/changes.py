"""What sending only changes costs displaced patches: pictures and videos of the mini models, by bits of a value.

    python -m benchmarks.fidelity.changes --images 20 --videos 6 --out benchmarks/results/changes_X.json

For each model and number of steps, on two ranks with one exact step: PSNR to one rank and to full transfers, and what a rank
sends in a displaced step as a share of what it sends in full. Beside them `values`: not what changed but the keys and values
themselves, in as many bits. `at once`: every step waits for the other rank, as a ring does, and only the bits are off. The
control is one rank with one step fewer. Ranks are threads of this process.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from unittest import mock

import torch

from benchmarks.harness import mini_model, mini_video
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import sample_in_bands
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.pool import Pool
from parallel_backend.rank.attention import context
from parallel_backend.rank.attention.bands import DisplacedPatches
from parallel_backend.rank.attention.context import LayerCall
from parallel_backend.rank.comm.change_codec import ChangeCodec
from parallel_backend.rank.comm.collectives import start_gather
from testing.models import on_ranks
from testing.thread_ranks import thread_ranks

DISPLACED = Degrees(patch=2, patch_mode="displaced")


class WithoutMemory(ChangeCodec):
    """Nothing is held from call to call: values are sent themselves."""

    def encode(self, values_N: torch.Tensor, held_N: torch.Tensor, size: int) -> torch.Tensor:
        return super().encode(values_N, held_N.zero_(), size)

    def add(self, packed_Y: torch.Tensor, held_N: torch.Tensor, size: int) -> None:
        super().add(packed_Y, held_N.zero_(), size)


CODECS: dict[str, ChangeCodec | None] = {
    "full": None,
    "changes, 4 bits": ChangeCodec(4),
    "values, 4 bits": WithoutMemory(4),
    "values, 8 bits": WithoutMemory(8),
    "changes, 2 bits": ChangeCodec(2),
    "at once: changes, 4 bits": ChangeCodec(4),
    "at once: values, 8 bits": WithoutMemory(8),
}
AT_ONCE = "at once"


def start_at_once(form: DisplacedPatches, at: LayerCall, kv_2BshD: torch.Tensor, lengths: list[int]):
    """In the place of DisplacedPatches._start: the codec is used in exact calls too, behind the first one."""
    patch, traffic = form._context.patch, form._context.traffic
    held = at.step.buffer.held.get((at.layer, at.step.message.entries))
    return (
        start_gather(kv_2BshD, lengths, 2, patch, traffic) if held is None else held.start_gather(kv_2BshD, patch, traffic)
    )


@contextlib.contextmanager
def waiting_for_each_other(steps: int) -> Iterator[None]:
    def sample(model, x, sigmas, prompt, bands, _warm_up, **named):
        return sample_in_bands(model, x, sigmas, prompt, bands, steps, **named)

    waits = mock.patch.object(DisplacedPatches, "_start", start_at_once)
    with waits, mock.patch.object(mini_model, "sample_in_bands", sample):
        yield


def draw(name: str, model: RemoteTransformer, asked, noise, steps: int, bands: int, cfg: float) -> torch.Tensor:
    if name == "pictures":
        return mini_model.sample(model, asked, noise, steps, bands, cfg)
    return mini_video.sample(model, asked, noise, steps, bands, cfg, "frames")[0]


def counted(model: RemoteTransformer) -> Counter[str]:
    """By axis, the bytes that the ranks send in the model's runs from now on."""
    sent, close_run = Counter(), model.close_run

    def close(*arguments, **named):
        stats = close_run(*arguments, **named)
        for rank in stats:
            sent.update(rank.bytes_sent)
        return stats

    model.close_run = close
    return sent


def main() -> None:
    parser = mini_model.parser(__doc__, 20)
    parser.add_argument("--videos", type=int, default=6)
    parser.add_argument("--steps", type=mini_model.numbers(int), default=[20, 8])
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = mini_model.Report(options, videos=str(options.videos))
    table = {
        "pictures": (mini_model.opened(), *mini_model.requests(options.images), options.cfg, mini_model.judge),
        "videos": (mini_video.opened(), *mini_video.requests(options.videos), 2.0, mini_video.judge),
    }
    with thread_ranks() as start:
        pools = [Pool(("cpu",) * count, start=start, silence=3600) for count in (1, 2)]
        for name, (checkpoint, asked, noise, cfg, judge) in table.items():
            exact, full = {}, {}
            model = on_ranks(pools[0], checkpoint, Degrees(), "fp32", "auto", lambda: None)
            for steps in options.steps:
                exact[steps] = draw(name, model, asked, noise, steps, 0, cfg)
                fewer = draw(name, model, asked, noise, steps - 1, 0, cfg)
                report({"of": name, "steps": steps, "mode": "one step fewer", **judge(fewer, exact[steps], asked)})
            for mode, codec in CODECS.items():
                with mock.patch.object(context, "changes_for", lambda _, codec=codec: codec):
                    model = on_ranks(pools[1], checkpoint, DISPLACED, "fp32", "auto", lambda: None)
                sent_by_axis = counted(model)
                for steps in options.steps:
                    sent_by_axis.clear()
                    with waiting_for_each_other(steps) if mode.startswith(AT_ONCE) else contextlib.nullcontext():
                        made = draw(name, model, asked, noise, steps, 1, cfg)
                    sent = sent_by_axis["patch"]
                    whole, by_step = full.setdefault(steps, (made, sent / steps))
                    found = mini_model.closeness(made, whole)
                    row = {"of": name, "steps": steps, "mode": mode, **judge(made, exact[steps], asked)}
                    if not mode.startswith(AT_ONCE):
                        row |= {f"{figure}_to_full": decibels for figure, decibels in found.items()}
                    report(row | {"share_of_bytes": round((sent - by_step) / (steps - 1) / by_step, 4)})
        for pool in pools:
            pool.close()


if __name__ == "__main__":
    main()
