"""Workflows that make videos, some with audio, with models whose files users bring."""

from scripts.workflow_form import Graph, Group, Link, Node, Unconnected

from .nodes import (
    LATENT,
    MODEL,
    apply_pipefusion_node,
    checkpoint_node,
    clip_node,
    custom_sampling_nodes,
    files_note,
    given_image_node,
    guider_node,
    ksampler_node,
    loader_node,
    sampling_inputs,
    scheduler_node,
    shift_node,
    text_node,
    ulysses_node,
    vae_node,
)

TRAM = "a red tram comes around a corner in the rain, its bell rings, people step back, handheld camera"
SHIFT = 5.0
WAN_VAE, WAN_TEXT = "wan_2.1_vae.safetensors", "umt5_xxl_fp8_e4m3fn_scaled.safetensors"
ANIMATE, VISION = "wan_animate_2_distill_int8_convrot.safetensors", "clip_vision_h.safetensors"
LTX, LTX_TEXT = "ltx-2.3-22b-distilled-fp8.safetensors", "gemma_3_12B_it_fp4_mixed.safetensors"
H3, H3_TEXT = "minimax_h3_fl2va_pruned_int8_convrot.safetensors", "qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors"
FASTH3 = "fastvideo_fasth3_8step_v2_pruned_int8_convrot.safetensors"
H3_VAES = ("minimax_h3_video_vae_fp16.safetensors", "minimax_h3_audio_vae_fp32.safetensors")


def _video(images: Link, audio: Link | None, fps: float, prefix: str) -> tuple[Node, Node]:
    inputs = {"images": images, "fps": fps, "audio": audio or Unconnected("AUDIO"), "bit_depth": 8}
    video = Node("CreateVideo", (320, 102), inputs, (("VIDEO", "VIDEO"),))
    saved = {"video": video["VIDEO"], "filename_prefix": f"video/{prefix}", "format": "auto", "codec": "auto"}
    return video, Node("SaveVideo", (400, 106), saved, (("video", "VIDEO"),))


def wan_2_2() -> Graph:
    """Wan 2.2 14B on two GPUs, one for each prompt: the expert of the first steps, then that of the last."""
    clip, vae = clip_node(WAN_TEXT, "wan"), vae_node(WAN_VAE)
    positive, negative = text_node(clip, TRAM), text_node(clip, "blurry, static, low quality", "Negative prompt", 88)
    sizes = {"width": 640, "height": 640, "length": 81, "batch_size": 1}
    latent = Node("EmptyHunyuanLatentVideo", (320, 130), sizes, (LATENT,))
    loaders, shifts, samplers = [], [], []
    samples = latent["LATENT"]
    for noise, first, last in (("high", 0, 10), ("low", 10, 10000)):
        loader = loader_node(f"wan2.2_t2v_{noise}_noise_14B_fp8_scaled.safetensors", split_batch_degree=2)
        shifted = shift_node("ModelSamplingSD3", loader["MODEL"], SHIFT)
        inputs = {
            "model": shifted["MODEL"],
            "add_noise": "enable" if first == 0 else "disable",
            "noise_seed": 42,
            "steps": 20,
            "cfg": 3.5,
            "sampler_name": "euler",
            "scheduler": "simple",
            "positive": positive["CONDITIONING"],
            "negative": negative["CONDITIONING"],
            "latent_image": samples,
            "start_at_step": first,
            "end_at_step": last,
            "return_with_leftover_noise": "enable" if first == 0 else "disable",
        }
        sampler = Node("KSamplerAdvanced", (320, 334), inputs, (LATENT,), f"KSampler ({noise} noise)")
        samples = sampler["LATENT"]
        loaders.append(loader)
        shifts.append(shifted)
        samplers.append(sampler)
    decode = Node("VAEDecode", (320, 46), {"samples": samples, "vae": vae["VAE"]}, (("IMAGE", "IMAGE"),))
    files = (
        "diffusion_models/wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors",
        "diffusion_models/wan2.2_t2v_low_noise_14B_fp8_scaled.safetensors",
        f"text_encoders/{WAN_TEXT}",
        f"vae/{WAN_VAE}",
    )
    text = (
        "Made for **2 GPUs** of any link, 24 GB each: each holds an expert, one runs the prompt, the other the negative "
        "prompt. Exact, and next to nothing moves between them.\n"
        "- Both experts stay loaded: weights that do not fit on a GPU wait in host memory, and no file is read twice.\n"
        "- **4 GPUs**: also a Ulysses Config with `ulysses_degree` 2 (fast links) or `ring_degree` 2 on both loaders.\n"
        "- **1 GPU**: `split_batch_degree` 1 on both.\n"
        "- PipeFusion keeps keys and values of the whole video: 27 GB on each of 4 GPUs at this size. Use it for short or "
        "small videos.\n"
        "- It needs `cfg` above 1. With a LoRA of 4 steps behind each loader `cfg` is 1: then take Ulysses or ring.\n"
    )
    return Graph(
        (
            (files_note(files, text), Group("Text encoder and VAE", ((clip, vae),))),
            (Group("The two experts", (tuple(loaders),)),),
            (Group("Prompt and size", ((positive, negative, latent),)), Group("Shift", (tuple(shifts),))),
            (Group("Sampling", (tuple(samplers),)),),
            (Group("Video", ((decode, *_video(decode["IMAGE"], None, 16.0, "wan-2.2")),)),),
        )
    )


