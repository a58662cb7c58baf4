"""MiniMax H3: a video with its sound, keyframes, references and masks; with a time embedding, and pruned."""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from diffusers import MiniMaxH3Transformer3DModel
from einops import rearrange
from safetensors.torch import load_file, save_file

from parallel_backend.families.base.step_inputs import REFERENCE_POSITIONS, REFERENCES
from parallel_backend.families.parts.minimax_layout import frame_sides, sound_places, video_places
from testing.cases.case import Case, Native

CONFIG = {
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "hidden_size": 40,
    "num_layers": 3,
    "num_refiner_layers": 2,
    "ffn_dim": 48,
    "in_channels": 24,
    "audio_in_channels": 32,
    "patch_size": (1, 2, 2),
    "text_dim": 24,
    "freq_dim": 16,
    "time_embed_hidden_dim": 20,
    "time_embed_dim": 12,
    "rope_freq_dim": 2,
    "adaln_curve_grid": None,
}
CURVE = CONFIG | {"freq_dim": 256, "time_embed_hidden_dim": 5376, "adaln_curve_grid": 513}
GRID, SOUND = (3, 3, 2), 15
_LATENT, _TOKENS = "b c t (h p) (w q)", "b (t h w) (c p q)"
_ROWS = f"{_LATENT} -> {_TOKENS}"


@dataclass(frozen=True)
class WithSound(Case):
    def inputs(self, batch=2, latent=None, seed=1):
        generator = torch.Generator().manual_seed(seed)
        video = torch.randn(batch, *(latent or self.latent), generator=generator)
        sound = torch.randn(batch, 32, 2, SOUND, generator=generator)
        tensors = _tensors(generator, batch, self.row.patching.grid(video.shape))
        return (video, sound), torch.full((batch,), self.timestep), tensors

    def save(self, model, path, config=None):
        super().save(model, path, config)
        count = model.config.rope_freq_dim
        save_file(load_file(path) | {"rope.inv_freq": 10000.0 ** -(torch.arange(count) / count)}, path)
        return path


@dataclass(frozen=True)
class Pruned(WithSound):
    """Its table is the plain model's activated embedding, so that diffusers' class, which has no table, is its reference."""

    def model(self, config=None):
        model, plain = super().model(config), CASES[0].model()
        model.load_state_dict(
            {name: value for name, value in plain.state_dict().items() if "time_embedder" not in name}, False
        )
        grid = torch.linspace(0, 1, len(model.adaln_t_table))
        with torch.no_grad():
            model.adaln_t_table.copy_(F.silu(plain.time_embedder(plain.time_proj(grid))))
        return model


def payload(generator, grid):
    """The inputs that ComfyUI's nodes make: a keyframe with sound, references of every kind, picture tokens in the text."""

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    _, rows, columns = grid
    refs = [
        {"kind": "image", "latent_h": 4, "latent_w": 2, "latent": randn(1, 24, 1, 4, 2)},
        {"kind": "video_audio", "latent_t": 2, "latent_h": 2, "latent_w": 4, "latent": randn(1, 24, 2, 2, 4)},
        {"kind": "audio", "ref_audio_t": 2, "audio_latent": randn(1, 32, 2, 2)},
    ]
    refs[1] |= {"ref_audio_t": 3, "audio_latent": randn(1, 32, 2, 3)}
    keyframe = {"latent": randn(1, 24, 1, 2 * rows, 2 * columns), "audio_latent": randn(1, 32, 2, 4)}
    return {
        "keyframes": [keyframe | {"resolved_frame_index": 5}],
        "refs": refs,
        "text_token_tags": torch.tensor([[1, 1, 0, 0, 0, 1, 1]]),
        "seed": 3,
    }


def _adjust(model):
    """Norms around 1, and times that show."""
    for name, parameter in model.named_parameters():
        if name.endswith(("norm1.weight", "norm2.weight", "final_norm.weight")):
            parameter.data += 1
        elif name.startswith("time_embedder"):
            parameter.data *= 2


def _tensors(generator, batch, grid=GRID):
    mask = (torch.rand(1, 1, *grid, generator=generator) * 4).round() / 4
    entry = {
        "context": torch.randn(batch, 7, CONFIG["text_dim"], generator=generator),
        "minimax_payload": payload(generator, grid),
        "denoise_mask": mask.repeat_interleave(2, -1).repeat_interleave(2, -2),
        "audio_denoise_mask": (torch.rand(1, 1, 2, SOUND, generator=generator) * 3).round() / 3,
        "grid": grid,
        "companion_tokens": 2 * SOUND,
    }
    return CASES[0].row.inputs.conditioning(CONFIG, entry)


@functools.cache
def _plain():
    return CASES[0].model()


def _reference(model, latents, timestep, tensors):
    return reference(model, latents, timestep, tensors, {})


