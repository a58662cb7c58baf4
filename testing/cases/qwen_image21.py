"""Qwen-Image 2.1: a picture from text alone, and with references between and behind the words."""

import math

import torch
import torch.nn.functional as F

from parallel_backend.families.base.step_inputs import TEXT_ENDS
from parallel_backend.families.qwen_image21 import PLACES, POSITIONS, SPLICED, prefix_tensors
from testing.cases.case import Case, Native

CONFIG = {
    "in_channels": 8,
    "out_channels": 8,
    "num_layers": 4,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "context_in_dim": 24,
    "mlp_ratio": 3,
    "axes_dims_rope": (4, 6, 6),
    "fused_mlp": False,
}
NATIVE = CONFIG | {
    "in_channels": 64,
    "out_channels": 64,
    "num_layers": 2,
    "attention_head_dim": 128,
    "num_attention_heads": 2,
    "axes_dims_rope": (16, 56, 56),
}
"""For ComfyUI, which takes a head's rotary axes for granted."""
WORDS, SIDES, SLOTS = 7, [(4, 6), (5, 3)], [3]
"""A text with a reference before its word 3 and another behind it."""


def _tensors(generator, batch):
    text = torch.randn(batch, WORDS, CONFIG["context_in_dim"], generator=generator)
    return {"context": text} | _of(batch, prefix_tensors(WORDS, [], []))


def _edited(generator, batch):
    tokens = sum(map(math.prod, SIDES))
    spliced = torch.randn(batch, tokens, CONFIG["in_channels"], generator=generator)
    return _tensors(generator, batch) | {SPLICED: spliced} | _of(batch, prefix_tensors(WORDS, SIDES, SLOTS))


def _of(batch, tensors):
    return {name: tensor.expand(batch, *tensor.shape[1:]) for name, tensor in tensors.items()}


def _reference(model, x, timestep, tensors):
    return reference(model, x, timestep, tensors, {})


def reference(model, x, timestep, tensors, added):
    """The published forward with the class's weights, all tokens at once under one mask of queries by keys, float64.

    `added`: block -> [batch, prefix + picture tokens, width] that a control adds behind it."""
    weights = {name: value.double() for name, value in model.state_dict().items()}
    config, (batch, _, rows, columns) = model.config, x.shape
    heads, size = config["num_attention_heads"], config["attention_head_dim"]

    def linear(name, value):
        return F.linear(value, weights[f"{name}.weight"])

    def rms(value, scale):
        return F.rms_norm(value, value.shape[-1:], scale, 1e-6)

    words = rms(tensors["context"].double(), weights["txt_in.text_norm.weight"] + 1)
    words = linear("txt_in.out_layer", F.gelu(linear("txt_in.in_layer", words), approximate="tanh"))
    parts = [words] + ([linear("img_in", tensors[SPLICED].double())] if SPLICED in tensors else [])
    picture = linear("img_in", x.double().flatten(2).transpose(1, 2))
    joint = torch.cat((torch.cat(parts, dim=1)[:, tensors[PLACES][0]], picture), dim=1)
    prefix, total = len(tensors[PLACES][0]), joint.shape[1]

    places = tensors[POSITIONS][0].double()
    of_prefix = places[:-1, :3] - places[:-1, 3:] * torch.tensor([0.0, rows % 2 / 2, columns % 2 / 2])
    sides = (torch.arange(float(side)) - (side - side // 2) for side in (rows, columns))
    positions = torch.cat((of_prefix, torch.cartesian_prod(places[-1, :1].float(), *sides))).double()
    rates = [10000 ** (-torch.arange(0, width, 2).double() / width) for width in config["axes_dims_rope"]]
    angles = torch.cat([torch.outer(axis, rate) for axis, rate in zip(positions.T, rates, strict=True)], dim=1)
    turns = torch.polar(torch.ones_like(angles), angles)

    def turned(value):
        pairs = torch.view_as_complex(value.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turns).flatten(-2)

    ends = torch.cat((tensors[TEXT_ENDS][0], torch.full((total - prefix,), total)))
    seen = torch.arange(total) < ends[:, None]
    times = torch.cat((timestep.double(), torch.zeros(1)))
    waves = 1000 * times[:, None] * torch.exp(-math.log(10000) / 128 * torch.arange(128).double())
    waves = torch.cat((waves.cos(), waves.sin()), dim=-1)
    embedder = "time_text_embed.timestep_embedder.linear_"
    temb = linear(f"{embedder}2", F.silu(linear(f"{embedder}1", waves)))

    def by_token(vectors):
        at_zero, at_time = vectors[-1:, None], vectors[:-1, None]
        return torch.cat((at_zero.expand(batch, prefix, -1), at_time.expand(batch, total - prefix, -1)), dim=1)

    scale, gate, scale_ff, gate_ff = map(by_token, linear("modulation.1", F.silu(temb)).chunk(4, dim=-1))
    for index in range(config["num_layers"]):
        block = f"transformer_blocks.{index}."
        value = F.layer_norm(joint, joint.shape[-1:], eps=1e-6) * (1 + scale)
        query, key, content = (
            linear(f"{block}attn.to_{name}", value).unflatten(-1, (heads, size)).transpose(1, 2) for name in "qkv"
        )
        query, key = (
            turned(rms(each, weights[f"{block}attn.norm_{name}.weight"])) for each, name in ((query, "q"), (key, "k"))
        )
        value = F.scaled_dot_product_attention(query, key, content, attn_mask=seen).transpose(1, 2).flatten(2)
        joint = joint + gate.tanh() * linear(f"{block}attn.to_out.0", value)
        value = F.layer_norm(joint, joint.shape[-1:], eps=1e-6) * (1 + scale_ff)
        value = F.silu(linear(f"{block}img_mlp.gate_layer", value)) * linear(f"{block}img_mlp.proj", value)
        joint = joint + gate_ff.tanh() * linear(f"{block}img_mlp.out", value) + added.get(index, 0.0)
    picture = F.layer_norm(joint[:, prefix:], joint.shape[-1:], eps=1e-6)
    picture = picture * (1 + linear("norm_out.linear", F.silu(temb[:-1]))[:, None])
    return linear("proj_out", picture).transpose(1, 2).reshape(x.shape).float()


def _adjust(model):
    """Norms that scale by about one, as trained ones do."""
    for name, parameter in model.named_parameters():
        if name.endswith(("norm_q.weight", "norm_k.weight")):
            parameter.data += 1


def _conditioning(generator):
    return torch.randn(1, 9, NATIVE["context_in_dim"], generator=generator), {}


def _edited_conditioning(generator):
    pictures = [torch.randn(1, NATIVE["in_channels"], *sides, generator=generator) for sides in SIDES]
    return _conditioning(generator)[0], {"reference_latents": pictures, "image_slots": SLOTS}


def _case(name, tensors, conditioning, fused_mlp):
    return Case(
        name=name,
        family="qwen-image-2.1",
        config=CONFIG | {"fused_mlp": fused_mlp},
        latent=(8, 12, 8),
        odd=(8, 11, 7),
        tensors=tensors,
        reference=_reference,
        rounds_time=True,
        adjust=_adjust,
        native=Native(NATIVE | {"fused_mlp": fused_mlp}, conditioning, (64, 12, 7), newer="QwenImage21", boolean_masks=True),
    )


CASES = (
    _case("qwen-image-2.1", _tensors, _conditioning, fused_mlp=False),
    _case("qwen-image-2.1-edit", _edited, _edited_conditioning, fused_mlp=True),
)
