"""Workflows of other packs become ones of ComfyUI's own nodes: every wire stays, by what it carries."""

from typing import Any

import pytest


class Moving:
    """The module, and a ComfyUI with some nodes."""

    def __init__(self, module: Any):
        self.module, Input, Stock = module, module.Input, module.Stock
        model, latent, clip, vae = ((name, name) for name in ("MODEL", "LATENT", "CLIP", "VAE"))
        dtypes = "default", "fp8_e4m3fn"
        sampling = Input("positive", "CONDITIONING"), Input("negative", "CONDITIONING")
        seed, into = Input("noise_seed", "INT", control=True), Input("model", "MODEL")
        file = Input("unet_name", "COMBO", ("a.safetensors",))
        custom = ("noise", "NOISE"), ("guider", "GUIDER"), ("latent_image", "LATENT")
        device = Input("device", "COMBO", ("default", "cpu"), "default")
        self.nodes = {
            "UNETLoader": Stock((file, Input("weight_dtype", "COMBO", dtypes, "default")), (model,)),
            "CLIPLoader": Stock((Input("clip_name", "COMBO"), device), (clip,)),
            "LoraLoaderModelOnly": Stock((into, Input("lora_name", "COMBO"), Input("strength_model", "FLOAT")), (model,)),
            "ModelSamplingSD3": Stock((into, Input("shift", "FLOAT")), (model,)),
            "KSamplerAdvanced": Stock(
                (into, seed, Input("steps", "INT"), *sampling, Input("latent_image", "LATENT")), (latent,)
            ),
            "CFGGuider": Stock((into, *sampling, Input("cfg", "FLOAT")), (("GUIDER", "GUIDER"),)),
            "RandomNoise": Stock((seed,), (("NOISE", "NOISE"),)),
            "SamplerCustomAdvanced": Stock(
                tuple(Input(*each) for each in custom), (("output", "LATENT"), ("denoised_output", "LATENT"))
            ),
            "VAELoader": Stock((Input("vae_name", "COMBO"),), (vae,)),
            "ParallelVAEDecode": Stock((Input("samples", "LATENT"), Input("vae", "VAE")), (("IMAGE", "IMAGE"),)),
            "ParallelDiTLoader": Stock((Input("model_name", "COMBO"), Input("pipefusion_degree", "INT")), (model,)),
        }

    def moved_in(self, workflow: Any) -> dict[str, Any]:
        return self.module.moved_in(workflow, self.nodes.get)

    def wires(self, graph: dict[str, Any]) -> set[tuple[Any, ...]]:
        """(type and values of where it begins, slot there, type and values of where it ends, the input's name) of each wire,
        after a look at what the nodes say of it."""
        found, read = set(), self.module.Graph(graph)
        for link in read.links.values():
            origin, target = read.nodes[link.origin], read.nodes[link.target]
            output, entry = origin["outputs"][link.slot], target["inputs"][link.target_slot]
            assert output["type"] == link.kind and link.id in output["links"] and entry["link"] == link.id
            about = [(each["type"], *each["widgets_values"]) for each in (origin, target)]
            found.add((about[0], link.slot, about[1], entry["name"]))
        return found


@pytest.fixture
def moving(module) -> Moving:
    return Moving(module("move_in"))


def workflow(
    nodes: dict[int, tuple[str, list[Any], list[str], list[str]]], links: list[tuple], **more: Any
) -> dict[str, Any]:
    """`nodes`: id -> (type, widgets' values, inputs, types of outputs). `links`: (from, slot, to, input)."""
    made = [
        {
            "id": number,
            "type": kind,
            "pos": [0, 0],
            "widgets_values": values,
            "inputs": [{"name": name, "type": "?", "link": None} for name in inputs],
            "outputs": [{"name": output, "type": output, "links": []} for output in outputs],
        }
        for number, (kind, values, inputs, outputs) in nodes.items()
    ]
    rows = []
    for number, (origin, slot, target, name) in enumerate(links, 1):
        to = next(each for each in made if each["id"] == target)
        index = [each["name"] for each in to["inputs"]].index(name)
        to["inputs"][index]["link"] = number
        kind = next(each for each in made if each["id"] == origin)["outputs"][slot]["type"]
        rows.append([number, origin, slot, target, index, kind])
    return {"nodes": made, "links": rows, "last_node_id": 99, "last_link_id": 99, **more}


