"""What a server may be sent: workflows with values that no widget gives, and bodies of POST /parallel_dit/plan."""

import json
import random
from dataclasses import dataclass
from typing import Any

from tests.campaigns.fuzz import damage
from tests.comfyui.graph import COPY, Graph, Link

from .tensors import TEXTS

NUMBERS = (0, -1, 1, 2, 3, 65, 2**31, 2**63, 2**64, 10**30, 1.5, -0.5, 1e300, float("nan"), float("inf"), True, "1", "2.5")
OTHERS = (None, "", "x", [], [1], [[]], {}, {"a": 1}, ["1", 0], ["99", 0], ["1", 99], *TEXTS)
PLACES = (
    *("../../etc/passwd", "/etc/passwd", "..", ".", "a\0b", "C:\\x", "\\\\host\\share", "~", "%00", "nul", f"{COPY}/"),
    *(f"../diffusion_models/{COPY}", "truncated.safetensors", "vae.safetensors", COPY),
)
DEVICES = (
    *("auto", "cuda:99", "cpu,,cpu", "cpu, cpu ", "CPU", "cpu;cpu", ",", "," * 1000, "cpu," * 500, "meta", "cuda", "mps"),
    *("cpu:0", "ray:cpu,cpu:x"),
)
SIZE, STEPS, SEED = 64, 2, 42
EXACT, CLOSE = "exact", "close"
"""What the widgets that are changed leave of the picture: all of it, or something like it."""
LOADER = {
    "model_name": COPY,
    "weight_dtype": "fp32",
    "pipefusion_degree": 2,
    "tensor_parallel_degree": 1,
    "split_batch_degree": 1,
    "devices": "cpu,cpu",
    "stage_split": "even",
}


@dataclass(frozen=True)
class Workflow:
    """A prompt in API form. `changed`: (node's class, widget) of what is odd. `picture`: EXACT or CLOSE."""

    prompt: dict[str, Any]
    changed: tuple[tuple[str, str], ...]
    picture: str


def graphs() -> dict[str, tuple[Graph, str, str]]:
    """Node's class -> (a sound graph with it, the node's id, what another of its values leaves of the picture)."""
    found = {}

    def end(graph: Graph, model: Link) -> None:
        latent = graph.ksampler(model, graph.empty(SIZE), steps=STEPS)
        graph.add("PreviewImage", images=graph.add("QuickstartDecode", samples=latent))

    graph = Graph()
    config = graph.add(
        "UlyssesConfig",
        ulysses_degree=1,
        ring_degree=1,
        patch_mode="none",
        patch_degree=1,
        attention="auto",
        comm_overlap=True,
    )
    loader = graph.add("ParallelDiTLoader", **LOADER, parallel_config=config)
    end(graph, loader)
    found["ParallelDiTLoader"], found["UlyssesConfig"] = (graph, loader[0], EXACT), (graph, config[0], EXACT)

    graph = Graph()
    native = graph.add("UNETLoader", unet_name=COPY, weight_dtype="default")
    ours = graph.add("ParallelizeModel", model=native, gpus=2, mode="ulysses")
    end(graph, ours)
    found["ParallelizeModel"] = graph, ours[0], EXACT

    def behind(kind: str, picture: str, **widgets: Any) -> None:
        graph = Graph()
        node = graph.add(kind, model=graph.add("ParallelDiTLoader", **LOADER), **widgets)
        end(graph, node)
        found[kind] = graph, node[0], picture

    behind("ApplyPipeFusion", CLOSE, num_pipeline_patch=2, warmup_steps=STEPS, overlap=True)
    behind("ParallelStepCache", CLOSE, threshold=0.0, start_percent=0.0, end_percent=1.0)

    graph = Graph()
    model = graph.add("ParallelDiTLoader", **LOADER)
    pipefusion = {"num_pipeline_patch": 2, "warmup_steps": STEPS, "overlap": True}
    sampler = graph.ksampler(model, graph.empty(SIZE), "PipeFusionSampler", steps=STEPS, **pipefusion)
    graph.add("PreviewImage", images=graph.add("QuickstartDecode", samples=sampler))
    found["PipeFusionSampler"] = graph, sampler[0], CLOSE

    graph = Graph()
    model = graph.add("ParallelDiTLoader", **LOADER)
    text = graph.text("3 1 4 1")
    latent = graph.ksampler(model, graph.empty(SIZE), steps=STEPS, positive=text)
    graph.add("PreviewImage", images=graph.add("QuickstartDecode", samples=latent))
    found["QuickstartPrompt"] = graph, text[0], CLOSE

    graph = Graph()
    model = graph.add("ParallelDiTLoader", **LOADER)
    latent = graph.ksampler(model, graph.empty(SIZE), steps=STEPS)
    picture = graph.add("QuickstartDecode", samples=latent)
    trace = graph.add("ParallelTrace", filename_prefix="trace", after=latent)
    graph.add("PreviewImage", images=picture)
    found["ParallelTrace"] = graph, trace[0], EXACT
    return found


