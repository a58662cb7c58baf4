"""What each mode costs a video, on the trained mini video model: bands of rows and of frames beside fewer steps.

    python -m benchmarks.fidelity.video --images 40 --out benchmarks/results/fidelity_video_NAME_DATE.json

`--images` counts videos, of 8 frames: as many as a frame has rows of tokens. For each number of steps: the frames read and
the PSNR to the exact run (decoded videos in 0..1, mean over videos) of PipeFusion (one warm-up step) in M bands along
either axis, of displaced patches, of the step cache whole and in bands, and of Ulysses with compressed transfers; and of
one rank with fewer steps: as many as fit into the time predicted for PipeFusion on 2 and 4 stages, and as the cache
computed.
What a band sees depends on M alone, not on the number of stages: some videos are computed again on 2 and 4 stages, and the
largest difference is reported.
"""

import torch

from benchmarks.fidelity.quality import same_time_steps
from benchmarks.harness import mini_model as mini
from benchmarks.harness.mini_video import judge, load, requests, sample
from parallel_backend.core.degrees import Degrees
from parallel_backend.rank.comm.transfer_codec import KINDS

AXES = ("rows", "frames")
THRESHOLD = 0.04  # of the step cache
CACHED_BANDS = 4
CHECKED = 4  # videos that are computed again on stages


class Bench:
    """The videos asked for, their exact runs by number of steps, and the report."""

    def __init__(self, options):
        self.options, self.report = (
            options,
            mini.Report(options, images_are="videos of 8 frames, 8 x 8 x 4 tokens, from real ones with noise to 0.75"),
        )
        self.prompts, self.noise = requests(options.images)
        self.exact: dict[int, torch.Tensor] = {}

    def run(self, model, steps: int, mode: str, bands: int, along: str = "rows", threshold: float = 0.0) -> int:
        """Reports one row; the calls computed, rounded up."""
        given = self.prompts, self.noise, steps, bands, self.options.cfg, along, threshold
        videos, computed = sample(model, *given)
        self.exact.setdefault(steps, videos)
        calls = {"computed": sum(computed) / len(computed)} if threshold else {}
        self.report({"steps": steps, "mode": mode, **calls, **judge(videos, self.exact[steps], self.prompts)})
        return -(-sum(computed) // len(computed))

    def fewer(self, model, steps: int, counts: set[int]) -> None:
        for count in sorted(counts):
            videos, _ = sample(model, self.prompts, self.noise, count, 0, self.options.cfg)
            found = judge(videos, self.exact[steps], self.prompts)
            self.report({"steps": steps, "mode": f"one rank, {count} steps instead", **found})

    def stages(self, count: int, steps: int) -> None:
        """How far PipeFusion on so many stages is from PipeFusion on one."""
        given = self.prompts[:CHECKED], self.noise[:CHECKED], steps, 2 * count, self.options.cfg
        videos = {}
        for degree in (1, count):
            model = load(Degrees(pipe=degree))
            videos[degree] = [sample(model, *given, along)[0] for along in AXES]
            model.pool.close()
        for along, one, many in zip(AXES, videos[1], videos[count], strict=True):
            gap = {"max_difference": (one - many).abs().max().item()}
            self.report({"steps": steps, "mode": f"pipefusion M={2 * count} of {along} on {count} stages", **gap})


def main() -> None:
    parser = mini.parser(__doc__, 40)
    parser.set_defaults(cfg=2.0)
    parser.add_argument("--steps", type=mini.numbers(int), default=[20, 8])
    parser.add_argument("--bands", type=mini.numbers(int), default=[2, 4, 8])
    parser.add_argument("--patches", type=mini.numbers(int), default=[2, 4])
    parser.add_argument("--stages", type=mini.numbers(int), default=[2, 4])
    options = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(options)
    model = load(Degrees(batch=2))
    for steps in options.steps:
        bench.run(model, steps, "one rank", 0)
        for bands in options.bands:
            for along in AXES:
                bench.run(model, steps, f"pipefusion M={bands} of {along}", bands, along)
        fewer = {count for stages in options.stages for count in same_time_steps(steps, stages, 2 * stages)}
        fewer.add(bench.run(model, steps, f"cache {THRESHOLD}", 0, threshold=THRESHOLD))
        for along in AXES:
            mode = f"pipefusion M={CACHED_BANDS} of {along}, cache {THRESHOLD}"
            fewer.add(bench.run(model, steps, mode, CACHED_BANDS, along, THRESHOLD))
        bench.fewer(model, steps, fewer - {steps})
    model.pool.close()
    for degree in options.patches:
        model = load(Degrees(patch=degree, patch_mode="displaced"))
        for steps in options.steps:
            for along in AXES:
                bench.run(model, steps, f"displaced patches of {along} on {degree} ranks", 1, along)
        model.pool.close()
    for kind in KINDS:
        model = load(Degrees(ulysses=2), kind)
        for steps in options.steps:
            bench.run(model, steps, f"ulysses on 2 ranks, {kind} transfers", 0)
        model.pool.close()
    for count in options.stages:
        bench.stages(count, min(options.steps))


if __name__ == "__main__":
    main()