def wan_animate_2() -> Graph:
    """Wan Animate 2, distilled, on two GPUs that share the tokens: a character that moves as in a video."""
    config = ulysses_node(2)
    loader = loader_node(ANIMATE, config)
    clip, vae = clip_node(WAN_TEXT, "wan"), vae_node(WAN_VAE)
    vision = Node("CLIPVisionLoader", (320, 58), {"clip_name": VISION}, (("CLIP_VISION", "CLIP_VISION"),))
    character = given_image_node()
    video = Node("LoadVideo", (320, 314), {"file": "example.mp4"}, (("VIDEO", "VIDEO"),))
    parts = (("images", "IMAGE"), ("audio", "AUDIO"), ("fps", "FLOAT"))
    moves = Node("GetVideoComponents", (320, 106), {"video": video["VIDEO"]}, parts)
    first = {"image": moves["images"], "batch_index": 0, "length": 1}
    first_frame = Node("ImageFromBatch", (320, 82), first, (("IMAGE", "IMAGE"),), "First frame")
    seen = [
        Node(
            "CLIPVisionEncode",
            (320, 78),
            {"clip_vision": vision["CLIP_VISION"], "image": image, "crop": "none"},
            (("CLIP_VISION_OUTPUT", "CLIP_VISION_OUTPUT"),),
        )
        for image in (character["IMAGE"], first_frame["IMAGE"])
    ]
    looks = "a woman with short red hair in a green coat, in an empty white room"
    positive, motion = (
        text_node(clip, looks, "Character and background", 100),
        text_node(clip, "a person dances", "Motion", 88),
    )
    negative = text_node(clip, "blurry, static, low quality", "Negative prompt", 88)
    asked = {
        "positive": positive["CONDITIONING"],
        "negative": negative["CONDITIONING"],
        "vae": vae["VAE"],
        "width": 480,
        "height": 832,
        "length": 81,
        "batch_size": 1,
        "reference_image": character["IMAGE"],
        "pose_video": moves["images"],
        "clip_vision_output": seen[0]["CLIP_VISION_OUTPUT"],
        "positive_pose": motion["CONDITIONING"],
        "clip_vision_output_pose": seen[1]["CLIP_VISION_OUTPUT"],
        "continue_motion": Unconnected("IMAGE"),
        "video_frame_offset": 0,
        "pose_strength": 1.0,
        "pose_start_percent": 0.0,
        "pose_end_percent": 1.0,
        "reference_image_strength": 1.0,
    }
    outputs = (("positive", "CONDITIONING"), ("negative", "CONDITIONING"), ("latent", "LATENT"), ("trim_latent", "INT"))
    animate = Node("WanAnimate2ToVideo", (320, 410), asked, outputs)
    shifted = shift_node("ModelSamplingSD3", loader["MODEL"], SHIFT)
    inputs = sampling_inputs(
        shifted["MODEL"],
        animate["positive"],
        animate["negative"],
        animate["latent"],
        steps=10,
        cfg=1.0,
        sampler_name="lcm",
    )
    sampler = ksampler_node(inputs)
    cut = {"samples": sampler["LATENT"], "trim_amount": animate["trim_latent"]}
    trimmed = Node("TrimVideoLatent", (320, 58), cut, (LATENT,))
    decode = Node("VAEDecode", (320, 46), {"samples": trimmed["LATENT"], "vae": vae["VAE"]}, (("IMAGE", "IMAGE"),))
    files = (f"diffusion_models/{ANIMATE}", f"text_encoders/{WAN_TEXT}", f"clip_vision/{VISION}", f"vae/{WAN_VAE}")
    text = (
        "Also needs an image of a character, and a video of a movement with the same framing.\n\n"
        "Made for **2 GPUs** of 24 GB with NVLink or P2P: both hold the whole int8 file. Exact.\n"
        "- **2 GPUs without P2P**: `ulysses_degree` 1 and `ring_degree` 2.\n"
        "- **2 GPUs of 12 GB**: no Ulysses Config and `tensor_parallel_degree` 2: each holds half of the model. Exact.\n"
        "- **4 GPUs**: `ulysses_degree` 4. **1 GPU**: no Ulysses Config.\n"
        "- WanAnimate2Cache changes nothing here: the GPUs compute the pose at every step.\n"
    )
    shown = (trimmed, decode, *_video(decode["IMAGE"], moves["audio"], 16.0, "wan-animate-2"))
    return Graph(
        (
            (files_note(files, text),),
            (Group("GPUs that share the video", ((config,),)), Group("Model", ((loader,),))),
            (Group("Text encoder, image encoder, VAE", ((clip, vision, vae),)), Group("Character", ((character,),))),
            (Group("Movement", ((video, moves, first_frame),)), Group("Image encoder", (tuple(seen),))),
            (Group("Prompts", ((positive, motion, negative),)), Group("Size", ((animate,),))),
            (Group("Sampling", ((shifted, sampler),)), Group("Video", (shown,))),
        )
    )