def workflow(rng: random.Random) -> Workflow:
    kind, (graph, node, picture) = rng.choice(sorted(graphs().items()))
    prompt = json.loads(json.dumps(graph.prompt))
    inputs = prompt[node]["inputs"]
    widgets = [name for name, value in inputs.items() if not isinstance(value, list) or rng.random() < 0.1]
    changed = rng.sample(widgets, min(len(widgets), rng.choice((1, 1, 2))))
    for name in changed:
        inputs[name] = odd(rng, name, inputs[name])
        if rng.random() < 0.03:
            del inputs[name]
        if name == "steps" and isinstance(steps := inputs.get(name), int) and 10 < steps <= 10_000:
            inputs[name] = 10  # allowed, and long
    if rng.random() < 0.05:
        inputs[rng.choice(TEXTS)] = damage.value(rng)
    return Workflow(prompt, tuple((kind, name) for name in changed), picture)


def odd(rng: random.Random, name: str, value: Any) -> Any:
    """A value in place of the widget `name`'s."""
    if rng.random() < 0.15:
        return rng.choice((damage.value(rng), rng.choice(OTHERS)))
    if name == "devices":
        return rng.choice(DEVICES)
    if isinstance(value, (bool, int, float)):
        return rng.choice(NUMBERS)
    return rng.choice((*PLACES, *OTHERS)) if name.endswith(("name", "prefix")) else rng.choice((*OTHERS, *NUMBERS))


def body(rng: random.Random) -> bytes:
    """A request for a plan."""
    kinds = "UNETLoader", "ParallelDiTLoader", "CheckpointLoaderSimple", "UnetLoaderGGUF", "x"
    widgets = "unet_name", "ckpt_name", "model_name", "a"
    loaders: list[dict[str, Any]] = [
        {"class_type": rng.choice(kinds), "inputs": {rng.choice(widgets): rng.choice(PLACES), "weight_dtype": "default"}}
        for _ in range(rng.choice((1, 1, 2, 5)))
    ]
    whole: Any = {"loaders": loaders}
    how = rng.randrange(12)
    if how < 5:
        whole = damage.change(rng, whole)
    elif how == 5:
        loaders[0]["inputs"] = {rng.choice((*TEXTS, "unet_name")): rng.choice((*OTHERS, *NUMBERS)) for _ in range(5)}
    elif how == 6:
        loaders[0][rng.choice(("class_type", "inputs"))] = rng.choice((*OTHERS, *NUMBERS))
    elif how == 7:
        whole = {"loaders": loaders * rng.choice((250, 1000, 1001))}
    elif how == 8:
        return rng.choice(
            (b"", b"\xff\xfe", b"[" * 100_000, b'{"loaders":' * 5000, b"x" * (5 << 20), b'{"loaders": [' + b"1," * 10**6)
        )
    text = json.dumps(whole).encode(errors="surrogatepass")
    return damage.bytes_of(rng, text) if how == 9 else text