def reference(model, latents, timestep, tensors, added):
    """diffusers' class with one packed sequence: text, references, sound, video.

    `added`: block -> [batch, tokens of the sequence, width] that a control adds behind it."""
    config = {name: value for name, value in CONFIG.items() if name != "adaln_curve_grid"}
    published = MiniMaxH3Transformer3DModel(**config).eval()
    weights = {f"time_embedder.{name}": value for name, value in _plain().time_embedder.state_dict().items()}
    weights |= {name: value for name, value in model.state_dict().items() if name != "adaln_t_table"}
    published.load_state_dict(weights)
    for index, more in added.items():
        published.transformer_blocks[index].register_forward_hook(lambda _block, _args, out, more=more: out + more)
    video, sound = latents
    height, width = video.shape[-2:]
    video = F.pad(video, (0, width % 2, 0, height % 2, 0, 0), mode="circular")
    grid = (video.shape[2], video.shape[3] // 2, video.shape[4] // 2)
    rows, sounds = rearrange(video, _ROWS, p=2, q=2), rearrange(sound, "b c s t -> b (s t) c")
    heard, references = tensors["reference_sound"][0].bool(), tensors[REFERENCES]
    words, begin = tensors["context"].shape[1], float(tensors["begins"][0, 0]) / 3
    parts = [  # (places, kinds, levels) of the text, references, sound and video
        (F.pad(torch.arange(words)[:, None], (0, 2)), tensors["text_kinds"][0], torch.zeros(words)),
        (tensors[REFERENCE_POSITIONS][0], 2 * heard, 2 + heard),
        (
            sound_places(begin, sound.shape[-1], frame_sides(*grid[1:])[1]),
            torch.full((sounds.shape[1],), 2),
            tensors["sound_levels"][0],
        ),
        (video_places(begin, grid), torch.zeros(rows.shape[1]), tensors["video_levels"][0]),
    ]
    places, kinds, levels = (torch.cat([part.float() for part in each]) for each in zip(*parts, strict=True))
    starts = torch.tensor([0, words, words + len(heard), words + len(heard) + sounds.shape[1]])
    out = published(
        hidden_states=torch.cat((references[:, ~heard], rows), dim=1),
        audio_hidden_states=torch.cat((references[:, heard, :32], sounds), dim=1),
        encoder_hidden_states=tensors["context"],
        timestep=_times(timestep, tensors["levels"][0]),
        timestep_indices=levels.long(),
        token_tags=kinds.long(),
        position_ids=places,
        video_indices=torch.cat((starts[1] + (~heard).nonzero()[:, 0], starts[3] + torch.arange(rows.shape[1]))),
        audio_indices=torch.cat((starts[1] + heard.nonzero()[:, 0], starts[2] + torch.arange(sounds.shape[1]))),
        text_indices=torch.arange(words),
        return_dict=False,
    )
    video = rearrange(-out[0][:, -rows.shape[1] :], f"{_TOKENS} -> {_LATENT}", p=2, q=2, t=grid[0], h=grid[1])
    sound = rearrange(-out[1][:, -sounds.shape[1] :], "b (s t) c -> b c s t", s=2)
    return video[..., :height, :width], sound


def _times(timestep, levels):
    """Times by the video's and the sound's schedules, shifted by 12 and by 3."""
    sigma = timestep.flatten()[0] / 1000
    base = sigma / (12 - 11 * sigma)
    sigmas = torch.where(levels[:, 0] == 0, sigma, 3 * base / (1 + 2 * base))
    noisy, shares, limits = 1 - sigmas, levels[:, 1], levels[:, 2]
    return torch.minimum(1 - shares * sigmas, torch.maximum(noisy, limits))


def _conditioning(generator):
    entry = payload(generator, (3, 3, 3))
    extras = {f"minimax_{name}": entry[name] for name in ("keyframes", "refs")}
    extras["minimax_token_tags"] = entry["text_token_tags"]
    return torch.randn(1, 7, CONFIG["text_dim"], generator=generator), extras


def _case(name, config, kind):
    return kind(
        name=name,
        family="minimax-h3",
        config=config,
        latent=(24, 3, 6, 4),
        odd=(24, 3, 5, 3),
        tensors=_tensors,
        reference=_reference,
        adjust=_adjust,
        timestep=700.0,
        full=kind is WithSound,  # people use pruned files
        fine_time=True,  # the class counts from 0 to 1
        native=Native(
            config,
            _conditioning,
            (24, 3, 6, 6),
            companion=(32, 2, SOUND),
            masks={} if kind is WithSound else {"mask": (1, 3, 6, 6), "mask_companion": (1, 2, SOUND)},
        ),
    )


CASES = (_case("minimax-h3", CONFIG, WithSound), _case("minimax-h3-pruned", CURVE, Pruned))
