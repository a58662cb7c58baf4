"""Apply ControlNet on the parallel MODEL, against ComfyUI's own model. Run by serve.py.

The test process has put `flux.safetensors`, `sd3.safetensors` and `qwen-image.safetensors` into models/diffusion_models. The
ControlNets are ComfyUI's own classes with random weights, built as `comfy.controlnet` builds them from files.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property, partial

from boot import BASE, Results, comfy, difference, ksampler, node, nodes, parallel, sequence, torch
from families import detecting

QWEN_DETECTED = {"num_attention_heads": 2, "joint_attention_dim": 64}
STRENGTH, START, END = 0.7, 0.2, 0.8
PATIENCE = 120.0
"""Seconds after which a run that should have ended counts as hanging."""


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


class Counted(torch.nn.Module):
    """A ControlNet model, and what is to happen at its calls."""

    def __init__(self, model: torch.nn.Module, before: Callable[[int], None] = lambda call: None, change=lambda out: out):
        super().__init__()
        self.model, self.before, self.change, self.calls, self.dtype = model, before, change, 0, torch.float32

    def forward(self, *arguments, **named):
        self.before(self.calls)
        self.calls += 1
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
    detected: dict = field(default_factory=dict)

    @cached_property
    def native(self):
        path = BASE / "models" / "diffusion_models" / self.file
        return comfy.sd.load_diffusion_model(str(path), model_options={"dtype": torch.float32})

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


def sd3(config: dict) -> torch.nn.Module:
    return comfy.cldm.mmdit.ControlNet(num_blocks=3, operations=comfy.ops.disable_weight_init, dtype=torch.float32, **config)


def qwen(config: dict) -> torch.nn.Module:
    model = comfy.ldm.qwen_image.controlnet.QwenImageControlNetModel(
        operations=comfy.ops.disable_weight_init, dtype=torch.float32, **config | {"num_layers": 2}
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


QWEN = {"file": "qwen-image.safetensors", "latent_format": comfy.latent_formats.Wan21, "extra_conds": (), "pooled": False}
QWEN |= {"detected": QWEN_DETECTED}
SD3 = {"file": "sd3.safetensors", "latent_format": comfy.latent_formats.SD3}
KINDS = {
    "Flux, picture": Kind("flux.safetensors", partial(flux, False), (16, 16, 12), None, ("y", "guidance")),
    "Flux, latent": Kind(
        "flux.safetensors", partial(flux, True), (16, 15, 13), comfy.latent_formats.Flux, ("y", "guidance")
    ),
    "SD3": Kind(make=sd3, latent=(16, 15, 13), **SD3),
    "SD3.5": Kind(make=sd35, latent=(16, 16, 12), wrap=comfy.controlnet.ControlNetSD35, **SD3),
    "Qwen": Kind(make=qwen, latent=(16, 1, 18, 13), frames=1, **QWEN),
    "Qwen, two frames": Kind(make=qwen, latent=(16, 2, 16, 12), frames=2, **QWEN),
}


def settings(kind: Kind) -> dict[str, tuple[list, float]]:
    """What is applied -> (prompts, cfg)."""
    net, other = (kind.control_net(kind.module(seed)) for seed in (0, 1))
    both = kind.prompts(9, 9)
    middle = partial(kind.apply, strength=STRENGTH, start=START, end=END)
    return {
        "cfg 1": (kind.apply(both, net), 1.0),
        "cfg 3, some steps": (middle(both, net), 3.0),
        "two": (kind.apply(middle(both, net), other, seed=6), 3.0),
        "two calls a step": (kind.apply(kind.prompts(9, 5), net), 3.0),
    }


def compare_kind(name: str, kind: Kind, modes: list[str], results: Results) -> None:
    empty = torch.zeros(1, *kind.latent)
    nodes_of = settings(kind)
    expected = {}

    @cache
    def without(second: int, cfg: float) -> torch.Tensor:
        """A control: no ControlNet, and so many words in the second prompt."""
        return ksampler(kind.native, kind.prompts(9, second), empty, cfg=cfg)

    def native(what: str) -> dict:
        prompts, cfg = nodes_of[what]
        expected[what] = ksampler(kind.native, prompts, empty, cfg=cfg)
        second = 5 if what == "two calls a step" else 9
        return {"moved": difference(expected[what], without(second, cfg)), "finite": bool(expected[what].isfinite().all())}

    for what in nodes_of:
        results.case(f"{name}, {what}, native", partial(native, what))
    make = {
        "pipe 2": lambda: parallel(kind.file, stage_split="even"),
        "all warm-up": lambda: node("ApplyPipeFusion", parallel(kind.file, stage_split="even"), 3, 1000, True),
        "ulysses 2": lambda: parallel(kind.file, pipe=1, config=sequence(ulysses=2)),
    }
    if name == "Flux, latent":
        make["displaced"] = lambda: parallel(kind.file, pipe=1, config=sequence(1, 1, "displaced", 2, 1000))

    def compare(model, what: str) -> dict[str, float]:
        prompts, cfg = nodes_of[what]
        return {"difference": difference(expected[what], ksampler(model, prompts, empty, cfg=cfg))}

    for mode, parallel_model in make.items():
        if mode not in modes:
            continue
        model = parallel_model()
        for what in nodes_of:
            results.case(f"{name}, {what}, {mode}", partial(compare, model, what))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def pipelined(name: str, kind: Kind, results: Results) -> None:
    """One warm-up step of six, others with old keys and a ControlNet that sees old latents."""
    empty = torch.zeros(1, *kind.latent)
    plain_prompts = kind.prompts(9, 9)
    prompts = kind.apply(plain_prompts, kind.control_net(kind.module()))
    exact_model = parallel(kind.file, stage_split="even")
    banded = node("ApplyPipeFusion", exact_model, 3, 1, True)

    def measure(sampler: str) -> dict:
        sample = partial(ksampler, latent=empty, sampler=sampler, steps=6)
        exact, first, second = (sample(model, prompts) for model in (exact_model, banded, banded))
        without, stale_without = (sample(model, plain_prompts) for model in (exact_model, banded))
        return {
            "finite": bool(first.isfinite().all()),
            "repeat": difference(first, second),
            "error": relative(first, exact),
            "error without": relative(stale_without, without),
            "moved": relative(first, stale_without),
        }

    for sampler in ("euler", "heun", "euler_ancestral"):
        results.case(f"{name}, {sampler}", partial(measure, sampler))
    cold = node("ApplyPipeFusion", exact_model, 3, 0, True)

    def without_warm_up() -> dict:
        first, second = (ksampler(cold, prompts, empty, steps=6) for _ in range(2))
        return {"finite": bool(first.isfinite().all()), "repeat": difference(first, second)}

    results.case(f"{name}, pipelined without warm-up", without_warm_up)


def in_time(run: Callable) -> dict:
    """What it raised, in a thread that is given up on if it hangs."""
    found = {"ended": False}

    def work() -> None:
        try:
            with torch.inference_mode():
                run()
            found["raised"] = None
        except BaseException as error:  # Cancel is no Exception in some ComfyUIs
            found["raised"] = f"{type(error).__name__}: {error}"
        found["ended"] = True

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return found | {"threads": [t.name for t in threading.enumerate() if t.name.startswith("band ")]}


def ending(kind: Kind, results: Results) -> None:
    """Cancel and errors inside the ControlNet, and that the next run is as ever."""
    empty = torch.zeros(1, *kind.latent)
    model = node("ApplyPipeFusion", parallel(kind.file, stage_split="even"), 3, 1, True)

    def prompts(before: Callable[[int], None]) -> list:
        return kind.apply(kind.prompts(9, 9), kind.control_net(Counted(kind.module(), before)))

    sample = partial(ksampler, model, latent=empty, steps=6)
    with torch.inference_mode():
        expected = sample(prompts(lambda call: None))

    def again(before: Callable[[int], None]) -> dict:
        found = in_time(lambda: sample(prompts(before)))
        return found | {"next": difference(expected, sample(prompts(lambda call: None)))}

    def cancel_at(turn: int, call: int) -> None:
        if call == turn:
            comfy.model_management.interrupt_current_processing()

    def fail_at(turn: int, call: int) -> None:
        if call == turn:
            raise RuntimeError("the ControlNet's own error")

    for turn in (0, 3):
        results.case(f"cancel in call, {turn}", partial(again, partial(cancel_at, turn)))
        results.case(f"error in call, {turn}", partial(again, partial(fail_at, turn)))


def refusals(results: Results) -> None:
    kind = KINDS["Flux, latent"]
    exact = parallel(kind.file, stage_split="even")
    models = {"": exact, ", pipelined": node("ApplyPipeFusion", exact, 3, 1, True)}
    both, empty = kind.prompts(9, 9), torch.zeros(1, *kind.latent)
    module = kind.module()

    def finite(model, prompts) -> dict:
        return {"finite": bool(ksampler(model, prompts, empty).isfinite().all())}

    nets = {
        "other width": kind.control_net(Counted(module, change=lambda out: {"input": [t[..., 1:] for t in out["input"]]})),
        "other size": kind.control_net(Counted(module, change=lambda out: {"input": [t[:, 1:] for t in out["input"]]})),
    }
    for what, net in nets.items():
        for how, model in models.items():
            results.case(f"refusal {what}{how}", lambda model=model, net=net: finite(model, kind.apply(both, net)))

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
    for how, model in {"": exact, ", pipelined": node("ApplyPipeFusion", exact, 3, 1, True)}.items():
        prompts = kind.apply(kind.prompts(9, 9), kind.control_net(kind.module()))
        results.case(
            f"refusal Fun{how}", lambda model=model, prompts=prompts: ksampler(model, prompts, torch.zeros(1, *kind.latent))
        )


def main(results: Results, modes: list[str]) -> None:
    for name, kind in KINDS.items():
        with detecting(kind.detected):
            compare_kind(name, kind, modes, results)
    for name in ("Flux, latent", "SD3", "Qwen"):
        with detecting(KINDS[name].detected):
            pipelined(name, KINDS[name], results)
    with detecting(QWEN_DETECTED):
        refuse_fun(results)
    ending(KINDS["Flux, latent"], results)
    refusals(results)
