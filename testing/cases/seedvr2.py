"""SeedVR2: the kind with 3 B parameters, whose last blocks share their weights, and the two with 7 B."""

import math

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from parallel_backend.families.seedvr2 import PATCHING, TEXTS, windows
from testing.cases.case import Case, Native

CONFIG = {
    "in_channels": 9,
    "out_channels": 4,
    "num_layers": 4,
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "text_dim": 24,
    "ffn_dim": 96,
    "gated": True,
    "separate_layers": 2,
    "rope_frequencies": 2,
    "pixel_rope": False,
    "stored_rope": True,
}
PIXELS = CONFIG | {"pixel_rope": True, "rope_frequencies": 1, "stored_rope": False}
PLAIN = PIXELS | {"gated": False, "separate_layers": 4}
NATIVE = CONFIG | {"in_channels": 33, "out_channels": 16, "attention_head_dim": 128, "num_attention_heads": 2}
NATIVE |= {"ffn_dim": 512, "rope_frequencies": 21, "text_dim": 5120}
NATIVE_PIXELS = NATIVE | {"pixel_rope": True, "rope_frequencies": 10, "stored_rope": False}
NATIVE_PLAIN = NATIVE_PIXELS | {"gated": False, "separate_layers": 4, "ffn_dim": 1024}
NATIVE_LATENT = (16, 3, 20, 28)
WORDS, TEXT_ROWS = 5, (58, 64)


def _tensors(generator, batch):
    given = torch.randn(batch, 5, *LATENT[1:], generator=generator)
    return {
        "context": torch.randn(batch, WORDS, CONFIG["text_dim"], generator=generator),
        "condition": PATCHING.cut("frames").pack(given),
    }


LATENT = (4, 3, 22, 36)
"""Of 3 x 11 x 18 tokens: several windows along each axis."""


