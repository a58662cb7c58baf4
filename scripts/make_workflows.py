"""Writes workflows/*.json (what ComfyUI opens) and workflows/api/*.json (what its HTTP interface takes). No arguments.

Each graph is described once, below. tests/comfyui/test_workflows.py compares both forms with a running ComfyUI, and the
committed files with what this script writes.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.workflow_form import NOTE, Graph, Group, Link, Node, Unconnected, api_form, ui_form  # noqa: E402

WORKFLOWS = ROOT / "workflows"
MODEL, CONDITIONING, LATENT = ((kind, kind) for kind in ("MODEL", "CONDITIONING", "LATENT"))
PIPEFUSION = {"num_pipeline_patch": 0, "warmup_steps": 1, "overlap": True, "extrapolate": True}


def _loader(model_name: str, config: Node | None = None, **widgets: Any) -> Node:
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
    }
    return Node("ParallelDiTLoader", (320, 254), inputs | widgets, (MODEL,))


def _sampling(model: Link, positive: Link, negative: Link, latent: Node, **widgets: Any) -> dict[str, Any]:
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
        "latent_image": latent["LATENT"],
        "denoise": 1.0,
    }
    return inputs | widgets


def _pipefusion_sampler(inputs: dict[str, Any], **settings: Any) -> Node:
    outputs = (LATENT, ("report", "STRING"))
    return Node("PipeFusionSampler", (320, 390), inputs | PIPEFUSION | {"step_cache": 0.0} | settings, outputs)


def _apply_pipefusion(model: Link) -> Node:
    return Node("ApplyPipeFusion", (320, 130), {"model": model} | PIPEFUSION, (MODEL,))


def _ksampler(inputs: dict[str, Any]) -> Node:
    return Node("KSampler", (320, 262), inputs, (LATENT,))


def _report(sampler: Node, width: int, height: int = 180) -> Group:
    text = Node("PreviewAny", (width, height), {"source": sampler["report"]}, (), "What the ranks did")
    return Group("Report", ((text,),))


def _latent(width: int, height: int, batch_size: int = 1, node: str = "EmptySD3LatentImage") -> Node:
    return Node(node, (320, 106), {"width": width, "height": height, "batch_size": batch_size}, (LATENT,))


def _note(title: str, size: tuple[int, int], text: str) -> Group:
    return Group(None, ((Node(NOTE, size, {"text": text}, title=title),),))


# The bundled model.


def _digits(text: str, which: str) -> Node:
    return Node("QuickstartPrompt", (320, 58), {"text": text}, (CONDITIONING,), f"Quickstart Prompt ({which})")


def _digits_picture(samples: Node) -> Group:
    decode = Node("QuickstartDecode", (190, 26), {"samples": samples["LATENT"]}, (("IMAGE", "IMAGE"),))
    save = Node("SaveImage", (340, 370), {"images": decode["IMAGE"], "filename_prefix": "parallel-dit"}, ())
    return Group("Picture", ((decode,), (save,)))


BUNDLED_NOTE = """\
Runs on any machine, with no file to download: the bundled model is tiny, so `devices` is `cpu,cpu`, two processes on \
the CPU that hold half of the model each.

- **Your own GPUs**: set `devices` to `auto` and `pipefusion_degree` to the number of GPUs. The product of all degrees \
is the number of devices.
- **Your own model**: open this pack's template of its family, such as flux_schnell_pipefusion.
- **Prompt**: up to four digits, `_` for an empty cell.
"""


def quickstart() -> Graph:
    """Bundled model, PipeFusion Sampler, and its report as text."""
    loader = _loader("quickstart-digits (bundled)", pipefusion_degree=2, devices="cpu,cpu")
    positive, negative, latent = _digits("3 1 4 1", "positive"), _digits("", "negative"), _latent(256, 256)
    inputs = _sampling(loader["MODEL"], positive["CONDITIONING"], negative["CONDITIONING"], latent)
    sampler = _pipefusion_sampler(inputs)
    text = BUNDLED_NOTE + (
        "- **`warmup_steps`**: as many as `steps` makes every step exact, to compare the pictures.\n"
        "- **`num_pipeline_patch`**: bands that the latent is cut into; 0 chooses.\n"
    )
    return Graph(
        (
            (Group("Model, on two processes", ((loader,),)), Group("Prompt and size", ((positive, negative, latent),))),
            (Group("Sampling", ((sampler,),)), _note("What to turn", (360, 286), text)),
            (_digits_picture(sampler), _report(sampler, 554, 214)),
        )
    )


def native_ksampler() -> Graph:
    """The same through Apply PipeFusion and ComfyUI's own KSampler."""
    loader = _loader("quickstart-digits (bundled)", pipefusion_degree=2, devices="cpu,cpu")
    positive, negative, latent = _digits("3 1 4 1", "positive"), _digits("", "negative"), _latent(256, 256)
    apply = _apply_pipefusion(loader["MODEL"])
    inputs = _sampling(apply["MODEL"], positive["CONDITIONING"], negative["CONDITIONING"], latent)
    sampler = _ksampler(inputs)
    text = BUNDLED_NOTE + (
        "- **Apply PipeFusion** may be followed by any sampler, guider or scheduler of ComfyUI; bypassed, every step is "
        "exact.\n"
    )
    return Graph(
        (
            (Group("Model, on two processes", ((loader,),)), _note("What to turn", (360, 300), text)),
            (Group("Pipeline", ((apply,),)), Group("Prompt and size", ((positive, negative, latent),))),
            (Group("Sampling, by ComfyUI's own node", ((sampler,),)),),
            (_digits_picture(sampler),),
        ),
        first=(loader, positive, negative, latent),
    )


