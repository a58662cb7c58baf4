"""Apply ControlNet on the parallel MODEL, against ComfyUI's own model. Run by serve.py.

The test process has put `flux.safetensors` and `sd3.safetensors` into models/diffusion_models. The ControlNets are ComfyUI's
own classes with random weights, built as `comfy.controlnet` builds them from files.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial

from boot import Results, comfy, difference, ksampler, native_model, node, nodes, parallel, sequence, torch
from small_cases import small

SMALL = "qwen-image"
STRENGTH, START, END = 0.7, 0.2, 0.8


class FakeVAE:
    """As much of a VAE as a ControlNet needs for its picture: 16 channels at an eighth of the size."""

    def __init__(self, frames: int | None):
        self.frames = frames

    def spacial_compression_encode(self) -> int:
        return 8

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        small = torch.nn.functional.avg_pool2d(pixels.movedim(-1, 1) - 0.5, 8) * 8
        mix = torch.randn(16, 3, generator=torch.Generator().manual_seed(3))
        latent = torch.einsum("bchw,dc->bdhw", small, mix)
        return latent if self.frames is None else latent.unsqueeze(2).repeat(1, 1, self.frames, 1, 1)


class Changed(torch.nn.Module):
    """A ControlNet model with another output."""

    def __init__(self, model: torch.nn.Module, change: Callable[[dict], dict]):
        super().__init__()
        self.model, self.change, self.dtype = model, change, torch.float32

    def forward(self, *arguments, **named):
        return self.change(self.model(*arguments, **named))


def randomise(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Weights large enough that what the ControlNet adds is as large as what it adds to."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        fan_in = parameter[0].numel() if parameter.ndim > 1 else 0
        values = torch.randn(parameter.shape, generator=generator)
        parameter.data = values * 0.7 / fan_in**0.5 if fan_in else values * 0.1 + ("norm" in name)
    for buffer in model.buffers():  # SD3's positions
        buffer.copy_(torch.randn(buffer.shape, generator=generator))
    return model.eval()


@dataclass
class Kind:
    """A base model and a kind of ControlNet for it. `make(unet_config)`: the ControlNet's module."""

    file: str
    make: Callable[[dict], torch.nn.Module]
    latent: tuple[int, ...]
    latent_format: Callable | None
    extra_conds: tuple[str, ...] = ("y",)
    wrap: type = comfy.controlnet.ControlNet
    pooled: bool = True
    frames: int | None = None

    @cached_property
    def native(self):
        return native_model(self.file)

    def module(self, seed: int = 0) -> torch.nn.Module:
        config = {key: value for key, value in self.native.model.model_config.unet_config.items() if key != "dtype"}
        return randomise(self.make(config), seed)

    def control_net(self, module: torch.nn.Module):
        through_vae = self.latent_format is not None
        return self.wrap(
            module,
            compression_ratio=1 if through_vae else 8,
            latent_format=self.latent_format() if through_vae else None,
            load_device=comfy.model_management.get_torch_device(),
            extra_conds=list(self.extra_conds),
        )

    def apply(self, prompts: list, control_net, strength=STRENGTH, start=0.0, end=1.0, seed: int = 5) -> list:
        """ControlNetApplyAdvanced's (positive, negative)."""
        generator = torch.Generator().manual_seed(seed)
        picture = torch.rand(1, 96, 96, 3, generator=generator)
        vae = None if self.latent_format is None else FakeVAE(self.frames)
        apply = nodes.ControlNetApplyAdvanced()
        return list(apply.apply_controlnet(*prompts, control_net, picture, strength, start, end, vae=vae))

    def prompts(self, *lengths: int) -> list:
        generator = torch.Generator().manual_seed(0)
        pooled = {"pooled_output": torch.randn(1, 32, generator=generator)} if self.pooled else {}
        return [[[torch.randn(1, length, 64, generator=generator), dict(pooled)]] for length in lengths]


def flux(latent_input: bool, config: dict) -> torch.nn.Module:
    model = comfy.ldm.flux.controlnet.ControlNetFlux(
        latent_input=latent_input,
        control_latent_channels=16 if latent_input else None,
        operations=comfy.ops.disable_weight_init,
        dtype=torch.float32,
        **config | {"depth": 2, "depth_single_blocks": 2 if latent_input else 0},
    )
    model.main_model_double, model.main_model_single = 2, 3  # of the tiny model, where Flux has 19 and 38
    return model


def qwen(config: dict, of_mask: int = 0) -> torch.nn.Module:
    """`of_mask`: further channels, of an inpainting ControlNet."""
    model = comfy.ldm.qwen_image.controlnet.QwenImageControlNetModel(
        of_mask, operations=comfy.ops.disable_weight_init, dtype=torch.float32, **config | {"num_layers": 2}
    )
    model.main_model_double = 2
    return model


def qwen_fun(config: dict) -> torch.nn.Module:
    return comfy.ldm.qwen_image.controlnet.QwenImageFunControlNetModel(
        inner_dim=256,
        num_attention_heads=2,
        num_control_blocks=1,
        main_model_double=2,
        injection_layers=(0,),
        operations=comfy.ops.disable_weight_init,
        dtype=torch.float32,
    )


def sd35(config: dict) -> torch.nn.Module:
    """Stability's own for SD3.5, which take the base model's first layer."""
    return comfy.cldm.dit_embedder.ControlNetEmbedder(
        img_size=None,
        patch_size=2,
        in_chans=16,
        num_layers=2,
        main_model_double=3,
        double_y_emb=False,
        attention_head_dim=64,
        num_attention_heads=3,
        adm_in_channels=32,
        device="cpu",
        dtype=torch.float32,
        operations=comfy.ops.disable_weight_init,
    )


