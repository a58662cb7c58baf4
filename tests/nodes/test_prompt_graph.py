"""Whether what a node returns is sampled in the prompt that is being executed."""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

KINDS = {"Loader": ("MODEL",), "LoRA": ("MODEL",), "KSampler": ("LATENT",), "Empty": ("LATENT",), "Decode": ("IMAGE",)}


def node(kind, **inputs):
    return {"class_type": kind, "inputs": inputs}


GRAPH = {
    "1": node("Loader", name="a.safetensors", sizes=[1, 2], points=[[1, 2], [3, 4]]),
    "2": node("LoRA", model=["1", 0], strength=1.0),
    "3": node("Empty", width=64),
    "4": node("KSampler", model=["2", 0], latent=["3", 0]),
    "5": node("Decode", samples=["4", 0]),
    "6": node("Loader", name="b.safetensors"),
    "7": node("Report", model=["6", 0]),
    "8": node("Unknown", model=["6", 0]),
}


@pytest.fixture
def graph(module):
    graph = module("ui.prompt_graph")
    kinds = {name: SimpleNamespace(RETURN_TYPES=types) for name, types in (KINDS | {"Report": ("STRING",)}).items()}
    with mock.patch.object(graph.COMFYUI, "NODE_CLASS_MAPPINGS", kinds):
        yield graph


GGUF = {
    "1": node("GGUFLoader", unet_name="a.gguf"),
    "2": node("LoRA", model=["1", 0], clip=["9", 0], strength=1.0),
    "3": node("Parallelize", model=["2", 0], gpus=0),
    "4": node("Loader", name="b.safetensors"),
    "5": node("Merge", model1=["1", 0], model2=["4", 0]),
    "6": node("Parallelize", model=["5", 0]),
    "7": node("Parallelize", model=["made by another node", 0]),
    "8": node("LoRA", model=["8", 0]),
    "9": node("Empty"),
}


@pytest.mark.parametrize(("taker", "file"), [("3", "a.gguf"), ("2", "a.gguf"), ("6", None), ("7", None), ("8", None)])
def test_the_loader_of_a_model_is_found_over_other_nodes(graph, taker, file):
    kinds = graph.COMFYUI.NODE_CLASS_MAPPINGS
    models = ("GGUFLoader", "LoRA", "Parallelize", "Merge")
    with mock.patch.dict(kinds, {name: SimpleNamespace(RETURN_TYPES=("MODEL",)) for name in models}):
        inputs = graph.loader_inputs(GGUF, taker)
    assert (inputs and inputs["unet_name"]) == file


@pytest.mark.parametrize(
    ("loader", "outputs", "sampled"),
    [
        ("1", ["5"], True),  # over others
        ("1", ["7"], False),  # in a part that is not asked for
        ("6", ["5", "7", "8"], False),  # not sampled
        ("4", ["5"], False),  # the sampler itself
        ("made by another node", ["5"], False),
    ],
)
def test_a_node_is_sampled_if_latents_are_made_of_it(graph, loader, outputs, sampled):
    assert graph.is_sampled(GRAPH, loader, outputs) is sampled


def test_the_prompt_that_is_executed_is_looked_at(graph, monkeypatch):
    others = (1, "another", {}, {}, ["5"], {})
    queue = SimpleNamespace(get_current_queue_volatile=lambda: ([others, (2, "mine", GRAPH, {}, ["5"])], []))
    server = SimpleNamespace(PromptServer=SimpleNamespace(instance=SimpleNamespace(prompt_queue=queue)))
    monkeypatch.setitem(sys.modules, "server", server)
    assert not graph.feeds_a_sampler()  # nodes are run from Python
    context = SimpleNamespace(prompt_id="mine", node_id="1")
    with mock.patch.object(graph, "get_executing_context", lambda: context):
        server.PromptServer.instance.prompt_queue = None
        assert not graph.feeds_a_sampler()  # nodes are run by a script with a server of its own
        server.PromptServer.instance.prompt_queue = queue
    for prompt, sampled in (("mine", True), ("another", False), ("ended", False)):
        context = SimpleNamespace(prompt_id=prompt, node_id="1")
        monkeypatch.setattr(graph, "get_executing_context", lambda context=context: context)
        assert graph.feeds_a_sampler() is sampled


GB = 10**9


@pytest.mark.parametrize(
    ("devices", "encoder", "free", "begun"),
    [
        (("cuda:0", "cuda:1"), "cuda:0", 11.5, True),
        (("cuda:0", "cuda:1"), "cuda:0", 10.9, False),  # it just fits without ranks
        (("cuda:1", "cuda:2"), "cuda:0", 10.9, True),  # whose GPU has no ranks
        (("cuda:0", "cuda:1"), "cpu", 0.1, True),
    ],
)
def test_ranks_start_beside_a_text_encoder_if_both_have_room(module, graph, tmp_path, devices, encoder, free, begun):
    """Files of 10 GB, and 0.8 GB for ComfyUI's computing. Ranks that do not start early start at their first use."""
    for name in ("t5.safetensors", "l.safetensors"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(5 * GB)  # without blocks on the disk
    prompt = GRAPH | {"9": node("Clips", clip_name1="t5.safetensors", clip_name2="l.safetensors", type="flux")}
    kinds = graph.COMFYUI.NODE_CLASS_MAPPINGS | {"Clips": SimpleNamespace(RETURN_TYPES=("CLIP",))}
    early, started = module("model.early_start"), []
    memory = {
        "text_encoder_device": lambda: torch.device(encoder),
        "get_free_memory": lambda gpu: free * GB,
        "minimum_inference_memory": lambda: 0.8 * GB,
    }

    def full_path(folder: str, name: str) -> str | None:
        path = tmp_path / name
        return str(path) if folder == "text_encoders" and path.exists() else None

    with (
        mock.patch.object(graph.COMFYUI, "NODE_CLASS_MAPPINGS", kinds),
        mock.patch.object(graph, "executing", lambda: (prompt, "1", ["5"])),
        mock.patch.object(graph.folder_paths, "get_full_path", full_path, create=True),
        mock.patch.multiple(early.comfy.model_management, create=True, **memory),
        mock.patch.object(early, "registry", lambda: SimpleNamespace(begin=lambda *given: started.append(given))),
    ):
        part = SimpleNamespace(devices=devices)
        early.start_ranks_of(SimpleNamespace(model=SimpleNamespace(diffusion_model=part)))
    assert started == [(devices,)] * begun
