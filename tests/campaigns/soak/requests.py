"""What is asked for: setups of the loader, requests drawn at random, and the prompt of each in ComfyUI's API form."""

import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from parallel_backend.quickstart.model import WEIGHTS
from tests.comfyui import standins
from tests.comfyui.graph import CONFIG, Graph, Link

MODEL, LORA, VAE = "digits.safetensors", "soak-lora.safetensors", "ae.safetensors"
WIDTH, RANK = 256, 4
"""Of the model; of the LoRA."""
SIZES = ((128, 128), (120, 136), (96, 192), (152, 104), (64, 128), (200, 120), (160, 160), (72, 88))
"""Width and height in pixels; some give latents of odd sides."""
SAMPLERS = ("euler", "dpmpp_2m", "heun", "euler_ancestral", "euler", "dpm_adaptive")
STRENGTHS = (0.0, 0.0, 0.3, 0.6)
"""Of the LoRA; at 0 there is none."""
TEXTS = (("3 1 4 1",), ("2 7",), ("1 6 1 8", "_ _ 9"), ("5 7 7 2", "1 5", "6 6 _ 4"))
DENOISE_STEP = 1e-9
"""KSampler takes a `denoise` above 0.9999 for 1, so a smaller one makes ComfyUI run it again and changes nothing."""


@dataclass(frozen=True)
class Setup:
    """`loader`: widgets of Parallel DiT Loader beside the defaults; `config`: of Ulysses Config.

    `ranks`: 0 for ComfyUI's own loader.
    """

    name: str
    ranks: int
    loader: dict[str, Any] = field(default_factory=dict, hash=False)
    config: dict[str, Any] = field(default_factory=dict, hash=False)


PIPE = {"pipefusion_degree": 2}
DISPLACED = {"patch_mode": "displaced", "patch_degree": 2}
TWO_RANKS = (
    Setup("pipe", 2, PIPE),
    Setup("ulysses", 2, config={"ulysses_degree": 2}),
    Setup("ring", 2, config={"ring_degree": 2}),
    Setup("tensor", 2, {"tensor_parallel_degree": 2}),
    Setup("split batch", 2, {"split_batch_degree": 2}),
    Setup("displaced", 2, config=DISPLACED),
    Setup("naive", 2, config=DISPLACED | {"patch_mode": "naive"}),
    Setup("native", 0),
)
"""On the same two devices, so that the rank processes live on from one to the next."""
OTHER_RANKS = (Setup("one rank", 1), Setup("pipe x ulysses", 4, PIPE, {"ulysses_degree": 2}))
"""On other devices: with each of them the ranks are ended and new ones started."""


@dataclass(frozen=True)
class Request:
    """Everything that decides the image. `bands` 0 and `cache` 0: without PipeFusion, without Parallel Step Cache.

    `in_sampler`: PipeFusion Sampler, rather than Apply PipeFusion and KSampler. `vae`: decoded by Parallel VAE Decode.
    """

    name: str
    setup: Setup
    size: tuple[int, int]
    batch: int
    seed: int
    steps: int
    cfg: float
    sampler: str
    text: tuple[str, ...]
    lora: float
    cache: float
    bands: int
    warmup: int
    in_sampler: bool
    vae: bool


def draw(setups: tuple[Setup, ...], each: int, seed: int) -> list[Request]:
    """`each` requests for every setup. The same for the same seed, whatever the other setups are."""
    return [request for setup in setups for request in _of_setup(setup, each, random.Random(f"{seed} {setup.name}"))]


def _of_setup(setup: Setup, each: int, chance: random.Random) -> list[Request]:
    sizes, samplers = (chance.sample(choices, len(choices)) for choices in (SIZES, SAMPLERS))
    found = []
    for index in range(each):
        sampler = samplers[index % len(samplers)]
        cached = sampler == "euler" and setup.ranks > 0 and chance.random() < 0.4
        found.append(
            Request(
                f"{setup.name} {index}",
                setup,
                sizes[index % len(sizes)],
                batch=chance.choice((1, 1, 1, 2)),
                seed=chance.randrange(1 << 32),
                steps=6 if cached else chance.randint(2, 6),
                cfg=chance.choice((1.0, 3.0, 3.0)),
                sampler=sampler,
                text=chance.choice(TEXTS),
                lora=chance.choice(STRENGTHS),
                cache=0.3 if cached else 0.0,
                bands=chance.choice((2, 3, 4)) if "pipefusion_degree" in setup.loader else 0,
                warmup=chance.choice((1, 1, 2)),
                in_sampler=chance.random() < 0.5,
                vae=setup.ranks > 0 and chance.random() < 0.3,
            )
        )
    return found