# Models whose files users bring: ComfyUI's own nodes for text and picture.


def _dual_clip(first: str, second: str) -> Node:
    widgets = {"clip_name1": first, "clip_name2": second, "type": "flux", "device": "default"}
    return Node("DualCLIPLoader", (320, 130), widgets, (("CLIP", "CLIP"),))


def _vae(name: str) -> Node:
    return Node("VAELoader", (320, 58), {"vae_name": name}, (("VAE", "VAE"),))


def _text(clip: Node, text: str, title: str = "Prompt", height: int = 150) -> Node:
    return Node("CLIPTextEncode", (320, height), {"text": text, "clip": clip["CLIP"]}, (CONDITIONING,), title)


def _picture(samples: Link, vae: Node, prefix: str, sampler: tuple[Node, ...] = (), height: int = 440) -> Group:
    decode = Node("VAEDecode", (400, 46), {"samples": samples, "vae": vae["VAE"]}, (("IMAGE", "IMAGE"),))
    save = Node("SaveImage", (400, height), {"images": decode["IMAGE"], "filename_prefix": prefix}, ())
    return Group("Sampler and picture" if sampler else "Picture", ((*sampler, decode, save),))


FLUX_FILES = """\
Needs **your own files**, by these names or picked in the loaders:
- `models/diffusion_models/{model}`
- `models/text_encoders/clip_l.safetensors`
- `models/text_encoders/t5xxl_fp8_e4m3fn.safetensors`
- `models/vae/ae.safetensors`

"""


def flux_schnell_pipefusion() -> Graph:
    """FLUX.1 schnell on two GPUs that hold half of it each, by PipeFusion Sampler."""
    loader = _loader("flux1-schnell.safetensors", pipefusion_degree=2)
    clip, vae = _dual_clip("clip_l.safetensors", "t5xxl_fp8_e4m3fn.safetensors"), _vae("ae.safetensors")
    prompt = _text(clip, "a lighthouse on a cliff at dusk, warm light in its window, waves below, photograph")
    negative = _text(clip, "", "Negative prompt (not used at cfg 1)", 88)
    latent = _latent(1024, 1024)
    inputs = _sampling(loader["MODEL"], prompt["CONDITIONING"], negative["CONDITIONING"], latent, steps=4, cfg=1.0)
    sampler = _pipefusion_sampler(inputs, num_pipeline_patch=2)
    text = FLUX_FILES.format(model="flux1-schnell.safetensors") + (
        "Made for **2 GPUs** without NVLink, 16 GB each: each holds half of the 24 GB model.\n"
        "- **4 GPUs**: `pipefusion_degree` 4. With four steps the pipeline is filled and emptied often, so it is for "
        "cards that hold no half of the model.\n"
        "- **2 GPUs with NVLink that hold all of it**: `pipefusion_degree` 1 and a Ulysses Config with `ulysses_degree` "
        "2: exact.\n"
        "- **1 GPU**: `pipefusion_degree` 1, `weight_dtype` fp8_e4m3fn.\n"
        "- `num_pipeline_patch` is 2 because four steps are few: more patches stray further from the picture of one GPU.\n"
    )
    return Graph(
        (
            (_note("Files, GPUs, what to turn", (360, 300), text),),
            (Group("Model and text encoders", ((loader, clip),)),),
            (Group("Prompt and size", ((prompt, negative, latent),)),),
            (Group("Sampling", ((sampler,),)), Group("VAE", ((vae,),))),
            (_picture(sampler["LATENT"], vae, "flux-schnell", height=360), _report(sampler, 400)),
        )
    )


