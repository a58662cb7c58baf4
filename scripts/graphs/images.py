"""Workflows that make images with other models, whose files users bring."""

from scripts.workflow_form import Graph, Group, Node, Unconnected

from .nodes import (
    CONDITIONING,
    LATENT,
    LIGHTHOUSE,
    apply_pipefusion_node,
    checkpoint_node,
    clip_node,
    files_note,
    given_image_node,
    image_graph,
    image_group,
    ksampler_node,
    latent_node,
    loader_node,
    pipefusion_sampler_node,
    sampling_inputs,
    shift_node,
    text_node,
    ulysses_node,
    vae_node,
    zero_out_node,
)

SD3 = "sd3.5_large_fp8_scaled.safetensors"


def sd3_split_batch() -> Graph:
    """Stable Diffusion 3.5 large, from an all-in-one file, on two GPUs, one for each prompt, by KSampler."""
    loader = checkpoint_node(SD3, split_batch_degree=2)
    positive = text_node(loader, LIGHTHOUSE)
    negative = text_node(loader, "blurry, low quality, text, watermark", "Negative prompt", 100)
    latent = latent_node(1024, 1024)
    shifted = shift_node("ModelSamplingSD3", loader["MODEL"], 3.0)
    inputs = sampling_inputs(
        shifted["MODEL"], positive["CONDITIONING"], negative["CONDITIONING"], latent, cfg=4.0, scheduler="sgm_uniform"
    )
    sampler = ksampler_node(inputs)
    text = (
        "Made for **2 GPUs** of 16 GB: each holds the whole model, one runs the prompt, the other the negative "
        "prompt. Exact, and next to nothing moves between them.\n"
        "- **4 GPUs**: also `pipefusion_degree` 2, and Apply PipeFusion in front of ModelSamplingSD3.\n"
        "- **Several images**: `batch_size` is split over the GPUs too.\n"
        "- **1 GPU**: `split_batch_degree` 1.\n"
        "- It needs `cfg` above 1: at 1 there is no negative prompt.\n"
    )
    return Graph(
        (
            (files_note((f"checkpoints/{SD3}",), text),),
            (Group("Model, text encoders, VAE", ((loader,),)),),
            (Group("Prompt and size", ((positive, negative, latent),)),),
            (Group("Sampling", ((shifted, sampler),)),),
            (image_group(sampler["LATENT"], loader, "sd3"),),
        )
    )


def z_image_turbo_ring() -> Graph:
    """Z-Image turbo on two GPUs that share the tokens in a ring, by KSampler."""
    config = ulysses_node(ring_degree=2)
    loader = loader_node("z_image_turbo_bf16.safetensors", config)
    clip, vae = clip_node("qwen_3_4b.safetensors", "lumina2"), vae_node("ae.safetensors")
    prompt = text_node(clip, LIGHTHOUSE)
    zero = zero_out_node(prompt)
    latent = latent_node(1024, 1024)
    shifted = shift_node("ModelSamplingAuraFlow", loader["MODEL"], 3.0)
    inputs = sampling_inputs(shifted["MODEL"], prompt["CONDITIONING"], zero["CONDITIONING"], latent, steps=8, cfg=1.0)
    sampler = ksampler_node(inputs | {"sampler_name": "res_multistep"})
    files = (
        "diffusion_models/z_image_turbo_bf16.safetensors",
        "text_encoders/qwen_3_4b.safetensors",
        "vae/ae.safetensors",
    )
    text = (
        "Made for **2 GPUs** of 16 GB: both hold the whole model and pass keys and values around. Exact.\n"
        "- **NVLink or P2P**: `ring_degree` 1 and `ulysses_degree` 2 send less.\n"
        "- **4 GPUs**: `ring_degree` 4, or 2 times `ulysses_degree` 2. **1 GPU**: no Ulysses Config.\n"
        "- **2 GPUs of 8 GB**: no Ulysses Config, `pipefusion_degree` 2 and Apply PipeFusion.\n"
        "- Parallel Doctor says if one GPU alone is as fast: eight steps of a small model are short.\n"
    )
    first, of_prompt = (files_note(files, text), Group("GPUs that share the image", ((config,),))), (prompt, zero, latent)
    return image_graph(first, (loader, clip), of_prompt, (shifted, sampler), vae, "z-image", "encoder")


