"""Ideogram 4: with text, and over the picture alone."""

import diffusers
import torch

from testing.cases.case import Case, Native

CONFIG = {
    "in_channels": 8,
    "num_layers": 4,
    "attention_head_dim": 128,  # the sections of its positions take no fewer
    "num_attention_heads": 3,
    "intermediate_size": 56,
    "adaln_dim": 12,
    "llm_features_dim": 20,
    "rope_theta": 5_000_000,
    "mrope_section": (24, 20, 20),
    "norm_eps": 1e-5,
}
NATIVE = CONFIG | {"in_channels": 128, "num_layers": 2, "attention_head_dim": 128, "num_attention_heads": 2}
TAKEN_FOR_GRANTED = ("num_attention_heads", "attention_head_dim", "intermediate_size", "adaln_dim", "llm_features_dim")
"""By ComfyUI, whatever the file has."""
TEXT, IMAGE, OFFSET = 3, 2, 65536
"""What diffusers' class calls a token of either, and where its pipeline begins to count a picture's."""


def _tensors(tokens):
    return lambda generator, batch: {"context": torch.randn(batch, tokens, CONFIG["llm_features_dim"], generator=generator)}


def _reference(model, x, timestep, tensors):
    """As Ideogram4Pipeline calls diffusers' class: text and picture packed into one sequence."""
    original = diffusers.Ideogram4Transformer2DModel(**dict(model.config)).eval()
    original.load_state_dict(model.state_dict())
    batch, channels, rows, columns = x.shape
    words, pixels = tensors["context"].shape[1], rows * columns
    picture = x.view(batch, channels // 4, 4, pixels).permute(0, 3, 2, 1).flatten(2)
    places = torch.cartesian_prod(torch.tensor([0]), torch.arange(rows), torch.arange(columns)) + OFFSET
    out = original(
        hidden_states=torch.cat((torch.zeros(batch, words, channels), picture), dim=1),
        timestep=1 - timestep.float(),
        encoder_hidden_states=torch.cat((tensors["context"], torch.zeros(batch, pixels, CONFIG["llm_features_dim"])), dim=1),
        position_ids=torch.cat((torch.arange(words)[:, None].expand(-1, 3), places)).expand(batch, -1, -1),
        segment_ids=torch.ones(batch, words + pixels),
        indicator=torch.tensor([TEXT] * words + [IMAGE] * pixels).expand(batch, -1),
        return_dict=False,
    )[0][:, words:]
    return -out.unflatten(2, (4, channels // 4)).permute(0, 3, 2, 1).reshape(x.shape)


def _adjust(model):
    """Norms that scale by about one, as trained ones do."""
    for name, parameter in model.named_parameters():
        if "norm" in name and name.endswith(".weight") and "adaln" not in name:
            parameter.data += 1


def _case(name, tokens, **others):
    return Case(
        name=name,
        family="ideogram-4",
        config=CONFIG,
        latent=(8, 8, 6),
        odd=(8, 7, 5),
        tensors=_tensors(tokens),
        reference=_reference,
        adjust=_adjust,
        **others,
    )


CASES = (
    _case(
        "ideogram4",
        7,
        native=Native(
            NATIVE,
            lambda generator: (torch.randn(1, 9, CONFIG["llm_features_dim"], generator=generator), {}),
            (128, 8, 6),
            detected={"classes": {"Ideogram4": {name: NATIVE[name] for name in TAKEN_FOR_GRANTED}}},
        ),
    ),
    _case("ideogram4-without-text", 0, full=True),
)
