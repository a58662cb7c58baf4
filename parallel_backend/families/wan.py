"""Wan 2.1 and 2.2: text to video, picture to video (pictures in its channels, CLIP's beside the text), and the 2.2 5B.

References in context, as Bernini-R has them, are tokens behind the video's.
"""

from typing import Any

import torch
import torch.nn.functional as F

from parallel_backend.families.base.blocks import Blocks
from parallel_backend.families.base.family import CacheScope, Family, FileLayout, Forward, Inputs, Sizes
from parallel_backend.families.base.step_inputs import (
    REFERENCE_POSITIONS,
    REFERENCES,
    Config,
    Shapes,
    StepInputs,
    image_tables,
)
from parallel_backend.families.parts import wan
from parallel_backend.families.parts.cross_attention import TEXT_KEYS, block_list, block_plan

VARIANTS = {  # see wan.kind: another class in ComfyUI, and another or none in diffusers
    "s2v": "Wan S2V",
    "humo": "HuMo",
    "wandancer": "WanDancer",
    "reference": "Wan Fun Control with a reference picture",
}
"""Those that cannot run."""


def _configure(shapes: Shapes) -> Config:
    if name := VARIANTS.get(wan.kind(shapes)):
        raise ValueError(f"model_name: this is {name}, which this version cannot run. Use a Wan T2V or I2V model.")
    return wan.configure(shapes)


def _conditioning(config: Config, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """As wan.conditioning, with REFERENCES and REFERENCE_POSITIONS (frame, row, column, number of the source)."""
    tensors, latents = wan.conditioning(config, given), given.get("context_latents")
    if not latents:
        return tensors
    if given.get("denoise_mask") is not None:
        raise ValueError("positive, negative: references in context cannot be forwarded together with a noise mask.")
    tokens, places = [], []
    for number, latent in enumerate(latents, 1):
        if latent.shape[1] != config["in_channels"]:
            raise ValueError(
                f"positive, negative: a reference in context has {latent.shape[1]} channels, this model needs "
                f"{config['in_channels']}. Use a Wan T2V or Bernini model, and its own VAE."
            )
        packed, place = wan.packed(latent)
        tokens.append(packed)
        places.append(F.pad(place, (0, 1), value=float(number)))
    return tensors | wan.references(tokens, places)


def _arguments(step: StepInputs, config: Config) -> dict[str, Any]:
    references = {"references": step.tensors.get(REFERENCES)}  # of the first stage
    return wan.arguments(step, config) | {"positions": step.tensors.get(REFERENCE_POSITIONS), "embedded": references}


WAN = Family(
    name="wan",
    model_class="WanTransformer3DModel",
    class_module="parallel_backend.families.models.wan",
    native_classes=("WAN21_T2V", "WAN21_I2V", "WAN21_FunControl2V", "WAN22_T2V"),
    file=FileLayout(
        detect=lambda shapes: wan.kind(shapes) in ("", *VARIANTS),
        configure=_configure,
        key_map=lambda config: wan.key_map(config, "patch_embedding").sources,
        header=wan.header("t2v", "i2v"),  # the same transformer
        ignored=(r".*\.norm_added_q\.weight",),
        max_settings={"rope_max_seq_len": 1 << 16},
    ),
    blocks=Blocks(
        lists=(
            block_list(
                "blocks",
                cuts={
                    "rotary_emb": image_tables(1),
                    # [b, 6, hidden], or with a time for each token [b, n, 6, hidden]
                    "temb": lambda temb, rows: rows.of_image(temb, 1) if temb.ndim == 4 else temb,
                },
            ),
        ),
        counts=lambda config: {"blocks": config["num_layers"]},
        prologue=("patch_embedding",),
        epilogue=("norm_out", "proj_out"),
    ),
    sizes=Sizes(
        latent_channels=lambda config: config["in_channels"],
        max_side=lambda config: config["rope_max_seq_len"],
    ),
    inputs=Inputs(
        conditioning=_conditioning,
        accepts=(*wan.ACCEPTS, "context_latents"),
        vector_tensors=("context", "picture"),
        example=wan.example,
    ),
    forward=Forward(
        arguments=_arguments,
        whole_latent=True,
        cached_modules={"rope": CacheScope.PROMPT, "condition_embedder": CacheScope.CALL} | TEXT_KEYS,
    ),
    half_dtypes=lambda _config: ("fp16", "bf16"),
    tensor_plan={"blocks": block_plan("ffn")},
    patching=wan.PATCHING,
)