def pixart_2048() -> Graph:
    """PixArt-Sigma at 2048 x 2048 on four GPUs, a pipeline of four."""
    loader = loader_node("PixArt-Sigma-XL-2-2K-MS.safetensors", pipefusion_degree=4)
    clip = clip_node("t5xxl_fp8_e4m3fn.safetensors", "pixart")
    vae = vae_node("sdxl_vae.safetensors")
    positive = text_node(clip, LIGHTHOUSE)
    negative = text_node(clip, "blurry, low quality, text, watermark", "Negative prompt", 100)
    latent = latent_node(2048, 2048, node="EmptyLatentImage")
    inputs = sampling_inputs(
        loader["MODEL"], positive["CONDITIONING"], negative["CONDITIONING"], latent, cfg=4.5, sampler_name="dpmpp_2m"
    )
    sampler = pipefusion_sampler_node(inputs | {"scheduler": "normal"})
    of_files = (
        "- `models/diffusion_models/PixArt-Sigma-XL-2-2K-MS.safetensors`: that repository's "
        "`transformer/diffusion_pytorch_model.safetensors`, renamed\n"
        "- `models/text_encoders/t5xxl_fp8_e4m3fn.safetensors`\n"
        "- `models/vae/sdxl_vae.safetensors`\n"
    )
    text = (
        "Made for **4 GPUs** with any link. The model is small, but 2048 x 2048 means 16,384 tokens.\n"
        "- **Other machines**: `pipefusion_degree` is the number of GPUs; 1 for one.\n"
        "- **Fast links**: `pipefusion_degree` 1 and a Ulysses Config with `ulysses_degree` 4: exact.\n"
        "- **In pairs**: `pipefusion_degree` 2 and `split_batch_degree` 2: two GPUs for each prompt.\n"
        "- 1024 x 1024: the model PixArt-Sigma-XL-2-1024-MS in the same way.\n"
    )
    first, of_prompt = (files_note((), text, more=of_files),), (positive, negative, latent)
    return image_graph(first, (loader, clip), of_prompt, (sampler,), vae, "pixart-2048", "encoder")


def krea_2() -> Graph:
    """Krea 2 turbo on two GPUs that hold half of it each, by PipeFusion Sampler."""
    loader = loader_node("krea2_turbo_fp8_scaled.safetensors", pipefusion_degree=2)
    clip, vae = clip_node("qwen3vl_4b_fp8_scaled.safetensors", "krea2"), vae_node("qwen_image_vae.safetensors")
    prompt = text_node(clip, LIGHTHOUSE)
    zero = zero_out_node(prompt)
    latent = latent_node(1024, 1024, node="EmptyLatentImage")
    inputs = sampling_inputs(loader["MODEL"], prompt["CONDITIONING"], zero["CONDITIONING"], latent, steps=8, cfg=1.0)
    sampler = pipefusion_sampler_node(inputs, num_pipeline_patch=2)
    files = (
        "diffusion_models/krea2_turbo_fp8_scaled.safetensors",
        "text_encoders/qwen3vl_4b_fp8_scaled.safetensors",
        "vae/qwen_image_vae.safetensors",
    )
    text = (
        "Made for **2 GPUs** of 12 GB with any link: each holds half of the 12 B model.\n"
        "- **2 GPUs with NVLink**: `pipefusion_degree` 1 and a Ulysses Config with `ulysses_degree` 2: exact.\n"
        "- **4 GPUs**: Ulysses 2 times `pipefusion_degree` 2.\n"
        "- **1 GPU**: `pipefusion_degree` 1.\n"
        "- The int8 file runs as well. `num_pipeline_patch` is 2 because eight steps are few.\n"
    )
    first, of_prompt = (files_note(files, text),), (prompt, zero, latent)
    return image_graph(first, (loader, clip), of_prompt, (sampler,), vae, "krea-2", "encoder")


def qwen_edit_2511() -> Graph:
    """Qwen-Image-Edit-2511 on two GPUs that hold half of it each: a sentence says how the image is changed."""
    loader = loader_node("qwen_image_edit_2511_fp8mixed.safetensors", pipefusion_degree=2)
    clip = clip_node("qwen_2.5_vl_7b_fp8_scaled.safetensors", "qwen_image")
    vae = vae_node("qwen_image_vae.safetensors")
    given = given_image_node()
    scaled = Node("FluxKontextImageScale", (320, 26), {"image": given["IMAGE"]}, (("IMAGE", "IMAGE"),))

    def encoded(text: str, title: str, height: int) -> tuple[Node, Node]:
        inputs = {"clip": clip["CLIP"], "prompt": text, "vae": vae["VAE"], "image1": scaled["IMAGE"]}
        inputs |= {"image2": Unconnected("IMAGE"), "image3": Unconnected("IMAGE")}
        encode = Node("TextEncodeQwenImageEditPlus", (320, height), inputs, (CONDITIONING,), title)
        at_zero = {"conditioning": encode["CONDITIONING"], "reference_latents_method": "index_timestep_zero"}
        return encode, Node("FluxKontextMultiReferenceLatentMethod", (320, 58), at_zero, (CONDITIONING,))

    positive, positive_at_zero = encoded("make it a watercolour painting", "What to change", 200)
    negative, negative_at_zero = encoded("", "Negative prompt", 200)
    given_latent = {"pixels": scaled["IMAGE"], "vae": vae["VAE"], "devices": "auto"}
    latent = Node("ParallelVAEEncode", (320, 78), given_latent, (LATENT,))
    apply = apply_pipefusion_node(loader["MODEL"])
    shifted = shift_node("ModelSamplingAuraFlow", apply["MODEL"], 3.1)
    inputs = sampling_inputs(
        shifted["MODEL"], positive_at_zero["CONDITIONING"], negative_at_zero["CONDITIONING"], latent, cfg=4.0
    )
    sampler = ksampler_node(inputs)
    files = (
        "diffusion_models/qwen_image_edit_2511_fp8mixed.safetensors",
        "text_encoders/qwen_2.5_vl_7b_fp8_scaled.safetensors",
        "vae/qwen_image_vae.safetensors",
    )
    text = (
        "Made for **2 GPUs** of 24 GB with any link: each holds half of the 20 B model, and 12 GB of keys "
        "and values that PipeFusion keeps of the new and the given image. `extrapolate` off halves these.\n"
        "- **2 GPUs of 16 GB with fast links**: `tensor_parallel_degree` 2, `pipefusion_degree` 1 and no Apply PipeFusion: "
        "exact, and nothing is kept.\n"
        "- **2 GPUs that hold all of it (24 GB)**: `split_batch_degree` 2, `pipefusion_degree` 1 and no Apply PipeFusion: "
        "exact.\n"
        "- **4 GPUs**: `split_batch_degree` 2 times `pipefusion_degree` 2.\n"
        "- **1 GPU**: `pipefusion_degree` 1.\n"
        "- Up to three images: image2 and image3 of the two prompts. A Lightning LoRA goes behind the loader.\n"
    )
    return Graph(
        (
            (files_note(files, text), Group("Image to change", ((given, scaled),))),
            (Group("Model and text encoder", ((loader, clip, vae),)),),
            (Group("Prompts", ((positive, positive_at_zero, negative, negative_at_zero),)),),
            (Group("Pipeline", ((apply, shifted),)), Group("Sampling", ((latent, sampler),))),
            (image_group(sampler["LATENT"], vae, "qwen-edit-2511", height=360),),
        )
    )


