"""Wan 2.1 and 2.2: text to video, pictures as channels and by CLIP, first and last picture, a time for each frame."""

import json
from dataclasses import dataclass, replace

import diffusers
import torch
import torch.nn.functional as F
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from safetensors.torch import load_file, save_file

from parallel_backend.families.base.step_inputs import REFERENCE_POSITIONS, REFERENCES
from parallel_backend.families.parts.wan import PROMPT
from parallel_backend.families.wan import PICTURE
from parallel_backend.families.wan import WAN as WAN_FAMILY
from testing.cases.case import Case, Native

# Heads are 128 wide in every Wan, so two of them are the smallest model.
WAN = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 24,
    "freq_dim": 256,
    "ffn_dim": 96,
    "num_layers": 3,
    "cross_attn_norm": True,
    "image_dim": None,
    "added_kv_proj_dim": None,
    "rope_max_seq_len": 1024,
    "pos_embed_seq_len": None,
}
CLIP = {"image_dim": 1280, "added_kv_proj_dim": 256}


def _tensors(config, clip):
    length = PROMPT if config["image_dim"] else 7

    def make(generator, batch):
        tensors = {"context": torch.randn(batch, length, config["text_dim"], generator=generator)}
        if clip:
            tensors["picture"] = torch.randn(batch, clip, config["image_dim"], generator=generator)
        elif config["image_dim"]:
            tensors["context"] = tensors["context"].repeat(1, 2, 1)
        return tensors

    return make


def of_diffusers(model):
    """diffusers' class with the weights of the family's."""
    theirs = diffusers.WanTransformer3DModel(**{name: model.config[name] for name in WAN}).eval()
    theirs.load_state_dict(model.state_dict())
    return theirs


def _reference(model, x, timestep, tensors):
    """As WanImageToVideoPipeline calls it: times are of each token for the 5B, a frame's being all the same."""
    height, width = x.shape[-2:]
    x = F.pad(x, (0, width % 2, 0, height % 2, 0, 0), mode="circular")
    if timestep.ndim == 2:
        timestep = timestep[:, :, None].repeat(1, 1, x.shape[-2] * x.shape[-1] // 4).flatten(1)
    picture = tensors.get("picture")
    if picture is not None and model.config.pos_embed_seq_len is not None:
        picture = torch.cat([pair for entry in picture for pair in entry.chunk(2)]).view(2 * len(x), -1, picture.shape[-1])
    arguments = {
        "hidden_states": x,
        "timestep": timestep,
        "encoder_hidden_states": tensors["context"],
        "encoder_hidden_states_image": picture,
        "return_dict": False,
    }
    if REFERENCES in tensors:  # diffusers has none: our own class, in one piece
        embedded = {"references": tensors[REFERENCES], "separate": PICTURE in tensors}
        out = model(**arguments, positions=tensors[REFERENCE_POSITIONS], patch_inputs=embedded)[0]
    else:
        out = of_diffusers(model)(**arguments)[0]
    return out[..., :height, :width]


def _in_context(generator, batch):
    """A video and a picture of odd sizes."""
    return [torch.randn(batch, 16, *sizes, generator=generator) for sizes in ((2, 7, 8), (1, 5, 4))]


def _with_references(generator, batch):
    text = {"context": torch.randn(batch, 7, WAN["text_dim"], generator=generator)}
    config = WAN | {"reference_channels": None}
    return WAN_FAMILY.inputs.conditioning(config, text | {"context_latents": _in_context(generator, batch)})


def _conditioning(config, clip, masked, references, words):
    """`clip`: tokens of the CLIP vision output. `words`: those of the prompt."""

    def make(generator):
        extras = {}
        if config["in_channels"] > config["out_channels"]:
            extras["concat_latent_image"] = torch.randn(1, 16, 3, 8, 6, generator=generator)
            extras["concat_mask"] = torch.rand(1, 1, 3, 8, 6, generator=generator)
        if clip:
            extras["clip_vision_output.penultimate_hidden_states"] = torch.randn(1, clip, 1280, generator=generator)
        if config.get("reference_channels"):
            extras["reference_latents"] = [torch.randn(1, 16, 1, 8, 6, generator=generator)]
        if references:
            extras["context_latents"] = _in_context(generator, 1)
        if masked:
            extras["denoise_mask"] = torch.tensor([0.0, 0.6, 1.0]).view(1, 1, 3, 1, 1).expand(1, 48, 3, 8, 6)
        return torch.randn(1, words, config["text_dim"], generator=generator), extras

    return make


@dataclass(frozen=True)
class TimePerFrame(Case):
    """The first frame is a fixed picture, at time 0 in all steps."""

    def inputs(self, batch=2, latent=None, seed=1):
        x, timestep, tensors = super().inputs(batch, latent, seed)
        return x, timestep[:, None] * torch.linspace(0, 1, x.shape[2]), tensors


def _case(name, changes, latent=(4, 12, 10), clip=0, kind=Case, references=False, words=PROMPT):
    config = WAN | changes
    channels, out = config["in_channels"], config["out_channels"]
    frames, height, width = latent
    first_and_last = config["pos_embed_seq_len"] is not None
    return kind(
        name=name,
        family="wan",
        config=config,
        latent=(channels, *latent),
        odd=(channels, frames, height - 1, width - 1),
        tensors=_with_references if references else _tensors(config, clip),
        reference=_reference,
        timestep=700.0,
        convert=None if first_and_last else convert_wan_transformer_to_diffusers,  # which forgets img_emb.emb_pos
        sampled=channels == out,
        native=Native(
            config,
            _conditioning(config, clip, kind is TimePerFrame, references, words),
            (out, min(frames, 3), 8, 6),
            detected={"text_dim": config["text_dim"]},
        ),
    )


@dataclass(frozen=True)
class Pictured(Case):
    """The picture is as large as the latent, whose size a test may change."""

    def inputs(self, batch=2, latent=None, seed=1):
        x, timestep, tensors = super().inputs(batch, latent, seed)
        picture = torch.randn(batch, 16, *x.shape[3:], generator=torch.Generator().manual_seed(seed))
        entry = {"context": tensors["context"], "reference_latent": picture}
        return x, timestep, WAN_FAMILY.inputs.conditioning(self.config, entry)


I2V = {"in_channels": 36}
FUN = I2V | {"reference_channels": 16}


@dataclass(frozen=True)
class Segmenting(Case):
    """FlowRVS, which the header alone tells from plain Wan: ComfyUI's sampler takes its output for the clean video."""

    def save(self, model, path, config=None):
        super().save(model, path, config)
        save_file(load_file(path), path, {"config": json.dumps({"transformer": {"model_type": "flow_rvs"}})})
        return path


CASES = (
    _case("wan-2.1-t2v", {}),
    _case("wan-2.1-one-frame", {}, latent=(1, 12, 10)),
    _case("wan-2.1-i2v", I2V | CLIP, clip=5, words=400),
    _case("wan-2.1-i2v-without-clip", I2V | CLIP),
    _case("wan-2.1-flf2v", I2V | CLIP | {"pos_embed_seq_len": 10}, clip=10, words=600),
    _case("wan-2.2-i2v", I2V),
    _case("wan-bernini", {}, references=True),
    replace(_case("wan-2.2-fun-control", FUN, kind=Pictured), odd=None, convert=None, full=True),
    replace(_case("wan-flow-rvs", {}, kind=Segmenting), full=True),
    _case("wan-2.2-5b", {"in_channels": 48, "out_channels": 48}, kind=TimePerFrame),
)
