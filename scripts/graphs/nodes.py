"""Nodes that several bundled workflows have, with their sizes in the editor."""

from typing import Any

from scripts.workflow_form import NOTE, Graph, Group, Link, Node, Unconnected

MODEL, CONDITIONING, LATENT = ((kind, kind) for kind in ("MODEL", "CONDITIONING", "LATENT"))
LIGHTHOUSE = "a lighthouse on a cliff at dusk, warm light in its window, waves below, photograph"
PIPEFUSION = {"num_pipeline_patch": 0, "warmup_steps": 1, "overlap": True, "extrapolate": True}
CLOSENESS = {"min_closeness": 0.0}


def loader_node(model_name: str, config: Node | None = None, **widgets: Any) -> Node:
    inputs = {
        "model_name": model_name,
        "weight_dtype": "default",
        "pipefusion_degree": 1,
        "tensor_parallel_degree": 1,
        "split_batch_degree": 1,
        "devices": "auto",
        "parallel_config": config["parallel_config"] if config else Unconnected("PARALLEL_CONFIG"),
        "stage_split": "auto",
        "compile": False,
        "degrees": "as set",
        "offload": "auto",
        "cuda_graphs": False,
    }
    return Node("ParallelDiTLoader", (320, 302), inputs | widgets, (MODEL,))


def checkpoint_node(ckpt_name: str, **widgets: Any) -> Node:
    """The loader of all-in-one files, with loader_node's widgets."""
    others = loader_node("", **widgets).inputs
    inputs = {"ckpt_name": ckpt_name} | {name: value for name, value in others.items() if name != "model_name"}
    return Node("ParallelCheckpointLoader", (340, 338), inputs, (MODEL, ("CLIP", "CLIP"), ("VAE", "VAE")))


def parallelize_node(model: Link, gpus: int, mode: str) -> Node:
    inputs = {"model": model, "gpus": gpus, "mode": mode, "parallel_config": Unconnected("PARALLEL_CONFIG")}
    inputs["offload"] = "auto"
    return Node("ParallelizeModel", (320, 126), inputs, (MODEL,))


def ulysses_node(degree: int = 1, **others: Any) -> Node:
    widgets = {
        "ulysses_degree": degree,
        "ring_degree": 1,
        "patch_mode": "none",
        "patch_degree": 1,
        "attention": "auto",
        "comm_overlap": True,
        "patch_warmup_steps": 1,
        "transfer_dtype": "full",
        "keep_run": True,
    }
    return Node("UlyssesConfig", (320, 302), widgets | others, (("parallel_config", "PARALLEL_CONFIG"),))


def sampling_inputs(model: Link, positive: Link, negative: Link, latent: Node | Link, **widgets: Any) -> dict[str, Any]:
    """KSampler's inputs, which PipeFusion Sampler has too."""
    inputs = {
        "model": model,
        "seed": 42,
        "steps": 20,
        "cfg": 3.0,
        "sampler_name": "euler",
        "scheduler": "simple",
        "positive": positive,
        "negative": negative,
        "latent_image": latent["LATENT"] if isinstance(latent, Node) else latent,
        "denoise": 1.0,
    }
    return inputs | widgets


def pipefusion_sampler_node(inputs: dict[str, Any], **settings: Any) -> Node:
    outputs = (LATENT, ("report", "STRING"))
    return Node("PipeFusionSampler", (320, 414), inputs | PIPEFUSION | {"step_cache": 0.0} | CLOSENESS | settings, outputs)


def apply_pipefusion_node(model: Link) -> Node:
    return Node("ApplyPipeFusion", (320, 154), {"model": model} | PIPEFUSION | CLOSENESS, (MODEL,))


def ksampler_node(inputs: dict[str, Any]) -> Node:
    return Node("KSampler", (320, 262), inputs, (LATENT,))


def report_group(sampler: Node, width: int, height: int = 180) -> Group:
    text = Node("PreviewAny", (width, height), {"source": sampler["report"]}, (), "What the ranks did")
    return Group("Report", ((text,),))


def latent_node(width: int, height: int, batch_size: int = 1, node: str = "EmptySD3LatentImage") -> Node:
    return Node(node, (320, 106), {"width": width, "height": height, "batch_size": batch_size}, (LATENT,))


def note_group(title: str, size: tuple[int, int], text: str) -> Group:
    return Group(None, ((Node(NOTE, size, {"text": text}, title=title),),))


def dual_clip_node(first: str, second: str) -> Node:
    widgets = {"clip_name1": first, "clip_name2": second, "type": "flux", "device": "default"}
    return Node("DualCLIPLoader", (320, 130), widgets, (("CLIP", "CLIP"),))


