"""LTX-2 with its sound: 2.3 with all that a call may have, and 2.0 and 2.5, which have other layers."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers.loaders.single_file_utils import convert_ltx2_transformer_to_diffusers
from safetensors.torch import load_file, save_file

from parallel_backend.families.parts.ltx2_inputs import Times
from testing.cases.case import Case, Native

# Every LTX-2 has 32 heads; two channels to a head is the least that a rotary embedding fills.
LTX20 = {
    "in_channels": 128,
    "out_channels": 128,
    "num_attention_heads": 32,
    "attention_head_dim": 4,
    "cross_attention_dim": 128,
    "audio_in_channels": 128,
    "audio_out_channels": 128,
    "audio_num_attention_heads": 32,
    "audio_attention_head_dim": 2,
    "audio_cross_attention_dim": 64,
    "num_layers": 3,
    "caption_channels": 24,
    "use_prompt_embeddings": True,
    "rope_type": "split",
    "rope_double_precision": True,
    "cross_attn_timestep_scale_multiplier": 1.0,
}
LTX23 = LTX20 | {
    "caption_channels": 128,
    "use_prompt_embeddings": False,
    "cross_attn_timestep_scale_multiplier": 1000.0,
    **dict.fromkeys(("gated_attn", "audio_gated_attn", "cross_attn_mod", "audio_cross_attn_mod"), True),
}
LTX25 = LTX23 | {"ff_bias": False, "use_prompt_adaln_single": False, "use_keyframes_abs_pos_embedding": True}
HEADER = {
    "rope_type": "split",
    "frequencies_precision": "float64",
    "causal_temporal_positioning": True,
    "use_middle_indices_grid": True,
}
FRAME_RATE, SOUND, VOICE = 23.976, 11, 3


def guides(height: int, width: int, batch: int = 1) -> dict:
    """The inputs that ComfyUI's nodes make for guides at the video's 18th and 31st frame, with strengths below 1. The second
    guide covers a part of the picture, since it has half the size."""
    tokens = torch.cartesian_prod(torch.tensor([17, 30]), torch.arange(height) * 32, torch.arange(width) * 32)
    places = torch.stack((tokens, tokens + torch.tensor([1, 32, 32])), dim=-1).transpose(0, 1)[None]
    entry = {"pre_filter_count": height * width, "pixel_mask": None, "latent_shape": [1, height, width]}
    return {
        "keyframe_idxs": places.expand(batch, -1, -1, -1),
        "guide_attention_entries": [entry | {"strength": 0.6}, entry | {"strength": 0.8}],
    }


def masks(frames: int, height: int, width: int) -> torch.Tensor:
    """[1, 1, T, H, W]: ComfyUI's denoise mask: a fixed first frame, and the guides behind the video."""
    mask = torch.ones(1, 1, frames, height, width)
    mask[:, :, 0], mask[:, :, -2], mask[:, :, -1] = 0.0, 0.4, -1.8
    mask[:, :, -1, ::2, ::2] = 0.2
    mask[:, :, 1, 0] = 0.5
    return mask


@dataclass(frozen=True)
class WithSound(Case):
    def inputs(self, batch=2, latent=None, seed=1):
        video, timestep, _ = super().inputs(batch, latent, seed)
        sound = torch.randn(batch, 8, SOUND, 16, generator=torch.Generator().manual_seed(seed + 1))
        times = torch.cat((masks(*video.shape[2:]).flatten(1), torch.linspace(0.3, 1, SOUND).round(decimals=1)[None]), dim=1)
        extras = guides(*video.shape[3:], batch) | {"denoise_mask": masks(*video.shape[2:]), "grid": tuple(video.shape[2:])}
        tensors = self.tensors(torch.Generator().manual_seed(seed), batch, extras)
        return (video, sound), timestep[:, None] * times, tensors

    def save(self, model, path: Path, config=None) -> Path:
        """With the header that Lightricks' files have, and for ComfyUI (`config`) with the connectors."""
        state = load_file(super().save(model, path, config))
        save_file(state if config is None else state | _connectors(model.config), path, metadata(model.config))
        return path


def _connector_widths(config) -> tuple[int, int]:
    """Channels of the connectors for the video and for the sound."""
    if config["use_prompt_embeddings"]:
        return config["caption_channels"], config["caption_channels"]
    return config["cross_attention_dim"], config["audio_cross_attention_dim"]


def _heads(config) -> int:
    return 6 if config["use_prompt_embeddings"] else 32


def metadata(config) -> dict[str, str]:
    width, audio_width = _connector_widths(config)
    said = HEADER | {
        "audio_cross_attention_dim": config["audio_cross_attention_dim"],
        "audio_attention_head_dim": config["audio_attention_head_dim"],
        "caption_channels": config["caption_channels"],
        "av_ca_timestep_scale_multiplier": config["cross_attn_timestep_scale_multiplier"],
        "apply_gated_attention": config["gated_attn"],
        "cross_attention_adaln": config["cross_attn_mod"],
        "use_prompt_adaln_single": config["use_prompt_adaln_single"],
        "caption_proj_before_connector": not config["use_prompt_embeddings"],
        "caption_projection_first_linear": config["use_prompt_embeddings"],
        "ff_bias": config["ff_bias"],
        "connector_num_attention_heads": _heads(config),
        "connector_attention_head_dim": width // _heads(config),
        "audio_connector_attention_head_dim": audio_width // _heads(config),
        "connector_apply_gated_attention": config["gated_attn"],
        "connector_num_layers": 2,
    }
    return {"config": json.dumps({"transformer": said})}