LORA = ["prev_ray_lora"], ["RAY_LORA"]
RAYLIGHT = workflow(
    {
        1: ("RayInitializer", ["local", "default", 2, 2], [], ["RAY_ACTORS_INIT"]),
        2: ("RayLoraLoader", ["first.safetensors", 0.5], *LORA),
        3: ("RayLoraLoader", ["second.safetensors", 1.0], *LORA),
        4: ("RayUNETLoader", ["b.safetensors", "bf16"], ["ray_actors_init", "lora"], ["RAY_ACTORS"]),
        5: ("RayModelSamplingSD3", [8.0], ["ray_actors"], ["RAY_ACTORS"]),
        6: ("XFuserKSamplerAdvanced", [7, "fixed", 4, 1.0], ["ray_actors", "latent_image"], ["LATENT", "RAY_ACTORS"]),
        7: ("RayCFGGuider", [1.0], ["ray_actors"], ["RAY_GUIDER"]),
        8: (
            "XFuserSamplerCustomAdvanced",
            [True, 5, "fixed"],
            ["guider", "latent_image"],
            ["LATENT", "LATENT", "RAY_ACTORS"],
        ),
        9: ("RayVAEDecodeDistributed", ["vae.safetensors", 512], ["ray_actors", "samples"], ["IMAGE"]),
        10: ("RayTorchCompileModel", ["inductor"], ["ray_actors"], ["RAY_ACTORS"]),
    },
    [
        (1, 0, 4, "ray_actors_init"),
        (2, 0, 3, "prev_ray_lora"),
        (3, 0, 4, "lora"),
        (4, 0, 10, "ray_actors"),
        (10, 0, 5, "ray_actors"),
        (5, 0, 6, "ray_actors"),
        (6, 1, 7, "ray_actors"),  # a sampler passes the model on
        (7, 0, 8, "guider"),
        (6, 0, 8, "latent_image"),
        (8, 2, 9, "ray_actors"),
        (8, 0, 9, "samples"),
    ],
)


def test_raylight(moving):
    answer = moving.moved_in(RAYLIGHT)
    loader, shift = ("UNETLoader", "b.safetensors", "default"), ("ModelSamplingSD3", 8.0)
    loras = [("LoraLoaderModelOnly", "first.safetensors", 0.5), ("LoraLoaderModelOnly", "second.safetensors", 1.0)]
    sampler, guider, second = ("KSamplerAdvanced", 7, "fixed", 4), ("CFGGuider", 1.0), ("SamplerCustomAdvanced",)
    assert moving.wires(answer["workflow"]) == {
        (loader, 0, loras[0], "model"),
        (loras[0], 0, loras[1], "model"),
        (loras[1], 0, shift, "model"),
        (shift, 0, sampler, "model"),
        (shift, 0, guider, "model"),
        (guider, 0, second, "guider"),
        (sampler, 0, second, "latent_image"),
        (("RandomNoise", 5, "fixed"), 0, second, "noise"),
        (second, 0, ("ParallelVAEDecode",), "samples"),
        (("VAELoader", "vae.safetensors"), 0, ("ParallelVAEDecode",), "vae"),
    }
    assert answer["left"] == ["RayTorchCompileModel was removed: set `compile` on Parallel DiT Loader."]
    assert answer["workflow"]["last_node_id"] == 99 and len({node["id"] for node in answer["workflow"]["nodes"]}) == 10