def _reference(model, x, timestep, tensors):
    """The published forward with the class's weights, float64, a window after the other."""
    weights = {name: value.double() for name, value in model.state_dict().items()}
    config, grid = model.config, PATCHING.grid(x.shape)
    heads, size = config["num_attention_heads"], config["attention_head_dim"]
    count, pixels = config["num_layers"], config["pixel_rope"]

    def linear(name, value):
        return F.linear(value, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def rms(value, scale=None):
        return F.rms_norm(value, value.shape[-1:], scale, 1e-5)

    def turned(value, angles):  # [n, heads, size], [n, pairs]
        turn = F.pad(torch.polar(torch.ones_like(angles), angles), (0, size // 2 - angles.shape[1]), value=1)
        return torch.view_as_real(torch.view_as_complex(value.unflatten(-1, (-1, 2))) * turn[:, None]).flatten(-2)

    waves = timestep.double()[:, None] * 10000 ** (-torch.arange(128).double() / 128)
    emb = linear("emb_in.proj_in", torch.cat((waves.sin(), waves.cos()), dim=1))
    emb = linear("emb_in.proj_out", F.silu(linear("emb_in.proj_hid", F.silu(emb)))).unflatten(1, (-1, 2, 3))
    tokens = PATCHING.cut("frames").pack(x).double().unflatten(-1, (-1, 4))
    given = tensors["condition"].double().unflatten(-1, (-1, 4))
    videos = linear("vid_in.proj", torch.cat((tokens, given), dim=2).transpose(2, 3).flatten(2))
    out = []
    for entry, video in enumerate(videos):
        text, of_time = linear("txt_in", tensors["context"][entry].double()), emb[entry]
        for index in range(count):
            block = f"blocks.{index}"
            names = ("all", "all") if index >= config["separate_layers"] else ("vid", "txt")
            ends = index == count - 1 and not pixels

            def modulated(streams, part, gate, block=block, names=names, ends=ends, of_time=of_time):
                results = []
                for stream, name in zip(streams, names, strict=True):
                    shift, scale, factor = of_time[:, ("attn", "mlp").index(part)].unbind(-1)
                    own = [weights.get(f"{block}.ada.{name}.{part}_{each}") for each in ("shift", "scale", "gate")]
                    if ends and results:
                        results.append(stream)
                    elif gate:
                        results.append(stream * (factor + own[2]))
                    else:
                        results.append(stream * (scale + own[1]) + shift + own[0])
                return results

            normed = modulated((rms(video), rms(text)), "attn", False)
            qkv = [
                linear(f"{block}.attn.proj_qkv.{name}", each).unflatten(1, (3, heads, size))
                for name, each in zip(names, normed, strict=True)
            ]
            normed = [
                [rms(each[:, i], weights[f"{block}.attn.norm_{q}.{name}.weight"]) for i, q in enumerate("qk")]
                for name, each in zip(names, qkv, strict=True)
            ]
            of_video, of_text, numbers = torch.zeros_like(qkv[0][:, 0]), [], torch.arange(len(video)).view(grid)
            for window in (
                (a, b, c)
                for a, b, c in torch.cartesian_prod(*map(torch.arange, map(len, windows(grid)[index % 2]))).tolist()
            ):
                spans = [axis[number] for axis, number in zip(windows(grid)[index % 2], window, strict=True)]
                inside = numbers[spans[0].slice, spans[1].slice, spans[2].slice]
                rows, words = inside.flatten(), torch.arange(len(text)).double()
                if pixels:
                    rates = torch.linspace(1, 128, config["rope_frequencies"]).double() * math.pi
                    axes, text_angles = [torch.linspace(-1, 1, side).double() for side in inside.shape], None
                else:
                    rates = 10000 ** (-torch.arange(config["rope_frequencies"]).double() / config["rope_frequencies"])
                    rates = weights.get("rope.freqs", rates)
                    axes = [torch.arange(side).double() for side in inside.shape]
                    axes[0] = axes[0] + len(text)
                    text_angles = (words[:, None] * rates).repeat(1, 3)
                angles = torch.cat([each[:, None] * rates for each in torch.cartesian_prod(*axes).unbind(1)], dim=1)
                joint = []
                for i in range(2):
                    turned_text = normed[1][i] if text_angles is None else turned(normed[1][i], text_angles)
                    joint.append(torch.cat((turned(normed[0][i][rows], angles), turned_text)))
                values = torch.cat((qkv[0][rows, 2], qkv[1][:, 2]))
                scores = torch.einsum("qhd,khd->hqk", *joint) / math.sqrt(size)
                result = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
                of_video[rows] = result[: len(rows)]
                of_text.append(result[len(rows) :])
            mixed = (of_video.flatten(1), torch.stack(of_text).mean(0).flatten(1))
            mixed = [linear(f"{block}.attn.proj_out.{name}", each) for name, each in zip(names, mixed, strict=True)]
            mixed = modulated(mixed, "attn", True)
            video, text = video + mixed[0], text if ends else text + mixed[1]
            normed = modulated((rms(video), rms(text)), "mlp", False)
            for name, each in list(zip(names, normed, strict=True))[: 1 if ends else 2]:
                hidden = linear(f"{block}.mlp.{name}.proj_in", each)
                if config["gated"]:
                    hidden = F.silu(linear(f"{block}.mlp.{name}.proj_in_gate", each)) * hidden
                else:
                    hidden = F.gelu(hidden, approximate="tanh")
                normed[0 if each is normed[0] else 1] = linear(f"{block}.mlp.{name}.proj_out", hidden)
            normed = modulated(normed, "mlp", True)
            video, text = video + normed[0], text if ends else text + normed[1]
        if not pixels:
            shift, scale, _ = of_time[:, 0].unbind(-1)
            video = rms(video, weights["vid_out_norm.weight"])
            video = video * (scale + weights["vid_out_ada.out_scale"]) + shift + weights["vid_out_ada.out_shift"]
        out.append(linear("vid_out.proj", video).unflatten(1, (4, -1)).transpose(1, 2).flatten(1))
    return PATCHING.cut("frames").unpack(torch.stack(out), x.shape).float()


def _conditioning(generator):
    """Both prompts with the same video, and with texts of different lengths, as the node gives them. In one batch ComfyUI's
    class of 3 B mixes up texts of one length, and both kinds the videos that are given."""
    given = torch.randn(1, 17, *NATIVE_LATENT[1:], generator=torch.Generator().manual_seed(7))
    words = int(torch.randint(3, 30, (1,), generator=generator))
    return torch.randn(1, words, 5120, generator=generator), {"condition": given}


def _native(config):
    """ComfyUI knows a file by its number of blocks, takes all sizes for granted, and the kind with 7 B parameters by its
    width."""
    width = config["num_attention_heads"] * config["attention_head_dim"]
    detected = {
        "image_model": "seedvr2",
        "norm_eps": 1e-5,
        "mlp_type": "swiglu" if config["gated"] else "normal",
        **({"rope_type": "rope3d", "rope_dim": 64} if config["pixel_rope"] else {"vid_out_norm": True}),
        "vid_dim": width,
        "heads": config["num_attention_heads"],
        "num_layers": config["num_layers"],
        "mm_layers": config["separate_layers"],
        "expand_ratio": 3 if config["gated"] else config["ffn_dim"] // width,
        "values": {"comfy.ldm.seedvr.model.SEEDVR2_7B_VID_DIM": width if config["pixel_rope"] else 0},
    }
    return Native(config, _conditioning, NATIVE_LATENT, detected=detected)


class _Case(Case):
    def save(self, model, path, config=None):
        """With the texts, and with the rotary frequencies that every block has in the published files."""
        super().save(model, path, config)
        config, tensors = dict(model.config), load_file(path)
        frequencies = model.rope.freqs if config["stored_rope"] else torch.ones(config["rope_frequencies"])
        tensors |= {f"blocks.{index}.attn.rope.rope.freqs": frequencies.clone() for index in range(config["num_layers"])}
        generator = torch.Generator().manual_seed(3)
        rows = zip(TEXTS, TEXT_ROWS, strict=True)
        tensors |= {name: torch.randn(count, config["text_dim"], generator=generator) for name, count in rows}
        save_file(tensors, path)
        return path


def _adjust(model):
    model.emb_in.proj_in.weight.data *= 4  # so that a rounded timestep shows
    if model.config.out_channels < 16:
        for parameter in model.vid_out.proj.parameters():  # see case.norms_near_one
            parameter.data *= 0.05
    if (stored := model.rope.freqs) is not None:
        stored.data = 10000 ** (-torch.arange(len(stored)) / len(stored))


def _case(name, config, native, full):
    return _Case(
        name=name,
        family="seedvr2",
        config=config,
        latent=LATENT,
        odd=None,
        tensors=_tensors,
        reference=_reference,
        timestep=700.0,
        native=native,
        adjust=_adjust,
        full=full,
    )


CASES = (
    _case("seedvr2-3b", CONFIG, _native(NATIVE), False),
    _case("seedvr2-7b", PLAIN, _native(NATIVE_PLAIN), True),
    _case("seedvr2-7b-sharp", PIXELS, _native(NATIVE_PIXELS), True),
)