QWEN = {"file": f"{SMALL}.safetensors", "latent_format": comfy.latent_formats.Wan21, "extra_conds": (), "pooled": False}
SD3 = {"file": "sd3.safetensors", "latent_format": comfy.latent_formats.SD3}
KINDS = {
    "Flux, latent": Kind(
        "flux.safetensors", partial(flux, True), (16, 15, 13), comfy.latent_formats.Flux, ("y", "guidance")
    ),
    "SD3.5": Kind(make=sd35, latent=(16, 16, 12), wrap=comfy.controlnet.ControlNetSD35, **SD3),
    "Qwen, two frames": Kind(make=qwen, latent=(16, 2, 16, 12), frames=2, **QWEN),
}


MODES = {
    "all warm-up": lambda file: node("ApplyPipeFusion", parallel(file, stage_split="even"), 3, 1000, True),
    "ulysses 2": lambda file: parallel(file, pipe=1, config=sequence(ulysses=2)),
    "displaced": lambda file: parallel(file, pipe=1, config=sequence(1, 1, "displaced", 2, 1000)),
}


def applied(kind: Kind, what: str) -> tuple[list, list, float]:
    """(prompts, the same with ControlNets, cfg)."""
    net, other = (kind.control_net(kind.module(seed)) for seed in (0, 1))
    middle = partial(kind.apply, strength=STRENGTH, start=START, end=END)
    plain = kind.prompts(9, 5 if what == "two calls a step" else 9)
    if what == "two calls a step":
        return plain, kind.apply(plain, net), 3.0
    if what == "two":
        return plain, kind.apply(middle(plain, net), other, seed=6), 3.0
    return plain, middle(plain, net), 3.0


def compare(kind: Kind, what: str, mode: str) -> dict[str, float | bool]:
    plain, prompts, cfg = applied(kind, what)
    empty = torch.zeros(1, *kind.latent)
    expected = ksampler(kind.native, prompts, empty, cfg=cfg)
    return {
        "finite": bool(expected.isfinite().all()),
        "moved": difference(expected, ksampler(kind.native, plain, empty, cfg=cfg)),
        "difference": difference(expected, ksampler(MODES[mode](kind.file), prompts, empty, cfg=cfg)),
    }


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def pipelined(kind: Kind) -> dict:
    """One warm-up step of six, others with old keys and a ControlNet that sees old latents."""
    plain_prompts = kind.prompts(9, 9)
    prompts = kind.apply(plain_prompts, kind.control_net(kind.module()))
    exact_model = parallel(kind.file, stage_split="even")
    banded = node("ApplyPipeFusion", exact_model, 3, 1, True)
    sample = partial(ksampler, latent=torch.zeros(1, *kind.latent), steps=6)
    exact, first, second = (sample(model, prompts) for model in (exact_model, banded, banded))
    return {
        "finite": bool(first.isfinite().all()),
        "repeat": difference(first, second),
        "relative": relative(first, exact),
        "moved": relative(first, sample(banded, plain_prompts)),
    }


def refusals(results: Results) -> None:
    kind = KINDS["Flux, latent"]
    exact = parallel(kind.file, stage_split="even")
    both, empty = kind.prompts(9, 9), torch.zeros(1, *kind.latent)
    module = kind.module()

    def finite(model, prompts) -> dict:
        return {"finite": bool(ksampler(model, prompts, empty).isfinite().all())}

    nets = {
        "other width": kind.control_net(Changed(module, lambda out: {"input": [t[..., 1:] for t in out["input"]]})),
        "other size": kind.control_net(Changed(module, lambda out: {"input": [t[:, 1:] for t in out["input"]]})),
    }
    for what, net in nets.items():
        results.case(f"refusal {what}", lambda net=net: finite(exact, kind.apply(both, net)))
    banded = node("ApplyPipeFusion", exact, 3, 1, True)
    results.case("refusal other width, pipelined", lambda: finite(banded, kind.apply(both, nets["other width"])))

    def patched(name: str):
        model = exact.clone()
        getattr(model, f"set_model_{name}_patch")(lambda arguments: arguments)
        return finite(model, both)

    # As ComfyUI's node for USO's style puts on the MODEL.
    for name in ("post_input", "attn1"):
        results.case(f"refusal {name}", partial(patched, name))
    results.case("after the refusals", lambda: finite(exact, both))


def refuse_fun(results: Results) -> None:
    kind = Kind(make=qwen_fun, latent=(16, 1, 16, 12), frames=1, wrap=comfy.controlnet.QwenFunControlNet, **QWEN)
    exact = parallel(kind.file, stage_split="even")
    prompts = kind.apply(kind.prompts(9, 9), kind.control_net(kind.module()))
    results.case("refusal Fun", lambda: ksampler(exact, prompts, torch.zeros(1, *kind.latent)))


def main(results: Results, cases: list[list[str]]) -> None:
    """`cases`: kind, what is applied, mode."""
    for name, what, mode in cases:
        with small(SMALL) if KINDS[name].file.startswith(SMALL) else nullcontext():
            results.case(f"{name}, {what}, {mode}", partial(compare, KINDS[name], what, mode))
    with small(SMALL):
        refuse_fun(results)
    results.case("pipelined", lambda: pipelined(KINDS["Flux, latent"]))
    refusals(results)