def ltx_2_3() -> Graph:
    """LTX-2.3, video with audio from an all-in-one file, on two GPUs that hold half of it each."""
    loader = checkpoint_node(LTX, pipefusion_degree=2)
    clip = Node(
        "LTXAVTextEncoderLoader",
        (340, 106),
        {"text_encoder": LTX_TEXT, "ckpt_name": LTX, "device": "default"},
        (("CLIP", "CLIP"),),
    )
    audio_vae = Node("LTXVAudioVAELoader", (340, 58), {"ckpt_name": LTX}, (("Audio VAE", "VAE"),))
    positive, negative = text_node(clip, TRAM), text_node(clip, "blurry, cartoon, childish", "Negative prompt", 88)
    rate = {"positive": positive["CONDITIONING"], "negative": negative["CONDITIONING"], "frame_rate": 25.0}
    timed = Node("LTXVConditioning", (320, 78), rate, (("positive", "CONDITIONING"), ("negative", "CONDITIONING")))
    sizes = {"width": 960, "height": 544, "length": 121, "batch_size": 1}
    video = Node("EmptyLTXVLatentVideo", (320, 130), sizes, (LATENT,))
    sound = {"frames_number": 121, "frame_rate": 25.0, "batch_size": 1, "audio_vae": audio_vae["Audio VAE"]}
    audio = Node("LTXVEmptyLatentAudio", (320, 106), sound, (("Latent", "LATENT"),))
    both = {"video_latent": video["LATENT"], "audio_latent": audio["Latent"]}
    latent = Node("LTXVConcatAVLatent", (320, 46), both, (("latent", "LATENT"),))
    apply = apply_pipefusion_node(loader["MODEL"])
    guided = {"model": apply["MODEL"], "positive": timed["positive"], "negative": timed["negative"], "cfg": 1.0}
    guider = Node("CFGGuider", (320, 98), guided, (("GUIDER", "GUIDER"),))
    sigmas = "1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0"
    manual = Node("ManualSigmas", (320, 58), {"sigmas": sigmas}, (("SIGMAS", "SIGMAS"),))
    sampling = custom_sampling_nodes(guider, latent["latent"], "euler", manual)
    parts = (("video_latent", "LATENT"), ("audio_latent", "LATENT"))
    apart = Node("LTXVSeparateAVLatent", (320, 46), {"av_latent": sampling[-1]["output"]}, parts)
    tiles = {"tile_size": 768, "overlap": 64, "temporal_size": 4096, "temporal_overlap": 4}
    decode = Node(
        "VAEDecodeTiled",
        (320, 150),
        {"samples": apart["video_latent"], "vae": loader["VAE"]} | tiles,
        (("IMAGE", "IMAGE"),),
    )
    heard = {"samples": apart["audio_latent"], "audio_vae": audio_vae["Audio VAE"]}
    decode_audio = Node("LTXVAudioVAEDecode", (320, 46), heard, (("Audio", "AUDIO"),))
    text = (
        "Made for **2 GPUs** of 24 GB with any link: each holds half of the 22 B model. The text encoder and the "
        "VAEs are ComfyUI's.\n"
        "- **2 GPUs with NVLink**: `pipefusion_degree` 1 and a Ulysses Config with `ulysses_degree` 2, no Apply "
        "PipeFusion: exact.\n"
        "- **4 GPUs**: Ulysses 2 times `pipefusion_degree` 2.\n"
        "- **1 GPU**: `pipefusion_degree` 1.\n"
        "- The dev file wants 20 steps, `cfg` above 1 and LTXVScheduler, or its distilled LoRA behind the loader.\n"
        "- PipeFusion keeps keys and values of the whole video: 6 GB on each GPU at this size, 11 GB at 1280 x 704.\n"
        "- Audio is computed with the first patch of the pipeline.\n"
    )
    files = (f"checkpoints/{LTX}", f"text_encoders/{LTX_TEXT}")
    shown = (decode, decode_audio, *_video(decode["IMAGE"], decode_audio["Audio"], 25.0, "ltx-2.3"))
    return Graph(
        (
            (files_note(files, text),),
            (Group("Model, text encoder, audio VAE", ((loader, clip, audio_vae),)),),
            (Group("Prompt", ((positive, negative, timed),)), Group("Size", ((video, audio, latent),))),
            (Group("Pipeline", ((apply,),)), Group("Sampling", ((*sampling, apart),))),
            (Group("Video with audio", (shown,)),),
        )
    )


