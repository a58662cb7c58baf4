"""Prompts in API form, on the bundled model: the bundled workflows, and graphs built node by node."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from parallel_backend.quickstart.model import WEIGHTS
from scripts.comfyui_server import PACK

API = PACK / "workflows" / "api"
COPY = "digits.safetensors"
STEPS, SEED = 4, 42
NATIVE, PLAIN, WARM, PIPELINED = "native", "plain", "all warm-up", "pipelined"
Link = list
CONFIG = {
    "ulysses_degree": 1,
    "ring_degree": 1,
    "patch_mode": "none",
    "patch_degree": 1,
    "attention": "auto",
    "comm_overlap": True,
}
"""Ulysses Config's inputs as workflows have them that were saved before it got patch_warmup_steps."""


def workflow(name: str = "quickstart", **widgets: Any) -> dict[str, Any]:
    """A bundled workflow with other widget values, set on whichever node has the widget."""
    prompt = json.loads((API / f"{name}.json").read_text())
    for widget, value in widgets.items():
        owners = [node for node in prompt.values() if widget in node["inputs"]]
        assert owners, widget
        for node in owners:
            node["inputs"][widget] = value
    return prompt


def small(name: str = "quickstart", **widgets: Any) -> dict[str, Any]:
    """Two steps of a 128 px picture. A seed of its own makes ComfyUI run the sampler rather than remember its output."""
    return workflow(name, **{"steps": 2, "width": 128, "height": 128} | widgets)


@contextmanager
def copy_of_bundled(base: Path) -> Iterator[None]:
    """The bundled weights where ComfyUI's own loader finds them, as COPY."""
    copy = base / "models" / "diffusion_models" / COPY
    shutil.copy(WEIGHTS, copy)
    yield
    copy.unlink()


class Graph:
    """A prompt in API form that grows node by node."""

    def __init__(self):
        self.prompt: dict[str, Any] = {}

    def add(self, kind: str, slot: int = 0, /, **inputs: Any) -> Link:
        """The node's output `slot`."""
        name = str(len(self.prompt) + 1)
        self.prompt[name] = {"class_type": kind, "inputs": inputs}
        return [name, slot]

    def models(self) -> dict[str, Link]:
        """One MODEL of each kind, of the same weights."""
        widgets = {"model_name": COPY, "weight_dtype": "fp32", "tensor_parallel_degree": 1, "split_batch_degree": 1}
        loader = self.add("ParallelDiTLoader", **widgets, pipefusion_degree=2, devices="cpu,cpu", stage_split="even")
        warm, pipelined = (
            self.add("ApplyPipeFusion", model=loader, num_pipeline_patch=3, warmup_steps=steps, overlap=True)
            for steps in (1000, 1)
        )
        native = self.add("UNETLoader", unet_name=COPY, weight_dtype="default")
        return {NATIVE: native, PLAIN: loader, WARM: warm, PIPELINED: pipelined}

    def text(self, text: str) -> Link:
        return self.add("QuickstartPrompt", text=text)

    def empty(self, size: int = 128, batch: int = 1) -> Link:
        return self.add("EmptySD3LatentImage", width=size, height=size, batch_size=batch)

    def mask(self) -> Link:
        """In the middle, over several bands."""
        background = self.add("SolidMask", value=0.0, width=128, height=128)
        hole = self.add("SolidMask", value=1.0, width=64, height=72)
        return self.add("MaskComposite", destination=background, source=hole, x=24, y=32, operation="add")

    def ksampler(self, model: Link, latent: Link | None = None, kind: str = "KSampler", /, **widgets: Any) -> Link:
        given = {
            "model": model,
            "seed": SEED,
            "steps": STEPS,
            "cfg": 3.0,
            "sampler_name": "euler",
            "scheduler": "simple",
            "positive": self.text("3 1 4 1"),
            "negative": self.text(""),
            "denoise": 1.0,
            "latent_image": latent or self.empty(),
        }
        return self.add(kind, **given | widgets)

    def picture(self, model: Link) -> Link:
        """Something to start from; of the native model, so that all start from the same."""
        return self.ksampler(model, seed=7, steps=6)

    def custom(self, model: Link, guider: Link, latent: Link, denoise: float) -> Link:
        """SamplerCustomAdvanced's output."""
        return self.add(
            "SamplerCustomAdvanced",
            noise=self.add("RandomNoise", noise_seed=SEED),
            guider=guider,
            sampler=self.add("KSamplerSelect", sampler_name="dpmpp_2m"),
            sigmas=self.add("BasicScheduler", model=model, scheduler="simple", steps=STEPS, denoise=denoise),
            latent_image=latent,
        )
