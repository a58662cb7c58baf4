"""Workflows that make images with Flux's models, whose files users bring."""

from scripts.workflow_form import Graph, Group, Node

from .nodes import (
    LIGHTHOUSE,
    MODEL,
    apply_pipefusion_node,
    clip_node,
    custom_sampling_nodes,
    dual_clip_node,
    files_note,
    guidance_node,
    guider_node,
    image_graph,
    image_group,
    ksampler_node,
    latent_node,
    loader_node,
    parallelize_node,
    pipefusion_sampler_node,
    sampling_inputs,
    scheduler_node,
    text_node,
    ulysses_node,
    vae_node,
)

CLIP, T5, VAE = "clip_l.safetensors", "t5xxl_fp8_e4m3fn.safetensors", "ae.safetensors"


def _note(model: str, text: str, height: int = 300, more: str = "") -> Group:
    files = f"diffusion_models/{model}", f"text_encoders/{CLIP}", f"text_encoders/{T5}", f"vae/{VAE}"
    return files_note(files, text, height, more)


def _around() -> tuple[Node, ...]:
    """Text encoders, VAE, prompt, negative prompt, latent."""
    clip = dual_clip_node(CLIP, T5)
    negative = text_node(clip, "", "Negative (unused at cfg 1)", 88)
    return clip, vae_node(VAE), text_node(clip, LIGHTHOUSE), negative, latent_node(1024, 1024)


def flux_schnell_pipefusion() -> Graph:
    """FLUX.1 schnell on two GPUs that hold half of it each, by PipeFusion Sampler."""
    loader = loader_node("flux1-schnell.safetensors", pipefusion_degree=2)
    clip, vae, prompt, negative, latent = _around()
    inputs = sampling_inputs(loader["MODEL"], prompt["CONDITIONING"], negative["CONDITIONING"], latent, steps=4, cfg=1.0)
    sampler = pipefusion_sampler_node(inputs, num_pipeline_patch=2)
    text = (
        "Made for **2 GPUs** without NVLink, 16 GB each: each holds half of the 24 GB model.\n"
        "- **4 GPUs**: `pipefusion_degree` 4. With four steps the pipeline is filled and emptied often. Use it if half "
        "of the model does not fit on a GPU.\n"
        "- **2 GPUs with NVLink that hold all of it**: `pipefusion_degree` 1 and a Ulysses Config with `ulysses_degree` "
        "2: exact.\n"
        "- **1 GPU**: `pipefusion_degree` 1, `weight_dtype` fp8_e4m3fn.\n"
        "- `num_pipeline_patch` is 2 because four steps are few: more patches differ more from the image of one GPU.\n"
    )
    note = _note("flux1-schnell.safetensors", text)
    return image_graph((note,), (loader, clip), (prompt, negative, latent), (sampler,), vae, "flux-schnell")


def parallelize_model() -> Graph:
    """FLUX.1 dev with a LoRA on two GPUs, by ComfyUI's own nodes and Parallelize Model between them."""
    loader = Node("UNETLoader", (320, 82), {"unet_name": "flux1-dev.safetensors", "weight_dtype": "default"}, (MODEL,))
    style = {"model": loader["MODEL"], "lora_name": "flux_style.safetensors", "strength_model": 0.8}
    lora = Node("LoraLoaderModelOnly", (320, 82), style, (MODEL,))
    parallel = parallelize_node(lora["MODEL"], 2, "pipefusion")
    clip, vae, prompt, negative, latent = _around()
    guidance = guidance_node(prompt, 3.5)
    inputs = sampling_inputs(parallel["MODEL"], guidance["CONDITIONING"], negative["CONDITIONING"], latent, cfg=1.0)
    sampler = ksampler_node(inputs)
    style_file = "- `models/loras/flux_style.safetensors`: any LoRA for it, or take the node out\n"
    text = (
        "Made for **2 GPUs** of 16 GB with any link. All but **Parallelize Model** are ComfyUI's own nodes: put it into a "
        "workflow that you have, behind the loader or behind its LoRAs.\n"
        "- **Another number**: `gpus`; 0 takes all.\n"
        "- **GPUs that hold the whole model, NVLink**: `mode` ulysses: exact.\n"
        "- **Not sure**: `mode` auto, with Apply PipeFusion behind it if close images are good enough.\n"
        "- Load Checkpoint works too, instead of Load Diffusion Model.\n"
    )
    return Graph(
        (
            (_note("flux1-dev.safetensors", text, 380, style_file),),
            (Group("Model and LoRA", ((loader, lora, parallel),)),),
            (Group("Prompt and size", ((clip, prompt, guidance, negative, latent),)),),
            (Group("Sampling", ((sampler,),)), Group("VAE", ((vae,),))),
            (image_group(sampler["LATENT"], vae, "parallelize", height=360),),
        )
    )


