"""How far PipeFusion is from one rank under guidance nodes and guiders, on the trained mini model, and how far fewer steps.

    python -m benchmarks.fidelity.guidance --images 12 --out benchmarks/results/guidance_NAME_DATE.json
    python -m benchmarks.fidelity.guidance --packs FOLDER --only "Skimmed CFG,Regional CFG"

Nodes as a workflow has them, in a ComfyUI (../harness/inside/guidance_pictures.py): euler, one warm-up step. For each,
the digits read, and the PSNR to the same node with every call whole (decoded pictures in 0..1, mean over pictures) of
PipeFusion with M bands and of one rank with steps dropped to the time predicted for PipeFusion on two stages, rounded up. A
row "one rank" has the PSNR of a run without the node, which says how much the node does.
"""

from pathlib import Path

from benchmarks.harness import mini_model as mini
from benchmarks.harness.comfyui_pictures import named, runs_compared, studio
from testing.comfyui import guidance_names as tables

NONE = "none"
ELSEWHERE = (
    *("Video Linear CFG", "Video Triangle CFG", "LTXV Modality Guidance", "LTXV Reference Audio", "LTXV STG"),
    "Perturbed Attention",
)
"""Nodes for other models, that do nothing on this one."""
OF_PACKS = (
    *("Skimmed CFG", "Skimmed CFG replace", "Skimmed CFG linear", "Skimmed CFG dual", "Skimmed CFG flip"),
    *("Guidance Timestepping", "ScheduledCFGGuidance", "ScheduledCFGGuider"),
    *("Difference CFG", "Difference CFG sum", "Dynamic Thresholding", "Dynamic Thresholding full", "CFG-Zero* (KJ)"),
    *("Regional CFG", "Contrastive CFG", "Contrastive CFG after", "ScheduledPerpNegCFGGuider"),
)


def main() -> None:
    parser = mini.parser(__doc__, 12)
    parser.add_argument("--steps", type=mini.numbers(int), default=[20])
    parser.add_argument("--bands", type=mini.numbers(int), default=[4])
    parser.add_argument("--packs", type=Path)
    parser.add_argument("--only", type=mini.numbers(str), default=[])
    parser.add_argument("--comfyui", type=Path, default=Path.home() / "ComfyUI")
    options = parser.parse_args()
    names = [*tables.PIXEL_WISE, *tables.WHOLE]
    if options.packs is not None:
        names += OF_PACKS
    names = [name for name in names if name not in ELSEWHERE and (not options.only or name in options.only)]
    report, without = mini.Report(options), {}
    with studio(options.images, options.cfg, options.comfyui) as made_by:
        for name in (NONE, *names):
            packs = options.packs if name in OF_PACKS else None
            runs = {steps: runs_compared(steps, options.bands) for steps in options.steps}
            made = made_by.make([run for each in runs.values() for run in each], packs, name=name)
            for steps, each in runs.items():
                without.setdefault(steps, made[steps, 0])
                for run in each:
                    to = without[steps] if run == (steps, 0) else made[steps, 0]
                    row = {"steps": steps, "node": name, "mode": named(steps, run)}
                    report(row | mini.judge(made[run], to, made_by.symbols))


if __name__ == "__main__":
    main()