def prompt(request: Request, serial: int, trace: bool) -> tuple[dict[str, Any], str]:
    """The request's prompt, and the id of the node that saves the latent. Another `serial` makes ComfyUI sample again and
    asks for the same image."""
    graph = Graph()
    model, positive = _model(graph, request), graph.text(request.text[0])
    for text in request.text[1:]:
        positive = graph.add("ConditioningConcat", conditioning_to=positive, conditioning_from=graph.text(text))
    width, height = request.size
    widgets = {
        "seed": request.seed,
        "steps": request.steps,
        "cfg": request.cfg,
        "sampler_name": request.sampler,
        "positive": positive,
        "denoise": 1.0 - DENOISE_STEP * serial,
    }
    latent = graph.add("EmptySD3LatentImage", width=width, height=height, batch_size=request.batch)
    pipefusion = {"num_pipeline_patch": request.bands, "warmup_steps": request.warmup, "overlap": True}
    if request.bands and request.in_sampler:
        latent = graph.ksampler(model, latent, "PipeFusionSampler", **widgets, **pipefusion, step_cache=request.cache)
    else:
        if request.bands:
            model = graph.add("ApplyPipeFusion", model=model, **pipefusion)
        if request.cache:
            cache = {"threshold": request.cache, "start_percent": 0.0, "end_percent": 1.0}
            model = graph.add("ParallelStepCache", model=model, **cache)
        latent = graph.ksampler(model, latent, **widgets)
    saved = graph.add("SaveLatent", samples=latent, filename_prefix="soak")
    if request.vae:
        vae = graph.add("VAELoader", vae_name=VAE)
        decoded = graph.add("ParallelVAEDecode", samples=latent, vae=vae, devices="auto")
        graph.add("SaveImage", images=decoded, filename_prefix="soak")
    if trace:
        graph.add("ParallelTrace", filename_prefix="soak", after=latent)
    return graph.prompt, saved[0]


def _model(graph: Graph, request: Request) -> Link:
    setup = request.setup
    if setup.ranks == 0:
        model = graph.add("UNETLoader", unet_name=MODEL, weight_dtype="default")
    else:
        degrees = {"pipefusion_degree": 1, "tensor_parallel_degree": 1, "split_batch_degree": 1} | setup.loader
        config = {"parallel_config": graph.add("UlyssesConfig", **CONFIG | setup.config)} if setup.config else {}
        devices = ",".join(["cpu"] * setup.ranks)
        # Even: what ranks measure is not the same each time.
        widgets = {"model_name": MODEL, "weight_dtype": "fp32", "devices": devices, "stage_split": "even"}
        model = graph.add("ParallelDiTLoader", **widgets, **degrees, **config)
    if request.lora:
        model = graph.add("LoraLoaderModelOnly", model=model, lora_name=LORA, strength_model=request.lora)
    return model


def write_files(base: Path) -> None:
    """The files that the requests name: the bundled model, a random VAE, a LoRA for a layer of each stage."""
    transformers, vaes, loras = (base / "models" / kind for kind in ("diffusion_models", "vae", "loras"))
    for folder in (transformers, vaes, loras):
        folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(WEIGHTS, transformers / MODEL)
    save_file(standins.vae(channels=16), vaes / VAE)
    random = standins.Random()
    for layer, columns in {"double_blocks.0.img_attn.proj": WIDTH, "single_blocks.1.linear2": 5 * WIDTH}.items():
        random.weight(f"diffusion_model.{layer}.lora_A", RANK, columns)
        random.weight(f"diffusion_model.{layer}.lora_B", WIDTH, RANK)
    save_file(random.tensors, loras / LORA)
