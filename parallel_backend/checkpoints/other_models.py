"""Models that ComfyUI loads and ranks do not run: the keys that identify them, and why.

From ComfyUI 0.33: model_detection.py, supported_models.py. Read only if a file is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass

UNET = "a UNet whose class in ComfyUI does not run on ranks"
SOUND = "an audio model, which one GPU computes in seconds"
SOLID = "a 3D model, which one GPU computes in seconds"
PICTURE_TOOL = "not a model for samplers"
NOT_RUN = "a diffusion transformer whose class ranks cannot run"


@dataclass(frozen=True)
class OtherModel:
    """A kind of model. A file with all of `keys` is one. The first row of OTHERS that fits counts."""

    name: str
    what: str
    keys: tuple[str, ...]


OTHERS = (
    OtherModel("MiniMax Music 3", SOUND, ("cond_layer_logits", "latent_conditioners.0.weight")),
    OtherModel("Stable Cascade", UNET, ("clf.1.weight",)),
    OtherModel("Stable Cascade", UNET, ("effnet_mapper.0.weight", "clip_mapper.weight")),
    OtherModel("Trellis 2 or Pixal3D", SOLID, ("img2shape.t_embedder.mlp.0.weight",)),
    OtherModel("Trellis 2 or Pixal3D", SOLID, ("shape2txt.t_embedder.mlp.0.weight",)),
    OtherModel("Stable Audio", SOUND, ("transformer.rotary_pos_emb.inv_freq",)),
    OtherModel("ACE-Step", SOUND, ("genre_embedder.weight",)),
    OtherModel("ACE-Step 1.5", SOUND, ("encoder.lyric_encoder.layers.0.input_layernorm.weight",)),
    OtherModel("PiD, a decoder of latents to pixels", NOT_RUN, ("lq_proj.latent_proj.0.weight",)),
    OtherModel("PixelDiT", NOT_RUN, ("core.pixel_embedder.proj.weight",)),
    OtherModel("PixelDiT", NOT_RUN, ("pixel_embedder.proj.weight",)),
    OtherModel("Z-Image in pixel space", NOT_RUN, ("dec_net.cond_embed.weight", "cap_embedder.1.weight")),
    OtherModel("Hunyuan3D 2", SOLID, ("latent_in.weight",)),
    OtherModel("Hunyuan3D 2.1", SOLID, ("x_embedder.weight", "t_embedder.mlp.2.weight", "blocks.0.attn1.k_norm.weight")),
    OtherModel("TripoSplat", SOLID, ("cam_out_layer.weight", "repo_layers.0.final_map.weight")),
    OtherModel("RT-DETR, which finds objects", PICTURE_TOOL, ("encoder.pan_blocks.1.cv4.conv.weight",)),
    OtherModel("Depth Anything 3", PICTURE_TOOL, ("backbone.embeddings.patch_embeddings.projection.weight",)),
    OtherModel("SAM 3, which cuts out objects", PICTURE_TOOL, ("detector.transformer.decoder.query_embed.weight",)),
    OtherModel("a Stable Diffusion (1.5, 2, XL, Video, or made from one)", UNET, ("input_blocks.0.0.weight",)),
)


def other_model(shapes: Mapping[str, object]) -> OtherModel | None:
    """The row of OTHERS for a single file with these keys. None: it is none of them."""
    return next((each for each in OTHERS if all(key in shapes for key in each.keys)), None)
