"""Models that no family computes, as ComfyUI's own class on ranks, against ComfyUI's own MODEL of the same file. Run by
serve.py."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import comfy.lora
from boot import BASE, Results, comfy, difference, ksampler, node, nodes, outputs_of, parallel, sequence, torch
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


def main(results: Results) -> None:
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
        with detecting(arguments):
            of_class(results, name, prompts, latent)
    with detecting(AURA):
        refusals(results)


@contextmanager
def fast_ranks() -> Iterator[None]:
    """Context in which blocks take no time but for their tokens, and transfers none."""
    auto = sys.modules[
        nodes.NODE_CLASS_MAPPINGS["ParallelDiTLoader"].__module__.rpartition(".")[0] + ".sampling.auto_degrees"
    ]

    from parallel_backend.placement.links import Link, Links, alike
    from parallel_backend.planning.calibrated_costs import BlockCost, Calibration, DeviceCost
    from parallel_backend.planning.machine import Device, Machine

    def calibrate(pool, checkpoint, *_arguments) -> Calibration:
        lists = checkpoint.family.blocks.counts(checkpoint.config)
        cost = DeviceCost(dict.fromkeys(lists, BlockCost(0.0, 1e-3, 0.0)), BlockCost(0.0, 0.0, 0.0))
        links = Links(alike(2, Link(1e-9, 1e12)))
        return Calibration(Machine((Device("cpu", "made up"),) * 2, links), (cost,) * 2, hop=1e-6)

    def forget() -> None:
        node("UnloadParallelDiT")
        for file in auto.folder().glob("calibration*"):
            file.unlink()

    forget()
    with patch.object(auto, "calibrate", calibrate):
        yield
    forget()


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
    for mode in ("auto", "split batch", "tensor", "ulysses"):
        results.case(
            f"{name}, Parallelize Model, {mode}",
            lambda mode=mode: difference(expected, sampled(node("ParallelizeModel", native(file), 2, mode))),
        )

    def pipelined() -> dict:
        model = node("ParallelizeModel", native(file), 2, "pipefusion")
        share = difference(expected, sampled(model)) / float(expected.abs().max())
        (wrapper,) = model.get_all_wrappers(comfy.patcher_extension.WrappersMP.SAMPLER_SAMPLE)
        return {"share": share, "exact since": wrapper.last.reason}

    results.case(f"{name}, Parallelize Model, pipefusion", pipelined)

    def one_prompt() -> str | None:
        """Why it is exact, at a cfg of 1, at which ComfyUI evaluates the positive prompt alone."""
        model = node("ApplyPipeFusion", parallel(file), 2, 1, True)
        sampled(model, cfg=1.0)
        (wrapper,) = model.get_all_wrappers(comfy.patcher_extension.WrappersMP.SAMPLER_SAMPLE)
        return wrapper.last.reason

    if name == "aura":
        results.case(f"{name}, PipeFusion of one prompt", one_prompt)

    def auto(wrap=lambda model: model) -> dict:
        """One prompt, on made-up ranks with fast links, on which any shared mode pays."""
        model = wrap(node("ParallelDiTLoader", file, "fp32", 2, 1, 1, "cpu,cpu", None, "even", degrees="auto"))
        with fast_ranks():
            found = sampled(model, cfg=1.0, steps=8)
        degrees, expected = model.model.diffusion_model.setup.degrees, sampled(native(file), cfg=1.0, steps=8)
        return {"chosen": str(degrees), "share": difference(expected, found) / float(expected.abs().max())}

    results.case(f"{name}, auto", auto)
    results.case(f"{name}, auto with PipeFusion", partial(auto, lambda model: node("ApplyPipeFusion", model, 2, 1, True)))
    ours = parallel(file)

    def twice() -> float:
        """After a run without guidance, which has another structure, and with two latents at a time."""
        sampled(ours, cfg=1.0)
        both = ksampler(ours, prompts, latent.repeat(2, *[1] * (latent.ndim - 1)))
        return difference(ksampler(own, prompts, latent.repeat(2, *[1] * (latent.ndim - 1))), both)

    results.case(f"{name}, again", twice)
    keys = [key for key, value in own.model.diffusion_model.state_dict().items() if value.ndim == 2 and "weight" in key]
    g = torch.Generator().manual_seed(3)
    lora = {}
    for key in keys[::3]:
        out, into = own.model.diffusion_model.state_dict()[key].shape
        layer = f"diffusion_model.{key.removesuffix('.weight')}"
        lora[f"{layer}.lora_up.weight"] = 0.3 * torch.randn(out, 4, generator=g)
        lora[f"{layer}.lora_down.weight"] = torch.randn(4, into, generator=g) / math.sqrt(into)

    def with_lora(model):
        return comfy.sd.load_lora_for_models(model, None, dict(lora), 0.7, 0.0)[0]

    for mode, degrees in {"stages": {"pipe": 2}, "tensor": modes["tensor"]}.items():

        def lora_case(degrees=degrees) -> dict[str, float]:
            patched = sampled(with_lora(own))
            found = sampled(with_lora(parallel(file, **degrees)))
            return {"difference": difference(patched, found), "moved": difference(patched, expected)}

        def fp8(degrees=degrees) -> float:
            return difference(sampled(native(f"fp8-{file}")), sampled(parallel(f"fp8-{file}", **degrees)))

        results.case(f"{name}, LoRA, {mode}", lora_case)
        results.case(f"{name}, scaled fp8, {mode}", fp8)


def refusals(results: Results) -> None:
    file = "aura.safetensors"
    five = {"pipe": 1, "tensor": 5, "devices": ",".join(["cpu"] * 5)}
    prompts = [[[torch.zeros(1, 9, 2048), {}]]] * 2
    results.case(
        "more tensor ranks than heads", lambda: ksampler(parallel(file, **five), prompts, torch.zeros(1, 4, 16, 24))
    )
    all_gather = node("UlyssesConfig", 2, 1, "none", 1, "auto", True, ulysses_exchange="all-gather")
    results.case("all-gather", lambda: parallel(file, pipe=1, config=all_gather))

    def doctor(**prompt) -> str:
        latent = {"samples": torch.zeros(1, 4, 16, 24)}
        return outputs_of("ParallelDoctor", parallel(file), latent, 4, 3.0, 9, "cpu,cpu", **prompt)["result"][0]

    results.case("Parallel Doctor without a prompt", doctor)
    results.case("Parallel Doctor", partial(doctor, positive=prompts[0]))