def _connectors(config) -> dict[str, torch.Tensor]:
    generator, state = torch.Generator().manual_seed(8), {}
    for stream, width in zip(("video", "audio"), _connector_widths(config), strict=True):
        prefix = f"{stream}_embeddings_connector."
        state[f"{prefix}learnable_registers"] = torch.randn(128, width, generator=generator)
        sizes = {f"attn1.to_{part}": (width, width) for part in ("q", "k", "v", "out.0")}
        sizes |= {"ff.net.0.proj": (4 * width, width), "ff.net.2": (width, 4 * width)}
        sizes |= {"attn1.to_gate_logits": (_heads(config), width)} if config["gated_attn"] else {}
        for index in range(2):
            block = f"{prefix}transformer_1d_blocks.{index}."
            for layer, (rows, columns) in sizes.items():
                state[f"{block}{layer}.weight"] = torch.randn(rows, columns, generator=generator) / columns**0.5
                state[f"{block}{layer}.bias"] = torch.randn(rows, generator=generator) / 3
            for norm in ("attn1.q_norm", "attn1.k_norm"):
                state[f"{block}{norm}.weight"] = 1 + torch.randn(width, generator=generator) / 3
    return state


def _of(config):
    def tensors(generator, batch, extras=None):
        row = CASES[0].row
        width = sum(_connector_widths(config))
        call = {
            "context": torch.randn(batch, 7, width, generator=generator),
            "frame_rate": FRAME_RATE,
            "ref_audio": {"tokens": torch.randn(1, VOICE, 128, generator=generator)},
        }
        return row.inputs.conditioning(config, call | (extras or {}))

    return tensors


def _reference(model, latents, timestep, tensors):
    """The class called on whole latents, with a time for each token, and positions as diffusers makes them."""
    video, sound = latents
    batch, (frames, height, width), voice = len(video), video.shape[2:], tensors["voice"]
    places = model.rope.prepare_video_coords(batch, frames, height, width, "cpu", fps=1.0)
    first = places.shape[2] - tensors["keyframes"].shape[2]
    places[:, :, first:] = tensors["keyframes"].float()
    places[:, 0] *= tensors["seconds"][:, None, None]
    heard = model.audio_rope.prepare_audio_coords(batch, SOUND, "cpu")
    before = model.audio_rope.prepare_audio_coords(batch, VOICE, "cpu")
    before = before - (before.max().item() + 0.04)
    kept = torch.ones(batch, places.shape[2], 1, dtype=torch.bool)
    kept[:, first:, 0] = ~tensors["left_out"]
    weights = torch.zeros(batch, places.shape[2], 2)
    weights[:, first:] = torch.stack((tensors["guide_weights"], torch.ones_like(tensors["guide_weights"])), dim=-1)
    times = timestep.reshape(batch, -1)
    if times.shape[1] == 1:
        times = times.expand(-1, places.shape[2] + SOUND)
    times = 1000 * torch.cat((times, torch.zeros(batch, VOICE)), dim=1)
    blocks = model.config.num_layers if "perturbed" in tensors else 0
    out, of_sound = model(
        hidden_states=video.flatten(2).transpose(1, 2),
        audio_hidden_states=torch.cat((sound.transpose(1, 2).flatten(2), voice), dim=1),
        encoder_hidden_states=tensors["context"],
        audio_encoder_hidden_states=tensors["sound_context"],
        times=_times(times[:, : places.shape[2]].masked_fill(~kept[..., 0], 0.0)),
        audio_times=_times(times[:, places.shape[2] :]),
        video_coords=places.mean(-1),
        audio_coords=torch.cat((heard, before), dim=2).mean(-1),
        marked=(torch.arange(places.shape[2]) < height * width)[:, None]
        if model.config.use_keyframes_abs_pos_embedding
        else None,
        guide_weights=weights,
        seen=kept,
        voice_tokens=VOICE,
        perturbed=frozenset(range(blocks)),
    )
    return out.transpose(1, 2).unflatten(2, video.shape[2:]), of_sound.unflatten(2, (8, 16)).transpose(1, 2)


def _times(times):
    return Times(times.flatten(), torch.arange(times.numel()).view(times.shape), times.amax(1))


def native(config) -> Native:
    """ComfyUI 0.33 itself fails where the prompt is modulated by a table alone, as in 2.5."""
    width = config["caption_channels"] if config["use_prompt_embeddings"] else sum(_connector_widths(config))

    def conditioning(generator):
        extras = {"unprocessed_ltxav_embeds": True, "frame_rate": FRAME_RATE}
        return torch.randn(1, 7, width, generator=generator), extras

    return Native(config | {"use_prompt_adaln_single": True}, conditioning, (128, 6, 4, 4), companion=(8, SOUND, 16))


def _case(name, config, **others):
    return WithSound(
        name=name,
        family="ltx-2",
        config=config,
        latent=(128, 6, 4, 3),
        odd=(128, 5, 3, 5),
        tensors=_of(config),
        reference=_reference,
        native=native(config),
        **others,
    )


CASES = (
    _case("ltx-2.3", LTX23),
    _case("ltx-2", LTX20, convert=convert_ltx2_transformer_to_diffusers, full=True),
    _case("ltx-2.5", LTX25, full=True),
)
