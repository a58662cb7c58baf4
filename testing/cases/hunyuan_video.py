"""HunyuanVideo: text to video with and without embedded guidance, masked text, and a picture in the channels."""

import inspect

import torch
import torch.nn.functional as F
from diffusers.loaders import single_file_utils

from parallel_backend.families.base.step_inputs import TEXT_MASK
from parallel_backend.families.parts.hunyuan import ALIASES
from testing.cases.case import Case, Native, norms_near_one

CONFIG = {
    "in_channels": 6,
    "out_channels": 6,
    "num_attention_heads": 3,  # two ranks have two of them and one
    "attention_head_dim": 16,
    "num_layers": 3,
    "num_single_layers": 4,
    "num_refiner_layers": 2,
    "guidance_embeds": True,
    "text_embed_dim": 24,
    "pooled_projection_dim": 12,
    "rope_axes_dim": (4, 6, 6),
}
# What ComfyUI takes for granted: heads of 128, two refiner blocks, pooled text of 768.
NATIVE = CONFIG | {
    "in_channels": 16,
    "out_channels": 16,
    "num_attention_heads": 2,
    "attention_head_dim": 128,
    "num_layers": 2,
    "num_single_layers": 2,
    "pooled_projection_dim": 768,
    "rope_axes_dim": (16, 56, 56),
}
LATENT = (3, 10, 8)


def tencent_names(state):
    """The file as Tencent has it: the family's aliases undone."""
    names = {}
    for key in state:
        endings = [(theirs, ours) for theirs, ours in ALIASES.items() if key.endswith(ours) and theirs != "_norm.weight"]
        # mlp.0 ends time_in's names too, in Tencent's layout alone; the longest ending is the right one.
        theirs, ours = max(endings, key=lambda pair: len(pair[1]), default=("", ""))
        names[key.removesuffix(ours) + theirs] = key
    assert len(names) == len(state)
    return {name: state[key] for name, key in names.items()}


def _convert(state):
    """diffusers' converter, which takes Tencent's names and cuts fused layers at the real model's width."""
    converter, names = single_file_utils.convert_hunyuan_video_transformer_to_diffusers, dict(vars(single_file_utils))
    source, width = inspect.getsource(converter), CONFIG["num_attention_heads"] * CONFIG["attention_head_dim"]
    assert "hidden_size = 3072" in source
    exec(source.replace("hidden_size = 3072", f"hidden_size = {width}"), names)  # noqa: S102 (diffusers' own source)
    return names[converter.__name__](tencent_names(state))


def _tensors(guidance, masked=False):
    def make(generator, batch):
        tensors = {
            "context": torch.randn(batch, 7, CONFIG["text_embed_dim"], generator=generator),
            "pooled": torch.randn(batch, CONFIG["pooled_projection_dim"], generator=generator),
        }
        if guidance:
            tensors["guidance"] = torch.full((batch,), 6.0)
        if masked:
            tensors[TEXT_MASK] = torch.tensor([[True] * 5 + [False] * 2, [True] * 7])[:batch]
        return tensors

    return make


def _reference(model, x, timestep, tensors):
    """As HunyuanVideoPipeline calls it."""
    height, width = x.shape[-2:]
    guidance = tensors.get("guidance")
    out = model(
        hidden_states=F.pad(x, (0, width % 2, 0, height % 2, 0, 0), mode="circular"),
        timestep=timestep,
        encoder_hidden_states=tensors["context"],
        encoder_attention_mask=tensors.get(TEXT_MASK, torch.ones(tensors["context"].shape[:2])).float(),
        pooled_projections=tensors["pooled"],
        guidance=None if guidance is None else guidance * 1000.0,
        return_dict=False,
    )[0]
    return out[..., :height, :width]


def _conditioning(picture):
    def make(generator):
        extras = {"pooled_output": torch.randn(1, 768, generator=generator)}
        if picture:
            extras["concat_latent_image"] = torch.randn(1, 16, *LATENT, generator=generator)
            extras["concat_mask"] = torch.rand(1, 1, *LATENT, generator=generator)
        return torch.randn(1, 9, 24, generator=generator), extras

    return make


def _case(name, changes, masked=False, native=None):
    config = CONFIG | changes
    return Case(
        name=name,
        family="hunyuan-video",
        config=config,
        latent=(config["in_channels"], *LATENT),
        odd=(config["in_channels"], 2, 9, 7),
        tensors=_tensors(config["guidance_embeds"], masked),
        reference=_reference,
        timestep=700.0,
        adjust=norms_near_one("norm1.weight", "norm2.weight"),
        convert=_convert,
        sampled=config["in_channels"] == config["out_channels"],
        native=native,
        notes={"native": "with masked text ComfyUI's native model fails for a batch of two"} if masked else {},
    )


CASES = (
    _case("hunyuan-video", {}, native=Native(NATIVE, _conditioning(False), (16, *LATENT))),
    _case("hunyuan-video-masked-text", {}, masked=True),
    _case(
        "hunyuan-video-i2v",
        {"guidance_embeds": False, "in_channels": 13},
        native=Native(NATIVE | {"guidance_embeds": False, "in_channels": 33}, _conditioning(True), (16, *LATENT)),
    ),
)
