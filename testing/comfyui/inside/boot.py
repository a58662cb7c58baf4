"""Boots ComfyUI in this process, and has helpers for the scripts. ComfyUI's Python runs this file, see serve.py.

Arguments: the ComfyUI checkout, a base directory, and flags of ComfyUI. It is on the CPU unless --disable-dynamic-vram is
one of them. What PARALLEL_DIT_FIRST names, modules of the pack with a space between them, is imported before all else.
"""

import asyncio
import importlib
import logging
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

PACK = Path(__file__).resolve().parents[3]
FORKED_RANKS = PACK / "testing" / "comfyui" / "forked_ranks"
CHECKOUT, BASE = (Path(argument) for argument in sys.argv[1:3])
MODELS = BASE / "models" / "diffusion_models"

sys.path.insert(0, str(PACK))
for name in os.environ.get("PARALLEL_DIT_FIRST", "").split():
    importlib.import_module(name)
sys.path.remove(str(PACK))

os.chdir(CHECKOUT)
sys.path.insert(0, str(CHECKOUT))
on_the_cpu = [] if "--disable-dynamic-vram" in sys.argv else ["--cpu"]
sys.argv[1:] = [*on_the_cpu, "--base-directory", str(BASE), *sys.argv[3:]]

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import comfy.samplers  # noqa: E402
import comfy.sd  # noqa: E402
import torch.multiprocessing  # noqa: E402
from comfy.ldm.modules import attention  # noqa: E402

import nodes  # noqa: E402

BUNDLED = "quickstart-digits (bundled)"


def load_pack(folder: Path) -> None:
    """As ComfyUI does it at its start; the pack's nodes are then in `nodes.NODE_CLASS_MAPPINGS`."""
    assert asyncio.run(nodes.load_custom_node(str(folder))), f"{folder} did not import"


def spawned_ranks() -> AbstractContextManager:
    """Context in which ranks are spawned, as for users, instead of forked."""
    return patch.object(torch.multiprocessing, "get_context", multiprocessing.get_context)


def outputs_of(name: str, *arguments: Any, **named: Any) -> tuple:
    """Outputs of a V1 node. `arguments`: values of its first inputs, in the order of the node's widgets."""
    kind = nodes.NODE_CLASS_MAPPINGS[name]
    types = kind.INPUT_TYPES()
    inputs = [*types["required"], *types.get("optional", {})]
    return getattr(kind(), kind.FUNCTION)(**dict(zip(inputs, arguments, strict=False)), **named)


def node(name: str, *arguments: Any, **named: Any) -> Any:
    """The first of `outputs_of`."""
    return outputs_of(name, *arguments, **named)[0]


def parallel(
    name: str,
    pipe: int = 2,
    batch: int = 1,
    devices: str = "cpu,cpu",
    config: Any = None,
    tensor: int = 1,
    stage_split: str = "auto",
    compile: bool = False,
) -> Any:
    """Parallel DiT Loader's MODEL in fp32."""
    return node("ParallelDiTLoader", name, "fp32", pipe, tensor, batch, devices, config, stage_split, compile)


def sharing_small_lists() -> AbstractContextManager:
    """Context in which a trial takes bands of lists with any share of the blocks: small files have few blocks beside their
    refiners."""
    return patch("parallel_backend.own_class.trials.trial.LEAST_SHARE", 0.0)


def sequence(ulysses: int = 1, ring: int = 1, patch_mode: str = "none", patch: int = 1, patch_warmup_steps: int = 1) -> Any:
    """The output of Ulysses Config."""
    return node("UlyssesConfig", ulysses, ring, patch_mode, patch, "auto", True, patch_warmup_steps)


def ksampler(model, prompts, latent, sampler="euler", steps=4, cfg=3.0, seed=42, denoise=1.0, scheduler="simple"):
    """KSampler's samples. `latent`: a tensor, or what a LATENT link carries."""
    latent = latent if isinstance(latent, dict) else {"samples": latent}
    return nodes.common_ksampler(model, seed, steps, cfg, sampler, scheduler, *prompts, latent, denoise=denoise)[0][
        "samples"
    ]


def native_model(file: str | Path) -> Any:
    """ComfyUI's own MODEL of a file of models/diffusion_models, in fp32."""
    return comfy.sd.load_diffusion_model(str(MODELS / file), model_options={"dtype": torch.float32})


def random_prompts(*lengths: int, width: int = 64, pooled: int = 32) -> list:
    """A prompt of so many text tokens for each. Of equal lengths, ComfyUI evaluates two as one batch, else as two."""
    g = torch.Generator().manual_seed(0)
    return [
        [[torch.randn(1, length, width, generator=g), {"pooled_output": torch.randn(1, pooled, generator=g)}]]
        for length in lengths
    ]


def whole_because(model: Any) -> list[str | None]:
    """Why a MODEL's last run was not cut into bands, None if it was; nothing for one without Apply PipeFusion."""
    wrappers = model.get_all_wrappers(comfy.patcher_extension.WrappersMP.SAMPLER_SAMPLE)
    return [wrapper.last.reason for wrapper in wrappers if hasattr(wrapper, "last")]


def parts_of(latent: Any) -> list[torch.Tensor]:
    """The parts of a nested latent; a latent that is none is the only one."""
    return list(latent.unbind()) if getattr(latent, "is_nested", False) else [latent]


def difference(a: Any, b: Any) -> float:
    """Largest absolute difference of latents; NaN counts as infinite."""
    pairs = zip(parts_of(a), parts_of(b), strict=True)
    return max(float(torch.nan_to_num((own - other).abs(), nan=float("inf")).max()) for own, other in pairs)


def other_attention(model):
    """The native MODEL with another of ComfyUI's attention kernels.

    What its samples then differ by is what fp32 rounding does on this CPU, for the same picture 1e-5 or 2e-5.
    """
    usual = attention.optimized_attention
    other = attention.attention_basic if usual is attention.attention_pytorch else attention.attention_pytorch
    return _attending(model, other)


def masking(model):
    """The native MODEL of a class that masks by booleans. ComfyUI's kernel for a CPU would add them to the scores."""
    return _attending(model, attention.attention_pytorch)


def _attending(model, kernel: Callable[..., torch.Tensor]):
    clone = model.clone()
    options = clone.model_options["transformer_options"]
    options["optimized_attention_override"] = lambda _usual, *arguments, **named: kernel(*arguments, **named)
    return clone


class Told(logging.Handler):
    """Collects the warnings of this pack, from when it is made."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger().addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if "Parallel DiT" in (text := record.getMessage()):
            self.texts.append(text)


class Results:
    """Case -> what it gave, or {"error": text}. It becomes JSON, so that the test process needs nothing of ComfyUI.

    `skip`: cases that no test asks for in this session.
    """

    def __init__(self, skip: Iterable[str] = ()):
        self.found: dict[str, Any] = {}
        self._skip = frozenset(skip)

    def case(self, name: str, measure: Callable[[], Any]) -> None:
        if name in self._skip:
            return
        try:
            with torch.inference_mode():
                self.found[name] = measure()
        except Exception as error:
            self.found[name] = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
