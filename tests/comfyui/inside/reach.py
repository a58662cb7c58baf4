"""What other nodes put on a MODEL: it reaches the ranks as it does the native model, or is refused by the node's name.

Run by serve.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from block_patches import extra, load_extras
from boot import PACK, Results, difference, ksampler, load_pack, native_model, node, parallel, random_prompts
from small_cases import small

import nodes

MEDDLING = PACK / "tests" / "comfyui" / "meddling_nodes"
EXTRAS = ("nodes_rope", "nodes_model_advanced")
FLUX, WAN = "tiny.safetensors", "wan-2.1-t2v.safetensors"
WIDTHS = {FLUX: {}, WAN: {"width": 24, "pooled": 8}}
LATENTS = {FLUX: (1, 16, 16, 12), WAN: (1, 16, 3, 12, 8)}


def scaled(model: Any) -> Any:
    return extra("ScaleROPE", model, scale_x=1.7, shift_x=2.5, scale_y=0.6, shift_y=-1.0, scale_t=1.3, shift_t=0.5)


class EmbedND_RifleX(torch.nn.Module):
    """As KJNodes': the native module for positions, but for one frequency of the frames' axis."""

    def __init__(self, usual: Any, num_frames: int, k: int):
        super().__init__()
        self.usual, self.num_frames, self.k = usual, num_frames, k

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        embedded = self.usual(ids)
        angle = ids[..., 0].float() * 0.9 * 2 * torch.pi / self.num_frames
        turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], dim=-1).unflatten(-1, (2, 2))
        embedded[:, 0, :, self.k - 1] = turn.to(embedded)
        return embedded


def longer(model: Any) -> Any:
    clone, name = model.clone(), "diffusion_model.rope_embedder"
    native = clone.model.diffusion_model
    assert native.dim // native.num_heads == 128
    usual = None if getattr(native, "on_ranks", False) else native.rope_embedder
    clone.add_object_patch(name, EmbedND_RifleX(usual, num_frames=3, k=4))
    return clone


def with_kept_text(model: Any) -> Any:
    """As QwenImage21Cache of ComfyUI from 0.37 on."""
    clone = model.clone()
    clone.model_options["transformer_options"]["qwen_image21_cache"] = {"device": "cpu", "dtype": "default"}
    return clone


def noted(model: Any) -> Any:
    """As ComfyUI's own BaseModel of Qwen-Image 2.1, from 0.37 on, does around each run."""
    native = model.model.diffusion_model
    native.current_patcher = model
    native.reset_prefix_cache(True)
    return model


def main(results: Results) -> None:
    load_extras(*EXTRAS)
    load_pack(MEDDLING)

    def sample(file: str, model: Any, **settings: Any) -> torch.Tensor:
        return ksampler(model, random_prompts(9, 9, **WIDTHS[file]), torch.zeros(LATENTS[file]), steps=8, **settings)

    def changed() -> dict[str, float]:
        native = native_model(WAN)
        plain, expected = sample(WAN, native), sample(WAN, scaled(longer(native)))
        found = sample(WAN, scaled(longer(parallel(WAN))))
        return {"moved": difference(plain, expected), "difference": difference(expected, found)}

    with small("wan-2.1-t2v"):
        results.case("RIFLEx and ScaleROPE", changed)
    model = parallel(FLUX)
    expected = sample(FLUX, model)

    def from_plain(change: Callable[[Any], Any]) -> float:
        return difference(expected, sample(FLUX, change(model)))

    for kind in (kind for kind in nodes.NODE_CLASS_MAPPINGS if kind.startswith("Meddling")):
        results.case(kind.removeprefix("Meddling"), partial(from_plain, partial(node, kind)))
    for kind, value in {"ModelAttentionBackend": "pytorch attention", "ModelComputeDtype": "bf16"}.items():
        results.case(kind, partial(from_plain, lambda model, kind=kind, value=value: node(kind, model, value)))
    results.case("QwenImage21Cache", partial(from_plain, with_kept_text))
    results.case("current_patcher", partial(from_plain, noted))
    results.case("after the refusals", partial(from_plain, lambda model: model))