def flux_dev_ulysses_pipefusion() -> Graph:
    """FLUX.1 dev on four GPUs, two stages of two that share the tokens, by ComfyUI's custom sampling nodes."""
    config = Node(
        "UlyssesConfig",
        (320, 254),
        {
            "ulysses_degree": 2,
            "ring_degree": 1,
            "patch_mode": "none",
            "patch_degree": 1,
            "attention": "auto",
            "comm_overlap": True,
            "patch_warmup_steps": 1,
            "transfer_dtype": "full",
        },
        (("parallel_config", "PARALLEL_CONFIG"),),
    )
    loader = _loader("flux1-dev.safetensors", config, pipefusion_degree=2)
    clip, vae = _dual_clip("clip_l.safetensors", "t5xxl_fp8_e4m3fn.safetensors"), _vae("ae.safetensors")
    prompt = _text(clip, "a lighthouse on a cliff at dusk, warm light in its window, waves below, photograph")
    guidance = Node("FluxGuidance", (320, 58), {"conditioning": prompt["CONDITIONING"], "guidance": 3.5}, (CONDITIONING,))
    latent = _latent(1024, 1024)
    apply = _apply_pipefusion(loader["MODEL"])
    shift = {"max_shift": 1.15, "base_shift": 0.5, "width": 1024, "height": 1024}
    shifted = Node("ModelSamplingFlux", (320, 130), {"model": apply["MODEL"]} | shift, (MODEL,))
    noise = Node("RandomNoise", (320, 82), {"noise_seed": 42}, (("NOISE", "NOISE"),))
    guider = Node(
        "BasicGuider",
        (320, 46),
        {"model": shifted["MODEL"], "conditioning": guidance["CONDITIONING"]},
        (("GUIDER", "GUIDER"),),
    )
    select = Node("KSamplerSelect", (320, 58), {"sampler_name": "euler"}, (("SAMPLER", "SAMPLER"),))
    steps = {"model": shifted["MODEL"], "scheduler": "simple", "steps": 20, "denoise": 1.0}
    sigmas = Node("BasicScheduler", (320, 106), steps, (("SIGMAS", "SIGMAS"),))
    sampler = Node(
        "SamplerCustomAdvanced",
        (320, 106),
        {
            "noise": noise["NOISE"],
            "guider": guider["GUIDER"],
            "sampler": select["SAMPLER"],
            "sigmas": sigmas["SIGMAS"],
            "latent_image": latent["LATENT"],
        },
        (("output", "LATENT"), ("denoised_output", "LATENT")),
    )
    text = FLUX_FILES.format(model="flux1-dev.safetensors") + (
        "Made for **4 GPUs** in two pairs with fast links: `pipefusion_degree` 2 (a pair holds half of the 24 GB model) "
        "times `ulysses_degree` 2 (its cards share the picture). In `devices` a pair's cards are neighbours.\n"
        "- **2 GPUs**: `ulysses_degree` 1 keeps the pipeline (any links, half of the model on each); "
        "`pipefusion_degree` 1 keeps Ulysses (fast links, all of the model on each; exact).\n"
        "- **8 GPUs**: `ulysses_degree` 4.\n"
        "- **1 GPU**: both 1.\n"
        "- Another size: write it into ModelSamplingFlux too.\n"
    )
    return Graph(
        (
            (_note("Files, GPUs, what to turn", (360, 300), text), Group("GPUs that share the picture", ((config,),))),
            (Group("Model and text encoders", ((loader, clip),)),),
            (Group("Pipeline", ((apply, shifted),)), Group("Prompt", ((prompt, guidance),))),
            (Group("Sampling and size", ((noise, latent, guider, select, sigmas),)), Group("VAE", ((vae,),))),
            (_picture(sampler["output"], vae, "flux-dev", (sampler,)),),
        )
    )


