"""How far PipeFusion is from one rank by samplers of other packs, on the trained mini model, and how far fewer steps.

    python -m benchmarks.fidelity.samplers --packs FOLDER --images 10 --out benchmarks/results/samplers_NAME_DATE.json

Samplers as a workflow has them, in a ComfyUI (tests/comfyui/inside/guidance_pictures.py), one warm-up step. For each, the
digits read, and the PSNR to the same sampler with every call whole (decoded pictures in 0..1, mean over pictures) of
PipeFusion with M bands and of one rank with steps dropped to the time predicted for PipeFusion on two stages, rounded up. A
row "one rank" has the PSNR to Euler's method.
"""

from pathlib import Path

from benchmarks.harness import mini_model as mini
from benchmarks.harness.comfyui_pictures import named, runs_compared, studio

EULER = "euler"
SAMPLERS = (
    *("Detail Daemon", "Lying Sigma", "Euler CFG++, alternative"),
    *(f"{name}_ode" for name in ("res_2m", "res_3m", "res_2s", "res_3s", "res_5s", "res_6s", "deis_2m", "deis_3m")),
)


def main() -> None:
    parser = mini.parser(__doc__, 10)
    parser.add_argument("--steps", type=mini.numbers(int), default=[20, 8])
    parser.add_argument("--bands", type=mini.numbers(int), default=[2, 4])
    parser.add_argument("--packs", type=Path, required=True)
    parser.add_argument("--only", type=mini.numbers(str), default=[])
    parser.add_argument("--comfyui", type=Path, default=Path.home() / "ComfyUI")
    options = parser.parse_args()
    report, euler = mini.Report(options), {}
    with studio(options.images, options.cfg, options.comfyui) as made_by:
        for name in (EULER, *(name for name in SAMPLERS if not options.only or name in options.only)):
            runs = {steps: runs_compared(steps, options.bands) for steps in options.steps}
            made = made_by.make([run for each in runs.values() for run in each], options.packs, name="none", sampler=name)
            for steps, each in runs.items():
                euler.setdefault(steps, made[steps, 0])
                for run in each:
                    to = euler[steps] if run == (steps, 0) else made[steps, 0]
                    row = {"steps": steps, "sampler": name, "mode": named(steps, run)}
                    report(row | mini.judge(made[run], to, made_by.symbols))


if __name__ == "__main__":
    main()