def _minimax_h3(loading: tuple[Node, ...], patching: tuple[Node, ...], steps: int, prefix: str, note: str) -> Graph:
    """Video with audio from text. `loading`: nodes up to the loader; `patching`: those behind it on its MODEL."""
    loader, last = loading[-1], patching[-1]
    model = last[last.outputs[0][0]]
    clip, (vae, audio_vae) = clip_node(H3_TEXT, "minimax"), (vae_node(name) for name in H3_VAES)
    asked = {
        "clip": clip["CLIP"],
        "vae": vae["VAE"],
        "prompt": TRAM,
        "width": 864,
        "height": 480,
        "length": 124,
        "first_frame": Unconnected("IMAGE"),
        "last_frame": Unconnected("IMAGE"),
    }
    prompt = Node("MiniMaxH3ImageToVideo", (320, 280), asked, (("positive", "CONDITIONING"), LATENT))
    guider, sigmas = guider_node(model, prompt["positive"]), scheduler_node(model, steps)
    sampling = custom_sampling_nodes(guider, prompt["LATENT"], "res_multistep", sigmas)
    samples = sampling[-1]["output"]
    decode = Node("VAEDecode", (320, 46), {"samples": samples, "vae": vae["VAE"]}, (("IMAGE", "IMAGE"),))
    heard = {"samples": samples, "vae": audio_vae["VAE"]}
    decode_audio = Node("VAEDecodeAudio", (320, 46), heard, (("AUDIO", "AUDIO"),))
    files = (
        f"diffusion_models/{loader.inputs['model_name']}",
        f"text_encoders/{H3_TEXT}",
        *(f"vae/{name}" for name in H3_VAES),
    )
    shown = (decode, decode_audio, *_video(decode["IMAGE"], decode_audio["AUDIO"], 24.0, prefix))
    return Graph(
        (
            (files_note(files, note, 420),),
            (Group("Model and text encoder", ((*loading, clip),)), Group("VAEs", ((vae, audio_vae),))),
            (Group("Prompt and size", ((prompt,),)), Group("Behind the loader", (patching,))),
            (Group("Sampling", (sampling,)),),
            (Group("Video with audio", (shown,)),),
        )
    )