def flux_dev_ulysses_pipefusion() -> Graph:
    """FLUX.1 dev on four GPUs, two stages of two that share the tokens, by ComfyUI's custom sampling nodes."""
    config = ulysses_node(2)
    loader = loader_node("flux1-dev.safetensors", config, pipefusion_degree=2)
    clip, vae, prompt, _, latent = _around()
    guidance = guidance_node(prompt, 3.5)
    apply = apply_pipefusion_node(loader["MODEL"])
    shift = {"max_shift": 1.15, "base_shift": 0.5, "width": 1024, "height": 1024}
    shifted = Node("ModelSamplingFlux", (320, 130), {"model": apply["MODEL"]} | shift, (MODEL,))
    guider, sigmas = guider_node(shifted["MODEL"], guidance["CONDITIONING"]), scheduler_node(shifted["MODEL"], 20)
    noise, _, select, _, sampler = custom_sampling_nodes(guider, latent["LATENT"], "euler", sigmas)
    text = (
        "Made for **4 GPUs** in two pairs with fast links: `pipefusion_degree` 2 (a pair holds half of the 24 GB model) "
        "times `ulysses_degree` 2 (the GPUs of a pair share the image). In `devices` put the GPUs of a pair side by side.\n"
        "- **2 GPUs**: `ulysses_degree` 1 keeps the pipeline (any links, half of the model on each); "
        "`pipefusion_degree` 1 keeps Ulysses (fast links, all of the model on each; exact).\n"
        "- **8 GPUs**: `ulysses_degree` 4.\n"
        "- **1 GPU**: both 1.\n"
        "- Another size: write it into ModelSamplingFlux too.\n"
    )
    return Graph(
        (
            (_note("flux1-dev.safetensors", text), Group("GPUs that share the image", ((config,),))),
            (Group("Model and text encoders", ((loader, clip),)),),
            (Group("Pipeline", ((apply, shifted),)), Group("Prompt", ((prompt, guidance),))),
            (Group("Sampling and size", ((noise, latent, guider, select, sigmas),)), Group("VAE", ((vae,),))),
            (image_group(sampler["output"], vae, "flux-dev", (sampler,)),),
        )
    )


def flux_2_dev_tensor() -> Graph:
    """FLUX.2 dev on two GPUs that hold half of every block, by ComfyUI's custom sampling nodes."""
    loader = loader_node("flux2_dev_fp8mixed.safetensors", tensor_parallel_degree=2)
    clip, vae = clip_node("mistral_3_small_flux2_fp8.safetensors", "flux2"), vae_node("flux2-vae.safetensors")
    prompt = text_node(clip, LIGHTHOUSE)
    guidance = guidance_node(prompt, 4.0)
    latent = latent_node(1024, 1024, node="EmptyFlux2LatentImage")
    guider = guider_node(loader["MODEL"], guidance["CONDITIONING"])
    scheduled = {"steps": 20, "width": 1024, "height": 1024}
    sigmas = Node("Flux2Scheduler", (320, 106), scheduled, (("SIGMAS", "SIGMAS"),))
    sampling = custom_sampling_nodes(guider, latent["LATENT"], "euler", sigmas)
    files = (
        "diffusion_models/flux2_dev_fp8mixed.safetensors",
        "text_encoders/mistral_3_small_flux2_fp8.safetensors",
        "vae/flux2-vae.safetensors",
    )
    text = (
        "Made for **2 GPUs** of 24 GB with NVLink: each holds half of every block of the 32 B model. Exact.\n"
        "- **2 GPUs without NVLink**: `tensor_parallel_degree` 1, `pipefusion_degree` 2 and Apply PipeFusion: close to "
        "exact.\n"
        "- **4 GPUs**: `tensor_parallel_degree` 2 times `pipefusion_degree` 2, with Apply PipeFusion.\n"
        "- **2 GPUs of 16 GB**: the same settings. Weights that do not fit are streamed from host memory.\n"
        "- **1 GPU**: `tensor_parallel_degree` 1.\n"
        "- Another size: write it into Flux2Scheduler too.\n"
    )
    return Graph(
        (
            (files_note(files, text),),
            (Group("Model and text encoder", ((loader, clip),)),),
            (Group("Prompt and size", ((prompt, guidance, latent),)), Group("VAE", ((vae,),))),
            (Group("Sampling", (sampling,)),),
            (image_group(sampling[-1]["output"], vae, "flux-2-dev", height=360),),
        )
    )


def flux_dev_displaced() -> Graph:
    """FLUX.1 dev on two GPUs that compute half of the image each, by displaced patches and KSampler."""
    config = ulysses_node(patch_mode="displaced", patch_degree=2, transfer_dtype="residual")
    loader = loader_node("flux1-dev.safetensors", config, weight_dtype="fp8_e4m3fn")
    clip, vae, prompt, negative, latent = _around()
    guidance = guidance_node(prompt, 3.5)
    inputs = sampling_inputs(loader["MODEL"], guidance["CONDITIONING"], negative["CONDITIONING"], latent, cfg=1.0)
    sampler = ksampler_node(inputs)
    text = (
        "Made for **2 GPUs** of 24 GB without NVLink: both hold the whole model in fp8. Each computes half of the image "
        "and sees the other half as it was one step ago. The first step is exact, the others are close.\n"
        "- **32 GB GPUs**: `weight_dtype` default.\n"
        "- **NVLink**: `patch_mode` none, `patch_degree` 1 and `ulysses_degree` 2: exact.\n"
        "- **16 GB GPUs**: no Ulysses Config, `pipefusion_degree` 2 and Apply PipeFusion.\n"
        "- **1 GPU**: no Ulysses Config.\n"
        "- Too far from the image of one GPU: raise `patch_warmup_steps`. Fewer than eight steps: use an exact mode.\n"
    )
    first = _note("flux1-dev.safetensors", text, 320), Group("GPUs that share the image", ((config,),))
    of_prompt = prompt, guidance, negative, latent
    return image_graph(first, (loader, clip), of_prompt, (sampler,), vae, "flux-dev-displaced")
