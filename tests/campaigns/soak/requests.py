"""What is asked for: requests drawn at random, and the prompt of each in ComfyUI's API form."""

import random
from dataclasses import dataclass
from typing import Any

from tests.comfyui.graph import Graph, Link

from .setups import CONFIG, DIGITS, FILES, Setup

SIZES = ((128, 128), (120, 136), (96, 192), (152, 104), (64, 128), (200, 120), (160, 160), (72, 88))
"""Width and height in pixels; some give latents of odd sides."""
SAMPLERS = ("euler", "dpmpp_2m", "heun", "euler_ancestral", "euler", "dpm_adaptive")
STRENGTHS = (0.0, 0.0, 0.3, 0.6)
"""Of the LoRA; at 0 there is none."""
DIGIT_TEXTS = (("3 1 4 1",), ("2 7",), ("1 6 1 8", "_ _ 9"), ("5 7 7 2", "1 5", "6 6 _ 4"))
WORDS = ("lighthouse", "cliff", "dusk", "warm", "light", "window", "waves", "photograph", "of", "a", "small", "harbour")
COUNTS = (2, 9, 40, 75, 300)
"""Words in a prompt. Flux's T5 fills up to 256 tokens, so that only the last is longer there."""
LORA, VAE = "soak-lora.safetensors", "ae.safetensors"
DENOISE_STEP = 1e-9
"""KSampler takes a `denoise` above 0.9999 for 1, so a smaller one makes ComfyUI run it again and changes nothing."""


@dataclass(frozen=True)
class Request:
    """Everything that decides the picture. `bands` 0 and `cache` 0: without PipeFusion, without Parallel Step Cache.

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
    negative: tuple[str, ...]
    lora: float
    cache: float
    bands: int
    warmup: int
    in_sampler: bool
    vae: bool


@dataclass(frozen=True)
class Prompt:
    """A request in API form; the id of the node that saves the latent."""

    nodes: dict[str, Any]
    latent: str


def draw(setups: tuple[Setup, ...], each: int, seed: int) -> list[Request]:
    """`each` requests for every setup. The same for the same seed, whatever the other setups are."""
    drawn = (_of_setup(setup, each, random.Random(f"{seed} {setup.name}")) for setup in setups)
    return [request for requests in drawn for request in requests]


def _of_setup(setup: Setup, each: int, chance: random.Random) -> list[Request]:
    sizes = chance.sample(SIZES, len(SIZES))
    samplers = chance.sample(SAMPLERS, len(SAMPLERS))
    found = []
    for index in range(each):
        sampler = samplers[index % len(samplers)]
        if sampler == "dpm_adaptive" and setup.model != DIGITS:  # a model of random weights may take it thousands of calls
            sampler = "euler"
        width, height = sizes[index % len(sizes)]
        trained, native = setup.model == DIGITS, setup.ranks == 0
        cached = sampler == "euler" and not native and chance.random() < 0.4
        found.append(
            Request(
                f"{setup.name} {index}",
                setup,
                (width, height),
                chance.choice((1, 1, 1, 2)),
                chance.randrange(1 << 32),
                6 if cached else chance.randint(2, 6),
                chance.choice((1.0, 3.0, 3.0)),
                sampler,
                chance.choice(DIGIT_TEXTS) if trained else (_words(chance),),
                ("",) if trained else (_words(chance),),
                chance.choice(STRENGTHS),
                0.3 if cached else 0.0,
                chance.choice((2, 3, 4)) if setup.bands else 0,
                chance.choice((1, 1, 2)),
                chance.random() < 0.5,
                not native and chance.random() < 0.3,
            )
        )
    return found


def _words(chance: random.Random) -> str:
    return " ".join(chance.choices(WORDS, k=chance.choice(COUNTS)))


def prompt(request: Request, serial: int = 0, trace: bool = False) -> Prompt:
    """The request's prompt. Another `serial` makes ComfyUI sample again and asks for the same picture."""
    graph = Graph()
    model, positive, negative = _model(graph, request), *_texts(graph, request)
    width, height = request.size
    widgets = {
        "seed": request.seed,
        "steps": request.steps,
        "cfg": request.cfg,
        "sampler_name": request.sampler,
        "scheduler": "simple",
        "positive": positive,
        "negative": negative,
        "latent_image": graph.add("EmptySD3LatentImage", width=width, height=height, batch_size=request.batch),
        "denoise": 1.0 - DENOISE_STEP * serial,
    }
    pipefusion = {"num_pipeline_patch": request.bands, "warmup_steps": request.warmup, "overlap": True}
    if request.bands and request.in_sampler:
        latent = graph.add("PipeFusionSampler", model=model, **widgets, **pipefusion, step_cache=request.cache)
    else:
        if request.bands:
            model = graph.add("ApplyPipeFusion", model=model, **pipefusion)
        if request.cache:
            cache = {"threshold": request.cache, "start_percent": 0.0, "end_percent": 1.0}
            model = graph.add("ParallelStepCache", model=model, **cache)
        latent = graph.add("KSampler", model=model, **widgets)
    saved = graph.add("SaveLatent", samples=latent, filename_prefix="soak")
    if request.vae:
        vae = graph.add("VAELoader", vae_name=VAE)
        decoded = graph.add("ParallelVAEDecode", samples=latent, vae=vae, devices="auto")
        graph.add("SaveImage", images=decoded, filename_prefix="soak")
    if trace:
        graph.add("ParallelTrace", filename_prefix="soak", after=latent)
    return Prompt(graph.prompt, saved[0])


def _model(graph: Graph, request: Request) -> Link:
    setup, name = request.setup, FILES[request.setup.model]
    if setup.ranks == 0:
        model = graph.add("UNETLoader", unet_name=name, weight_dtype="default")
    else:
        degrees = {"pipefusion_degree": 1, "tensor_parallel_degree": 1, "split_batch_degree": 1} | setup.loader
        config = {"parallel_config": graph.add("UlyssesConfig", **CONFIG | setup.config)} if setup.config else {}
        devices = ",".join(["cpu"] * setup.ranks)
        # Even: what ranks measure is not the same each time.
        widgets = {"model_name": name, "weight_dtype": "fp32", "devices": devices, "stage_split": "even"}
        model = graph.add("ParallelDiTLoader", **widgets, **degrees, **config)
    if request.lora:
        model = graph.add("LoraLoaderModelOnly", model=model, lora_name=LORA, strength_model=request.lora)
    return model


def _texts(graph: Graph, request: Request) -> tuple[Link, Link]:
    if request.setup.model == DIGITS:
        encode = graph.text
    else:
        names = {"clip_name1": "clip_l.safetensors", "clip_name2": "t5xxl_fp8_e4m3fn.safetensors"}
        clip = graph.add("DualCLIPLoader", **names, type="flux")

        def encode(text: str) -> Link:
            return graph.add("CLIPTextEncode", text=text, clip=clip)

    both = []
    for texts in (request.text, request.negative):
        whole, *more = (encode(text) for text in texts)
        for part in more:
            whole = graph.add("ConditioningConcat", conditioning_to=whole, conditioning_from=part)
        both.append(whole)
    return both[0], both[1]