def vae_node(name: str) -> Node:
    return Node("VAELoader", (320, 58), {"vae_name": name}, (("VAE", "VAE"),))


def text_node(clip: Node, text: str, title: str = "Prompt", height: int = 150) -> Node:
    return Node("CLIPTextEncode", (320, height), {"text": text, "clip": clip["CLIP"]}, (CONDITIONING,), title)


def image_group(samples: Link, vae: Node, prefix: str, sampler: tuple[Node, ...] = (), height: int = 440) -> Group:
    decode = Node("VAEDecode", (400, 46), {"samples": samples, "vae": vae["VAE"]}, (("IMAGE", "IMAGE"),))
    save = Node("SaveImage", (400, height), {"images": decode["IMAGE"], "filename_prefix": prefix}, ())
    return Group("Sampler and image" if sampler else "Image", ((*sampler, decode, save),))


def clip_node(name: str, kind: str) -> Node:
    widgets = {"clip_name": name, "type": kind, "device": "default"}
    return Node("CLIPLoader", (320, 106), widgets, (("CLIP", "CLIP"),))


def custom_sampling_nodes(guider: Node, latent: Link, sampler_name: str, sigmas: Node) -> tuple[Node, ...]:
    """ComfyUI's nodes around SamplerCustomAdvanced, which is the last one."""
    noise = Node("RandomNoise", (320, 82), {"noise_seed": 42}, (("NOISE", "NOISE"),))
    select = Node("KSamplerSelect", (320, 58), {"sampler_name": sampler_name}, (("SAMPLER", "SAMPLER"),))
    inputs = {
        "noise": noise["NOISE"],
        "guider": guider["GUIDER"],
        "sampler": select["SAMPLER"],
        "sigmas": sigmas["SIGMAS"],
        "latent_image": latent,
    }
    sampler = Node("SamplerCustomAdvanced", (320, 106), inputs, (("output", "LATENT"), ("denoised_output", "LATENT")))
    return noise, guider, select, sigmas, sampler


def guidance_node(prompt: Node, guidance: float) -> Node:
    given = {"conditioning": prompt["CONDITIONING"], "guidance": guidance}
    return Node("FluxGuidance", (320, 58), given, (CONDITIONING,))


def zero_out_node(prompt: Node) -> Node:
    """In place of a negative prompt."""
    return Node("ConditioningZeroOut", (320, 26), {"conditioning": prompt["CONDITIONING"]}, (CONDITIONING,))


def guider_node(model: Link, conditioning: Link) -> Node:
    return Node("BasicGuider", (320, 46), {"model": model, "conditioning": conditioning}, (("GUIDER", "GUIDER"),))


def scheduler_node(model: Link, steps: int) -> Node:
    given = {"model": model, "scheduler": "simple", "steps": steps, "denoise": 1.0}
    return Node("BasicScheduler", (320, 106), given, (("SIGMAS", "SIGMAS"),))


def shift_node(kind: str, model: Link, shift: float) -> Node:
    return Node(kind, (320, 58), {"model": model, "shift": shift}, (MODEL,))


def given_image_node() -> Node:
    return Node("LoadImage", (320, 314), {"image": "example.png"}, (("IMAGE", "IMAGE"), ("MASK", "MASK")))


def files_note(files: tuple[str, ...], text: str, height: int = 300, more: str = "") -> Group:
    """A note that begins with the files that users bring. `more`: further lines about them."""
    lines = "".join(f"- `models/{file}`\n" for file in files)
    head = "Needs **your own files**, by these names or picked in the loaders:\n"
    return note_group("Files, GPUs, what to turn", (360, height), f"{head}{lines}{more}\n{text}")


def image_graph(
    first: tuple[Group, ...],
    model: tuple[Node, ...],
    prompt: tuple[Node, ...],
    sampling: tuple[Node, ...],
    vae: Node,
    prefix: str,
    encoders: str = "encoders",
    height: int = 360,
) -> Graph:
    """The usual columns: notes, model, prompt and size, sampling, image. The last of `sampling` is the sampler, whose report
    is shown if it has one."""
    sampler = sampling[-1]
    has_report = ("report", "STRING") in sampler.outputs
    image = image_group(sampler["LATENT"], vae, prefix, height=height)
    return Graph(
        (
            first,
            (Group(f"Model and text {encoders}", (model,)),),
            (Group("Prompt and size", (prompt,)),),
            (Group("Sampling", (sampling,)), Group("VAE", ((vae,),))),
            (image, report_group(sampler, 400)) if has_report else (image,),
        )
    )
