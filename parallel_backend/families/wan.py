"""Wan 2.1 and 2.2: text to video, picture to video (pictures in its channels, CLIP's beside the text), and the 2.2 5B.

References in context, as Bernini-R has them, and Fun Control's picture are tokens behind the video's.
"""

from typing import Any

import torch
import torch.nn.functional as F

from .base.blocks import Blocks
from .base.family import Family, FileLayout, Forward, Inputs, Sizes, Source, cached
from .base.step_inputs import REFERENCE_POSITIONS, REFERENCES, Config, Shapes, StepInputs, image_tables
from .parts import wan
from .parts.cross_attention import TEXT_KEYS, block_list, block_plan

VARIANTS = {  # see wan.kind: another class in ComfyUI, and another or none in diffusers
    "s2v": "Wan S2V",
    "humo": "HuMo",
    "wandancer": "WanDancer",
}
"""Those that cannot run."""
PICTURE = "reference_picture"
"""Conditioning tensor [B, 2] int64: rows and columns, in latent pixels, of the picture that REFERENCES are of."""


def _configure(shapes: Shapes) -> Config:
    if name := VARIANTS.get(wan.kind(shapes)):
        raise ValueError(f"model_name: this is {name}, which this version cannot run. Use a Wan T2V or I2V model.")
    return wan.configure(shapes) | {"reference_channels": shapes.get("ref_conv.weight", (None, None))[1]}


def _key_map(config: Config) -> dict[str, Source]:
    keys = wan.key_map(config, "patch_embedding")
    if config["reference_channels"] is not None:
        keys.copy({"patch_embedding.reference": "ref_conv"})
    return keys.sources


def _conditioning(config: Config, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """As wan.conditioning, with REFERENCES and REFERENCE_POSITIONS (frame, row, column, number of the source), and PICTURE
    if they are Fun Control's. Models without weights for that ignore it, as the native ones do."""
    tensors, latents = wan.conditioning(config, call), call.get("context_latents")
    picture = None if config["reference_channels"] is None else call.get("reference_latent")
    if not latents and picture is None:
        return tensors
    if latents and picture is not None:
        raise ValueError("positive, negative: references in context and a reference picture cannot be forwarded at once.")
    if call.get("denoise_mask") is not None:
        raise ValueError("positive, negative: references cannot be forwarded together with a noise mask.")
    if picture is not None:
        packed, place = wan.packed(picture[:, :, None])
        place = F.pad(place - torch.tensor((1.0, 0.0, 0.0)), (0, 1))  # it is the frame before the video
        return (
            tensors | wan.references([packed], [place]) | {PICTURE: torch.tensor(picture.shape[-2:]).expand(len(packed), -1)}
        )
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


def _check_grid(grid: tuple[int, ...], tensors: dict[str, torch.Tensor]) -> None:
    if PICTURE in tensors:
        wan.check_sizes("the reference picture", (1, *grid[1:]), (1, *tensors[PICTURE][0].tolist()))


def _arguments(step: StepInputs, config: Config) -> dict[str, Any]:
    # Of the first stage.
    references = {"references": step.tensors.get(REFERENCES), "own": PICTURE in step.tensors}
    return wan.arguments(step, config) | {"positions": step.tensors.get(REFERENCE_POSITIONS), "patch_inputs": references}


WAN = Family(
    name="wan",
    model_class="WanTransformer3DModel",
    class_module="parallel_backend.families.models.wan",
    native_classes=("WAN21_T2V", "WAN21_I2V", "WAN21_FunControl2V", "WAN22_T2V"),
    file=FileLayout(
        detect=lambda shapes: wan.kind(shapes) in ("", "reference", *VARIANTS),
        configure=_configure,
        key_map=_key_map,
        header=wan.header(
            "t2v", "i2v", in_dim_ref_conv=lambda config: (config["reference_channels"],)
        ),  # the same transformer
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
        native={"double_block": "blocks"},
        native_patches=("attn1_patch", "attn2_patch", "double_block"),
    ),
    sizes=Sizes(
        latent_channels=lambda config: config["in_channels"],
        max_side=lambda config: config["rope_max_seq_len"],
    ),
    inputs=Inputs(
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