def sd3_split_batch() -> Graph:
    """Stable Diffusion 3.5 large on two GPUs, one for each prompt, by KSampler."""
    loader = _loader("sd3.5_large.safetensors", split_batch_degree=2)
    names = {f"clip_name{place}": f"{name}.safetensors" for place, name in enumerate(SD3_ENCODERS, 1)}
    clip = Node("TripleCLIPLoader", (320, 106), names, (("CLIP", "CLIP"),))
    vae = _vae("sd3.5_vae.safetensors")
    positive = _text(clip, "a lighthouse on a cliff at dusk, warm light in its window, waves below, photograph")
    negative = _text(clip, "blurry, low quality, text, watermark", "Negative prompt", 100)
    latent = _latent(1024, 1024)
    shifted = Node("ModelSamplingSD3", (320, 58), {"model": loader["MODEL"], "shift": 3.0}, (MODEL,))
    inputs = _sampling(
        shifted["MODEL"], positive["CONDITIONING"], negative["CONDITIONING"], latent, cfg=4.0, scheduler="sgm_uniform"
    )
    sampler = _ksampler(inputs)
    text = (
        "Needs **your own files**, by these names or picked in the loaders:\n"
        "- `models/diffusion_models/sd3.5_large.safetensors`\n"
        "- `models/text_encoders/`: `clip_l`, `clip_g`, `t5xxl_fp8_e4m3fn` (`.safetensors`)\n"
        "- `models/vae/sd3.5_vae.safetensors`: from the model's own `vae` folder, renamed\n\n"
        "Made for **2 GPUs** of 24 GB: each holds the whole model, one runs the prompt, the other the negative "
        "prompt. Exact, and next to nothing moves between them.\n"
        "- **16 GB cards**: `weight_dtype` fp8_e4m3fn.\n"
        "- **4 GPUs**: also `pipefusion_degree` 2, and Apply PipeFusion in front of ModelSamplingSD3.\n"
        "- **Several pictures**: `batch_size` is shared out as well.\n"
        "- **1 GPU**: `split_batch_degree` 1.\n"
        "- It needs `cfg` above 1: at 1 there is no negative prompt to share out.\n"
    )
    return Graph(
        (
            (_note("Files, GPUs, what to turn", (360, 300), text),),
            (Group("Model and text encoders", ((loader, clip),)),),
            (Group("Prompt and size", ((positive, negative, latent),)),),
            (Group("Sampling", ((shifted, sampler),)), Group("VAE", ((vae,),))),
            (_picture(sampler["LATENT"], vae, "sd3"),),
        )
    )


SD3_ENCODERS = ("clip_l", "clip_g", "t5xxl_fp8_e4m3fn")


def pixart_2048() -> Graph:
    """PixArt-Sigma at 2048 x 2048 on four GPUs, a pipeline of four."""
    loader = _loader("PixArt-Sigma-XL-2-2K-MS", pipefusion_degree=4)
    widgets = {"clip_name": "t5xxl_fp8_e4m3fn.safetensors", "type": "pixart", "device": "default"}
    clip = Node("CLIPLoader", (320, 106), widgets, (("CLIP", "CLIP"),))
    vae = _vae("sdxl_vae.safetensors")
    positive = _text(clip, "a lighthouse on a cliff at dusk, warm light in its window, waves below, photograph")
    negative = _text(clip, "blurry, low quality, text, watermark", "Negative prompt", 100)
    latent = _latent(2048, 2048, node="EmptyLatentImage")
    inputs = _sampling(
        loader["MODEL"], positive["CONDITIONING"], negative["CONDITIONING"], latent, cfg=4.5, sampler_name="dpmpp_2m"
    )
    sampler = _pipefusion_sampler(inputs | {"scheduler": "normal"})
    text = (
        "Needs **your own files**, by these names or picked in the loaders:\n"
        "- `models/diffusion_models/PixArt-Sigma-XL-2-2K-MS/`: that repository's `transformer` folder (`config.json` and "
        "`diffusion_pytorch_model.safetensors`), renamed\n"
        "- `models/text_encoders/t5xxl_fp8_e4m3fn.safetensors`\n"
        "- `models/vae/sdxl_vae.safetensors`\n\n"
        "Made for **4 GPUs** of any kind and link. The model is small; at 2048 x 2048 its time goes into 16,384 tokens.\n"
        "- **Other machines**: `pipefusion_degree` is the number of GPUs; 1 for one.\n"
        "- **Fast links**: `pipefusion_degree` 1 and a Ulysses Config with `ulysses_degree` 4: exact.\n"
        "- `split_batch_degree` does nothing here: prompts of different lengths reach PixArt one after the other.\n"
        "- 1024 x 1024: the model PixArt-Sigma-XL-2-1024-MS in the same way.\n"
    )
    return Graph(
        (
            (_note("Files, GPUs, what to turn", (360, 300), text),),
            (Group("Model and text encoder", ((loader, clip),)),),
            (Group("Prompt and size", ((positive, negative, latent),)),),
            (Group("Sampling", ((sampler,),)), Group("VAE", ((vae,),))),
            (_picture(sampler["LATENT"], vae, "pixart-2048", height=360), _report(sampler, 400)),
        )
    )


GRAPHS: dict[str, Callable[[], Graph]] = {
    graph.__name__: graph
    for graph in (
        quickstart,
        native_ksampler,
        flux_schnell_pipefusion,
        sd3_split_batch,
        flux_dev_ulysses_pipefusion,
        pixart_2048,
    )
}


def files() -> dict[str, str]:
    """Path below workflows/ -> content."""
    out = {}
    for name, make in GRAPHS.items():
        graph = make()
        for path, form in ((f"{name}.json", ui_form(name, graph)), (f"api/{name}.json", api_form(graph))):
            out[path] = json.dumps(form, indent=2) + "\n"
    return out


if __name__ == "__main__":
    for path, content in files().items():
        (WORKFLOWS / path).parent.mkdir(parents=True, exist_ok=True)
        (WORKFLOWS / path).write_text(content)
