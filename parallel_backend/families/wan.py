"""Wan 2.1 and 2.2: text to video, picture to video (the picture in the channels, CLIP's tokens before the text), and 2.2 5B.

Bernini-R's references in context and Fun Control's picture are tokens after the video's.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from .base.blocks import Blocks, Projections
from .base.family import Family, Forward, Inputs, Sizes, cached
from .base.file_layout import FileLayout, Source
from .base.segments import image_alone
from .base.step_inputs import REFERENCE_POSITIONS, REFERENCES, ArgumentCut, Config, Shapes, StepInputs
from .parts import wan
from .parts.cross_attention import TEXT_KEYS, block_list, block_plan

VARIANTS = {  # wan.kind -> name
    "s2v": "Wan S2V",
    "humo": "HuMo",
    "wandancer": "WanDancer",
}
"""Variants that cannot run: they are other classes in ComfyUI, and have other classes or none in diffusers."""
PICTURE = "reference_picture"
"""Conditioning tensor [B, 2] int64: latent rows and columns of Fun Control's picture, if REFERENCES are its tokens."""

CUTS: dict[str, ArgumentCut] = {
    "rotary_emb": lambda turns, rows: rows.of_image(turns, 1),
    # [b, 6, hidden], or with a time for each token [b, n, 6, hidden]
    "temb": lambda temb, rows: rows.of_image(temb, 1) if temb.ndim == 4 else temb,
}
"""`BlockList.cuts` of every variant."""


def _configure(shapes: Shapes) -> Config:
    if name := VARIANTS.get(wan.kind(shapes) or ""):
        raise ValueError(f"model_name: this is {name}, which this version cannot run. Use a Wan T2V or I2V model.")
    return wan.configure(shapes) | {"reference_channels": shapes.get("ref_conv.weight", (None, None))[1]}


def _key_map(config: Config) -> dict[str, Source]:
    keys = wan.key_map(config, "patch_embedding")
    if config["reference_channels"] is not None:
        keys.copy({"patch_embedding.reference": "ref_conv"})
    return keys.sources


def _conditioning(config: Config, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """As wan.conditioning, with REFERENCES and REFERENCE_POSITIONS (frame, row, column, number of the source), and PICTURE
    if they are Fun Control's. Models without weights for Fun Control's picture ignore it, as ComfyUI's do."""
    tensors, latents = wan.conditioning(config, call), call.get("context_latents")
    picture = None if config["reference_channels"] is None else call.get("reference_latent")
    if not latents and picture is None:
        return tensors
    if latents and picture is not None:
        raise ValueError("positive, negative: references in context and a reference picture cannot be forwarded at once.")
    if call.get("denoise_mask") is not None:
        raise ValueError("positive, negative: references cannot be forwarded together with a noise mask.")
    if picture is not None:
        packed, position = wan.packed(picture[:, :, None])
        position = F.pad(position - torch.tensor((1.0, 0.0, 0.0)), (0, 1))  # the picture is the frame before the video
        tensors[PICTURE] = torch.tensor(picture.shape[-2:]).expand(len(packed), -1)
        return tensors | wan.references([packed], [position])
    tokens, positions = [], []
    for number, latent in enumerate(latents or (), 1):
        if latent.shape[1] != config["in_channels"]:
            raise ValueError(
                f"positive, negative: a reference in context has {latent.shape[1]} channels, this model needs "
                f"{config['in_channels']}. Use a Wan T2V or Bernini model, and its own VAE."
            )
        packed, position = wan.packed(latent)
        tokens.append(packed)
        positions.append(F.pad(position, (0, 1), value=float(number)))
    return tensors | wan.references(tokens, positions)


def _check_grid(grid: tuple[int, ...], tensors: dict[str, torch.Tensor]) -> None:
    if PICTURE in tensors:
        wan.check_sizes("the reference picture", (1, *grid[1:]), (1, *tensors[PICTURE][0].tolist()))


def _arguments(step: StepInputs, config: Config) -> dict[str, Any]:
    # Only the first stage has REFERENCES, and only its module reads `patch_inputs`.
    references = {"references": step.tensors.get(REFERENCES), "separate": PICTURE in step.tensors}
    return wan.arguments(step, config) | {"positions": step.tensors.get(REFERENCE_POSITIONS), "patch_inputs": references}


class _Inputs(Inputs):
    def reference_runs(self, call: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
        """Fun Control's picture, which ComfyUI has in front of the video."""
        picture = call.get("reference_latent")
        return () if picture is None else ((0, picture.shape[-2] // 2 * (picture.shape[-1] // 2)),)


WAN = Family(
    name="wan",
    model_class="WanTransformer3DModel",
    class_module="parallel_backend.families.models.wan",
    native_classes=("WAN21_T2V", "WAN21_I2V", "WAN21_FunControl2V", "WAN22_T2V", "WAN21_FlowRVS"),
    file=FileLayout(
        detect=lambda shapes: wan.kind(shapes) in ("", "reference", *VARIANTS),
        configure=_configure,
        key_map=_key_map,
        # ComfyUI's class makes the same transformer for both types.
        header=wan.header("t2v", "i2v", "flow_rvs", in_dim_ref_conv=lambda config: (config["reference_channels"],)),
        ignored=(r".*\.norm_added_q\.weight",),
    ),
    blocks=Blocks(
        lists=(block_list("blocks", cuts=CUTS, projections=Projections(rotary_argument="rotary_emb")),),
        counts=lambda config: {"blocks": config["num_layers"]},
        prologue=("patch_embedding",),
        epilogue=("norm_out", "proj_out"),
        native={"double_block": "blocks"},
        native_patches=("attn1_patch", "attn2_patch", "double_block"),
        segments=image_alone,
    ),
    sizes=Sizes(
        latent_channels=lambda config: config["in_channels"],
        max_side=lambda config: config["rope_max_seq_len"],
    ),
    inputs=_Inputs(
        conditioning=_conditioning,
        check_grid=_check_grid,
        accepts=(*wan.ACCEPTS, "context_latents", "reference_latent"),
        options=(*wan.OPTIONS, wan.TEXT_GUIDANCE),
        vector_tensors=("context", "picture", "away", "normalized"),
        exact=("normalized",),
        example=wan.example,
    ),
    forward=Forward(
        arguments=_arguments,
        whole_latent=True,
        cached_modules=cached(call=("condition_embedder", "condition_embedder.text_embedder"), prompt=("rope",)) | TEXT_KEYS,
    ),
    half_dtypes=lambda _config: ("fp16", "bf16"),
    tensor_plan={"blocks": block_plan("ffn")},
    patching=wan.PATCHING,
    native_values=wan.native_values,
)