def _qwen_image_2_1(prompt: str, prefix: str, given: tuple[Node, ...], turns: str) -> Graph:
    """Qwen-Image 2.1 on two GPUs, each with all of it and half of the tokens. `given`: the image to change, if any."""
    config, model = ulysses_node(2), "qwen_image_2.1_int8_convrot.safetensors"
    loader, vae = loader_node(model, config), vae_node("qwen_image_2.1_vae_bf16.safetensors")
    clip = clip_node("qwen3vl_8b_int8_convrot.safetensors", "qwen_image")
    inputs = {"clip": clip["CLIP"], "prompt": prompt, "negative_prompt": "", "vae": vae["VAE"], "resolution": 1024}
    inputs["images.image_1"] = given[0]["IMAGE"] if given else Unconnected("IMAGE")
    outputs = ("positive", "CONDITIONING"), ("negative", "CONDITIONING"), ("latent", "LATENT")
    encode = Node("TextEncodeQwenImage21", (320, 300), inputs, outputs, "Prompt")
    prompts = encode["positive"], encode["negative"], encode["latent"]
    sampler = ksampler_node(sampling_inputs(loader["MODEL"], *prompts, steps=25, cfg=1.0))
    files = (
        f"diffusion_models/{model}",
        "text_encoders/qwen3vl_8b_int8_convrot.safetensors",
        "vae/qwen_image_2.1_vae_bf16.safetensors",
    )
    text = (
        "Needs **ComfyUI 0.37** or newer. Made for **2 GPUs** of 12 GB with NVLink or P2P: both hold all of the int8 file, "
        "and every step is exact.\n"
        "- **2 GPUs without P2P**: no Ulysses Config, `pipefusion_degree` 2 and Apply PipeFusion: close to exact.\n"
        "- **2 GPUs of 8 GB**: no Ulysses Config and `pipefusion_degree` 2: each holds half of the model, exact.\n"
        "- **4 GPUs**: `ulysses_degree` 4. **1 GPU**: no Ulysses Config.\n"
        f"{turns}"
        "- The turbo files have sigmas of their own: open ComfyUI's template for them, and choose *Run on several GPUs*.\n"
        "- The GPUs compute the text and given images once a run. Qwen Image 2.1 Cache is not needed.\n"
    )
    to_change = (Group("Image to change", (given,)),) if given else ()
    return Graph(
        (
            (files_note(files, text, 320), *to_change),
            (Group("Model", ((config, loader),)),),
            (Group("Text encoder and VAE", ((clip, vae),)), Group("Prompt and size", ((encode,),))),
            (Group("Sampling", ((sampler,),)),),
            (image_group(sampler["LATENT"], vae, prefix, height=360),),
        )
    )


def qwen_image_2_1() -> Graph:
    """Qwen-Image 2.1 makes an image from text."""
    return _qwen_image_2_1(LIGHTHOUSE, "qwen-image-2.1", (), "- `resolution` goes up to 2048.\n")


def qwen_image_2_1_edit() -> Graph:
    """Qwen-Image 2.1 changes an image as a sentence says."""
    given = given_image_node()
    turns = "- More images: image_2 and on, `<image2>` in the prompt. The new image has the shape of the first one.\n"
    return _qwen_image_2_1("make <image1> a watercolour painting", "qwen-image-2.1-edit", (given,), turns)