def minimax_h3() -> Graph:
    """MiniMax H3, video with audio from text, on four GPUs, a pipeline of four."""
    loader = loader_node(H3, pipefusion_degree=4)
    note = (
        "Made for **4 GPUs** of 24 GB with any link: each holds a quarter of the 19 B model, and 9 GB of keys and "
        "values that PipeFusion keeps.\n"
        "- **2 GPUs of 24 GB**: `pipefusion_degree` 1, a Ulysses Config with `ulysses_degree` 2 (fast links) or "
        "`ring_degree` 2, no Apply PipeFusion: exact.\n"
        "- **2 GPUs of 32 GB**: `pipefusion_degree` 2.\n"
        "- **1 GPU**: `pipefusion_degree` 1.\n"
        "- `split_batch_degree` does nothing here: there is no negative prompt.\n"
        "- An image for the first or the last frame: `first_frame`, `last_frame`. A LoRA of 4 or 8 steps goes behind the "
        "loader.\n"
        "- Audio is computed with the first patch of the pipeline.\n"
    )
    return _minimax_h3((loader,), (apply_pipefusion_node(loader["MODEL"]),), 20, "minimax-h3", note)


def fasth3() -> Graph:
    """FastH3, MiniMax H3 in eight steps with sparse attention, on two GPUs that share the tokens."""
    config = ulysses_node(2)
    loader = loader_node(FASTH3, config)
    shift = {"model": loader["MODEL"], "shift_video": 10.0, "shift_audio": 3.0}
    shifted = Node("MiniMaxH3SigmaShift", (320, 82), shift, (MODEL,))
    looked_at = {"selection": "vsa", "selection.keep_percent": 10.0, "start_percent": 0.2, "end_percent": 1.0}
    where = {"dense_blocks": "", "min_tokens": 12288, "extra_tokens": 256, "sink_conditioning": "exact_kv_and_rows"}
    inputs = {"model": shifted["MODEL"]} | looked_at | where | {"verbose": False}
    sparse = Node("BlockSparseAttention", (320, 250), inputs, (("model", "MODEL"),))
    note = (
        "Needs **ComfyUI 0.38** or newer, and comfy-kitchen 0.2.40. Made for **2 GPUs** of 24 GB with NVLink or P2P: both "
        "hold all of the int8 file, and each attends for half of the heads.\n"
        "- **4 GPUs**: `ulysses_degree` 4.\n"
        "- **2 GPUs of 16 GB**: `ulysses_degree` 1 and `tensor_parallel_degree` 2: each holds half of the model.\n"
        "- **2 GPUs without P2P**: `ulysses_degree` 1, `pipefusion_degree` 2 and Apply PipeFusion, without Model Sparse "
        "Attention: under PipeFusion attention is in full.\n"
        "- **1 GPU**: no Ulysses Config.\n"
        "- Sparse attention gains more the more tokens there are: 1344 x 768 wants 32 GB, or `tensor_parallel_degree` 2. "
        "Fewer tokens than `min_tokens` are attended to in full.\n"
        "- An image for the first or the last frame: `first_frame`, `last_frame`.\n"
    )
    return _minimax_h3((config, loader), (shifted, sparse), 8, "fasth3", note)
