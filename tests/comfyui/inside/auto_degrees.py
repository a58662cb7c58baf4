"""`degrees` auto of Parallel DiT Loader: what it chooses on machines that are made up, and that the picture is that of the
same degrees by hand. Run by serve.py.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

from boot import Results, comfy, difference, ksampler, node, nodes, parallel, random_prompts, torch

FILE = "tiny.safetensors"


def main(results: Results) -> None:
    within = nodes.NODE_CLASS_MAPPINGS["ParallelDiTLoader"].__module__.rpartition(".")[0]
    names = "sampling.auto_degrees", "model.end_of_run", "ui.node_text"
    auto, end_of_run, node_text = (sys.modules[f"{within}.{name}"] for name in names)

    from parallel_backend.placement.links import Link, Links, alike
    from parallel_backend.planning.calibrated_costs import BlockCost, Calibration, DeviceCost
    from parallel_backend.planning.machine import Device, Machine

    prompts = random_prompts(9, 9)
    latent = torch.zeros(1, 16, 16, 16)
    said, measured = [], []

    sample = partial(ksampler, steps=2)

    def load(devices: str = "cpu,cpu", config=None, stage_split: str = "even"):
        """Degrees that could not be served, since they are not looked at."""
        arguments = (FILE, "fp32", 7, 7, 7, devices, config, stage_split)
        return node("ParallelDiTLoader", *arguments, degrees="auto")

    def pipelined(model):
        return node("ApplyPipeFusion", model, 4, 1, True)

    @contextmanager
    def machine(bandwidth: float, speeds: tuple[float, ...] = (1.0, 1.0)) -> Iterator[None]:
        """Ranks that are calibrated so. A calibration that was kept is forgotten, and the model with it."""
        node("UnloadParallelDiT")
        for file in auto.folder().glob("calibration*"):
            file.unlink()
        lists = ("double_blocks", "single_blocks")
        costs = tuple(
            DeviceCost(dict.fromkeys(lists, BlockCost(1e-6 / speed, 1e-3 / speed, 0.0)), BlockCost(0.0, 0.0, 0.0))
            for speed in speeds
        )
        links = Links(alike(len(speeds), Link(1e-9, bandwidth)))
        found = Calibration(Machine((Device("cpu", "made up"),) * len(speeds), links), costs, hop=1e-6)
        measured.clear()

        def calibrate(pool, *_arguments) -> Calibration:
            measured.append(pool.devices)
            return found

        with patch.object(auto, "calibrate", calibrate), patch.object(node_text, "say", said.append):
            yield

    def key_of(model):
        return model.model.diffusion_model.setup

    def chosen(model) -> list:
        key = key_of(model)
        return [str(key.degrees), list(key.devices)]

    def by_hand(model) -> float:
        """How far its picture is from that of a loader with the degrees that it chose."""
        degrees, devices = key_of(model).degrees, ",".join(key_of(model).devices)
        mode = degrees.patch_mode if degrees.patch > 1 else "none"
        sequence = (degrees.ulysses, degrees.ring, mode, degrees.patch)
        config = node("UlyssesConfig", *sequence, "auto", True)
        same = parallel(FILE, degrees.pipe, degrees.batch, devices, config, degrees.tensor, "even")
        return difference(sample(model, prompts, latent), sample(same, prompts, latent))

    def batches() -> dict:
        """cfg above 1, fast links: two prompts side by side."""
        with machine(1e12):
            model = load()
            before = chosen(model)
            sample(model, prompts, latent)
            return {"before": before, "chosen": chosen(model), "difference": by_hand(model), "said": said[-1]}

    def pipefusion() -> dict:
        """Links that only PipeFusion can use."""
        with machine(5e5):
            model = load()
            wrapped = pipelined(model)
            sample(wrapped, prompts, latent, cfg=1.0, steps=8)
            found = chosen(model)
            sample(model, prompts, latent, cfg=1.0, steps=8)
            without = chosen(model)
            sample(wrapped, prompts, latent, cfg=1.0, steps=8)
            return {
                "chosen": found,
                "without": without,
                "again": chosen(model),
                "measured": len(measured),
            }

    def advised() -> dict:
        """Degrees by hand, on a machine that was calibrated before, as one so fast that any run takes longer."""
        ended: list[str] = []
        with machine(1e12, (1e6, 1e6)):
            sample(load(), prompts, latent)
            stages = parallel(FILE, 2)
            with patch.object(end_of_run, "say", ended.append):
                for model in (stages, stages, parallel(FILE, 1, 2), node("ParallelStepCache", stages, 0.2, 0.0, 1.0)):
                    sample(model, prompts, latent)
                stages.cleanup()  # as when another node makes room: the run has been told of
        return {"ended": ended}

    def cancelled() -> dict:
        """While calibrating: the next run calibrates."""
        with machine(1e12):
            model = load()
            with patch.object(auto, "calibrate", side_effect=comfy.model_management.InterruptProcessingException):
                try:
                    sample(model, prompts, latent)
                except comfy.model_management.InterruptProcessingException:
                    stopped = True
            sample(model, prompts, latent)
            return {"stopped": stopped, "chosen": chosen(model)}

    def stages_by_hand() -> None:
        load(stage_split="3,2")

    # Those of two ranks first: ranks start anew where their number changes.
    for case in (batches, cancelled, advised, pipefusion, stages_by_hand):
        results.case(case.__name__, case)
