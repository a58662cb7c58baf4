"""ControlNets of models that run as ComfyUI's own class on ranks, against ComfyUI's own MODEL. Run by serve.py.

The test process has put the cases where families.py finds them. Every family's file is computed by its class.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from boot import BASE, Results, by_own_class, comfy, difference, ksampler, node, parallel, sequence, torch
from comfy.controlnet import ControlBase
from families import detecting, read

MODES = {
    "stages": {"pipe": 2},
    "split batch": {"pipe": 1, "batch": 2},
    "ulysses": {"pipe": 1, "config": sequence(ulysses=2)},
    "ring": {"pipe": 1, "config": sequence(ring=2)},
    "tensor": {"pipe": 1, "tensor": 2},
}
MODELS = BASE / "models" / "diffusion_models"
FIRST_LAYERS = "img_in.weight", "patch_embedding.weight"


class Residuals(ControlBase):
    """A ControlNet that adds the same random residuals behind some blocks. `kind`: "input" or "output"."""

    def __init__(self, kind: str, blocks: list[int], hidden: int):
        super().__init__()
        self.kind, self.blocks, self.hidden = kind, blocks, hidden

    def get_control(self, x_noisy, t, cond, batched_number, transformer_options):
        g = torch.Generator().manual_seed(6)
        frames = math.prod(x_noisy.shape[2:-2])
        tokens = frames * math.prod(math.ceil(size / 2) for size in x_noisy.shape[-2:])
        rows = {i: 0.5 * torch.randn(1, tokens, self.hidden, generator=g).repeat(len(x_noisy), 1, 1) for i in self.blocks}
        none = {"input": [], "middle": [], "output": []}
        return none | {self.kind: [rows.get(index) for index in range(max(self.blocks) + 1)]}

    def get_models(self):
        return []

    def copy(self):
        return self

    def cleanup(self):
        pass


def main(results: Results, name: str, modes: list[str]) -> None:
    with detecting(read(name)[-1]["detected"]):
        Controls(results, name).compare(modes)


def native_model(file: str) -> Any:
    return comfy.sd.load_diffusion_model(str(MODELS / file), model_options={"dtype": torch.float32})


class Controls:
    """One file."""

    def __init__(self, results: Results, name: str):
        self.results, self.name, self.file = results, name, f"{name}.safetensors"
        positive, negative, self.latent, self.settings = read(name)
        self.prompts, self.native = [positive, negative], native_model(self.file)
        state = self.native.model.diffusion_model.state_dict()
        self.hidden = next(value.shape[0] for key, value in state.items() if key in FIRST_LAYERS)

    def sampled(self, model: Any, texts: list | None = None, latent: Any = None, **more: Any) -> torch.Tensor:
        settings = {"cfg": self.settings["cfg"], "scheduler": self.settings["scheduler"], "steps": 2} | more
        return ksampler(model, texts or self.prompts, self.latent if latent is None else latent, **settings)

    def share(self, expected: torch.Tensor, found: torch.Tensor) -> float:
        return difference(expected, found) / float(expected.abs().max())

    def controlled(self, kind: str, blocks: list[int]) -> Callable[[], list]:
        control = {"control": Residuals(kind, blocks, self.hidden), "control_apply_to_uncond": False}
        return lambda: [[[text, extras | control] for text, extras in prompt] for prompt in self.prompts]

    def compare(self, modes: list[str]) -> None:
        plain = self.sampled(self.native)
        for kind, blocks in {"input": [1], "output": [0, 1]}.items():
            texts = self.controlled(kind, blocks)

            def whole(mode: str, texts=texts) -> dict[str, float]:
                expected = self.sampled(self.native, texts())
                found = self.sampled(by_own_class(parallel, self.file, **MODES[mode]), texts())
                return {"share": self.share(expected, found), "moved": self.share(expected, plain)}

            for mode in modes:
                self.results.case(f"{self.name}, {kind}, {mode}", partial(whole, mode))
            self.results.case(f"{self.name}, {kind}, PipeFusion, all steps exact", partial(self.in_patches, texts))

    def in_patches(self, texts: Callable[[], list]) -> dict[str, Any]:
        own = by_own_class(lambda: node("ApplyPipeFusion", parallel(self.file), 2, 1000, True))
        expected, found = (self.sampled(each, texts(), steps=4) for each in (self.native, own))
        wrappers = own.get_all_wrappers(comfy.patcher_extension.WrappersMP.SAMPLER_SAMPLE)
        return {"share": self.share(expected, found), "whole because": [wrapper.last.reason for wrapper in wrappers]}
