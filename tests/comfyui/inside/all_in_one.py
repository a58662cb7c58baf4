"""Parallel Checkpoint Loader against Load Checkpoint on the same all-in-one files. Run by serve.py.

CLIP-L alone, narrower than ComfyUI's; all else is read from the file as ever.
"""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import psutil
from boot import BASE, Results, comfy, difference, ksampler, node, nodes, outputs_of, torch
from comfy.text_encoders import sd3_clip

FOLDER = BASE / "models" / "checkpoints"
SIZES = {"clip_l_model_config": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 1}}
TEXT = "a (tiny:1.2) picture"


class TinyTextEncoder(sd3_clip.SD3ClipModel):
    def __init__(self, device="cpu", dtype=None, model_options=None):
        super().__init__(clip_g=False, t5=False, device=device, dtype=dtype, model_options=(model_options or {}) | SIZES)


def clip_target(_config, state_dict=None):
    return comfy.supported_models_base.ClipTarget(sd3_clip.SD3Tokenizer, TinyTextEncoder)


def parallel(name: str, devices: str = "cpu,cpu", pipe: int = 2):
    """MODEL, CLIP and VAE."""
    return outputs_of("ParallelCheckpointLoader", name, "fp32", pipe, 1, 1, devices)


def resident(path: Path) -> int:
    """Bytes of the file that this process has in its memory."""
    return sum(found.rss for found in psutil.Process().memory_maps() if found.path == str(path))


def conditioning(clip):
    return clip.encode_from_tokens_scheduled(clip.tokenize(TEXT))


def main(results: Results) -> None:
    with patch.object(comfy.supported_models.SD3, "clip_target", clip_target):
        compare(results)


def compared(clip, vae, native_clip, native_vae) -> dict[str, object]:
    """Text and picture of both."""
    latent = torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(0))
    (ours, more), (theirs, pooled) = conditioning(clip)[0], conditioning(native_clip)[0]
    pictures = vae.decode(latent), native_vae.decode(latent)
    return {
        "text": difference(ours, theirs) + difference(more["pooled_output"], pooled["pooled_output"]),
        "picture": difference(*pictures),
        "spread": float(pictures[0].std()),
        "kinds": [type(clip.cond_stage_model) is type(native_clip.cond_stage_model), vae.latent_channels],
    }


def compare(results: Results) -> None:
    path = FOLDER / "tiny.safetensors"
    original, read = comfy.sd.load_state_dict_guess_config, []

    def watched(tensors, *arguments, **named):
        kept = dict(tensors)  # ComfyUI takes them out one by one, and the map goes with the last
        made = original(tensors, *arguments, **named)
        read.append(resident(path))
        del kept
        return made

    with patch.object(comfy.sd, "load_state_dict_guess_config", watched):
        model, clip, vae = parallel(path.name)
    results.case("bytes", lambda: {"read": read[0], "left": resident(path)})
    native, native_clip, native_vae = nodes.CheckpointLoaderSimple().load_checkpoint(path.name)
    results.case("tiny: CLIP and VAE", lambda: compared(clip, vae, native_clip, native_vae))
    _, *others = parallel("scaled.safetensors")
    _, *theirs, _ = comfy.sd.load_checkpoint_guess_config(str(FOLDER / "scaled.safetensors"), output_model=False)
    results.case("scaled: CLIP and VAE", lambda: compared(*others, *theirs))
    prompts = [conditioning(clip)] * 2

    def sampled() -> float:
        latent = torch.zeros(1, 16, 16, 16)
        return difference(ksampler(model, prompts, latent), ksampler(native, prompts, latent))

    results.case("model", sampled)
    loader = nodes.NODE_CLASS_MAPPINGS["ParallelDiTLoader"]

    def in_the_other_loader() -> bool:
        name = "checkpoints/tiny.safetensors"
        assert name in loader.INPUT_TYPES()["required"]["model_name"][0]
        found = node("ParallelDiTLoader", name, "fp32", 2, 1, 1, "cpu,cpu")
        setups = [replace(each.model.diffusion_model.setup, own_class=None) for each in (found, model)]
        return setups[0] == setups[1]  # what is proven of the class comes with the first run

    results.case("in Parallel DiT Loader", in_the_other_loader)
    for name in ("transformer", "vae"):
        results.case(f"{name} alone", lambda name=name: bool(parallel(f"{name}.safetensors")))
    results.case("not there", lambda: bool(parallel("nowhere.safetensors")))
