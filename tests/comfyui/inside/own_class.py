"""Models that no family computes, as ComfyUI's own class on ranks, against ComfyUI's own MODEL of the same file. Run by
serve.py."""

import math

from boot import BASE, Results, comfy, difference, ksampler, node, outputs_of, parallel, sequence, torch
from families import detecting
from safetensors.torch import save_file

MODELS = BASE / "models" / "diffusion_models"
COSMOS = {
    "image_model": "cosmos",
    "max_img_h": 24,
    "max_img_w": 24,
    "max_frames": 16,
    "in_channels": 16,
    "out_channels": 16,
    "patch_spatial": 2,
    "patch_temporal": 1,
    "model_channels": 192,
    "block_config": "FA-CA-MLP",
    "num_blocks": 3,
    "num_heads": 4,
    "concat_padding_mask": True,
    "pos_emb_cls": "rope3d",
    "pos_emb_learnable": False,
    "pos_emb_interpolation": "crop",
    "block_x_format": "THWBD",
    "affline_emb_norm": True,
    "use_adaln_lora": True,
    "adaln_lora_dim": 16,
    "extra_per_block_abs_pos_emb": True,
    "extra_per_block_abs_pos_emb_type": "learnable",
    "rope_h_extrapolation_ratio": 1.0,
    "rope_w_extrapolation_ratio": 1.0,
    "rope_t_extrapolation_ratio": 2.0,
    "crossattn_emb_channels": 2048,
}
AURA = {
    "dim": 128,
    "n_layers": 6,
    "n_double_layers": 2,
    "n_heads": 4,
    "global_conddim": 128,
    "cond_seq_dim": 2048,
    "max_seq": 256,
}
"""Arguments of small classes, whose sizes ComfyUI's detection does not read off a file."""


def write(kind: type[torch.nn.Module], arguments: dict, name: str) -> None:
    """A file of random values, with gates that are not 0."""
    model, g = kind(**arguments, operations=torch.nn, dtype=torch.float32), torch.Generator().manual_seed(5)
    state = {}
    for key, value in model.state_dict().items():
        std = 1 / math.sqrt(value[0].numel()) if value.ndim > 1 else 0.1
        state[key] = std * torch.randn(value.shape, generator=g) + (1.0 if value.ndim == 1 and "weight" in key else 0.0)
    save_file(state, MODELS / name)
    scaled = {}
    for key, value in state.items():
        if key.endswith(".weight") and value.ndim == 2 and ("layers" in key or "blocks" in key):
            scale = value.abs().max() / 448
            scaled |= {key: (value / scale).to(torch.float8_e4m3fn), key.replace(".weight", ".scale_weight"): scale}
        else:
            scaled[key] = value
    save_file(scaled | {"scaled_fp8": torch.empty(0, dtype=torch.float8_e4m3fn)}, MODELS / f"fp8-{name}")


def main(results: Results, models: list[str]) -> None:
    from comfy.ldm.aura.mmdit import MMDiT
    from comfy.ldm.cosmos.model import GeneralDIT

    write(MMDiT, AURA, "aura.safetensors")
    write(GeneralDIT, COSMOS, "cosmos.safetensors")
    g = torch.Generator().manual_seed(0)
    texts = [torch.randn(1, 9, 2048, generator=g) for _ in range(2)]
    prompts = [[[text, {}]] for text in texts]
    for name, arguments, latent in (
        ("aura", AURA, torch.zeros(1, 4, 16, 24)),
        ("cosmos", COSMOS, torch.zeros(1, 16, 3, 12, 16)),
    ):
        if name in models:
            with detecting(arguments):
                of_class(results, name, prompts, latent)
    with detecting(AURA):
        refusals(results)


def of_class(results: Results, name: str, prompts: list, latent: torch.Tensor) -> None:
    file = f"{name}.safetensors"

    def native(file: str):
        return comfy.sd.load_diffusion_model(str(MODELS / file), model_options={"dtype": torch.float32})

    def sampled(model, **more) -> torch.Tensor:
        return ksampler(model, prompts, latent, **more)

    own, expected = native(file), sampled(native(file))
    modes = {
        "stages": {"pipe": 2},
        "split batch": {"pipe": 1, "batch": 2},
        "one rank": {"pipe": 1, "devices": "cpu"},
        "tensor": {"pipe": 1, "tensor": 2},
        "tensor, three ranks": {"pipe": 1, "tensor": 3, "devices": "cpu,cpu,cpu"},
        "tensor and stages": {"tensor": 2, "devices": "cpu,cpu,cpu,cpu"},
        "ulysses": {"pipe": 1, "config": sequence(ulysses=2)},
        "ring": {"pipe": 1, "config": sequence(ring=2)},
        "ulysses, three ranks": {"pipe": 1, "devices": "cpu,cpu,cpu", "config": sequence(ulysses=3)},
        "ulysses and ring": {"pipe": 1, "devices": "cpu,cpu,cpu,cpu", "config": sequence(ulysses=2, ring=2)},
        "tensor and ulysses": {"pipe": 1, "tensor": 2, "devices": "cpu,cpu,cpu,cpu", "config": sequence(ulysses=2)},
    }
    for mode, degrees in modes.items():
        results.case(f"{name}, {mode}", lambda degrees=degrees: difference(expected, sampled(parallel(file, **degrees))))
    tensor = modes["tensor and stages"]
    for case, warmup_steps, degrees in (
        ("all warm-up", 1000, {}),
        ("one warm-up step", 1, {}),
        ("one stage", 1, {"pipe": 1, "batch": 2}),
        ("tensor, all warm-up", 1000, tensor),
        ("tensor, one warm-up step", 1, tensor),
    ):

        def in_patches(warmup_steps=warmup_steps, degrees=degrees) -> float:
            model = node("ApplyPipeFusion", parallel(file, **degrees), 2, warmup_steps, True)
            return difference(expected, sampled(model)) / float(expected.abs().max())

        results.case(f"{name}, PipeFusion, {case}", in_patches)
    for case, warmup_steps in (("all warm-up", 1000), ("one warm-up step", 1)):

        def displaced(warmup_steps=warmup_steps) -> float:
            config = sequence(patch_mode="displaced", patch=2, patch_warmup_steps=warmup_steps)
            return difference(expected, sampled(parallel(file, pipe=1, config=config))) / float(expected.abs().max())

        results.case(f"{name}, displaced patches, {case}", displaced)
    ours = parallel(file)

    def twice() -> float:
        """After a run without guidance, which has another structure, and with two latents at a time."""
        sampled(ours, cfg=1.0)
        both = ksampler(ours, prompts, latent.repeat(2, *[1] * (latent.ndim - 1)))
        return difference(ksampler(own, prompts, latent.repeat(2, *[1] * (latent.ndim - 1))), both)

    results.case(f"{name}, again", twice)


def refusals(results: Results) -> None:
    file = "aura.safetensors"

    def doctor() -> str:
        latent = {"samples": torch.zeros(1, 4, 16, 24)}
        return outputs_of("ParallelDoctor", parallel(file), latent, 4, 3.0, 9, "cpu,cpu")["result"][0]

    results.case("Parallel Doctor without a prompt", doctor)