def test_multigpu_in_a_subgraph_and_outside(moving):
    """A subgraph's wires are objects, and what newer editors add to them stays."""
    inner = workflow(
        {
            1: ("UNETLoaderDisTorch2MultiGPU", ["b.safetensors", "fp8_e4m3fn", "cuda:1", 7.0, "cpu"], [], ["MODEL"]),
            2: ("KSamplerAdvanced", [1, "fixed", 4], ["model"], ["LATENT"]),
        },
        [(1, 0, 2, "model")],
        id="inner",
    )
    names = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
    inner["links"] = [dict(zip(names, link, strict=True)) | {"parentId": 3} for link in inner["links"]]
    inner["inputs"] = [{"name": "x", "linkIds": [44]}]
    outer = workflow(
        {
            1: ("CLIPLoaderMultiGPU", ["c.safetensors", "cuda:0"], [], ["CLIP"]),
            2: ("UnetLoaderGGUFMultiGPU", ["b.gguf", "cuda:0"], [], ["MODEL"]),
            3: ("OtherMultiGPU", [1], [], ["X"]),
        },
        [],
        definitions={"subgraphs": [inner]},
    )
    answer = moving.moved_in(outer)
    found = answer["workflow"]
    (graph,) = found["definitions"]["subgraphs"]
    loader, sampler = ("UNETLoader", "b.safetensors", "fp8_e4m3fn"), ("KSamplerAdvanced", 1, "fixed", 4)
    assert moving.wires(graph) == {(loader, 0, sampler, "model")}
    assert graph["links"][0]["parentId"] == 3 and graph["inputs"][0]["linkIds"] == []
    assert [(node["type"], node["widgets_values"]) for node in found["nodes"]] == [
        ("CLIPLoader", ["c.safetensors", "default"]),
        ("ParallelDiTLoader", ["b.gguf"]),
        ("OtherMultiGPU", [1]),
    ]
    assert answer["left"] == ["OtherMultiGPU was left: this ComfyUI has no Other."]


def test_a_workflow_of_neither_pack_stays_as_it_is(moving):
    graph = workflow({1: ("UNETLoader", ["b.safetensors", "default"], [], ["MODEL"])}, [])
    assert moving.moved_in(graph) == {"workflow": graph, "moved": [], "left": []}


@pytest.mark.parametrize("given", [None, [], {"nodes": None}, {"1": {"class_type": "KSampler"}}])
def test_what_is_no_workflow_file(moving, given):
    with pytest.raises(ValueError, match="no nodes"):
        moving.moved_in(given)


def test_sglang(moving):
    """Its options have no counterpart, and nodes that ask its server stay."""
    options = ["auto-detect", False, 2, -1, -1, -1, -1, 1, 1, False, "", "none"]
    answer = moving.moved_in(
        workflow(
            {
                1: ("SGLDOptions", options, [], ["SGLD_OPTIONS"]),
                2: ("SGLDUNETLoader", ["b.safetensors", "default"], ["sgld_options"], ["MODEL"]),
                3: ("SGLDLoraLoader", ["l.safetensors", 0.5, "nickname", "all"], ["model"], ["MODEL"]),
                4: ("KSamplerAdvanced", [1, "fixed", 4], ["model"], ["LATENT"]),
                5: ("SGLDiffusionServerModel", ["http://localhost:3000/v1", "key"], [], ["SGLD_CLIENT"]),
            },
            [(1, 0, 2, "sgld_options"), (2, 0, 3, "model"), (3, 0, 4, "model")],
        )
    )
    loader, lora = ("UNETLoader", "b.safetensors", "default"), ("LoraLoaderModelOnly", "l.safetensors", 0.5)
    wires = {(loader, 0, lora, "model"), (lora, 0, ("KSamplerAdvanced", 1, "fixed", 4), "model")}
    assert moving.wires(answer["workflow"]) == wires
    kinds = ["UNETLoader", "LoraLoaderModelOnly", "KSamplerAdvanced", "SGLDiffusionServerModel"]
    assert [node["type"] for node in answer["workflow"]["nodes"]] == kinds
    assert answer["left"] == ["SGLDOptions was removed: set the number of GPUs and the mode on Parallelize Model."]
