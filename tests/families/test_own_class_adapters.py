"""Blocks of classes that take tokens in another form compute a part of their tokens as they compute all of them."""

import functools
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

from parallel_backend.families.own_class.adapters import (
    Indexed,
    cosmos_predict2_block,
    krea2_block,
    pixart_attention,
    pixart_cross_attention,
    qwen_image_block,
    sent,
)
from parallel_backend.families.own_class.animate2_forms import SameFrame
from parallel_backend.families.own_class.building import build
from parallel_backend.families.own_class.minimax_forms import (
    minimax_h3_block,
    minimax_h3_segments,
)
from parallel_backend.families.own_class.tried_calls import draw_weights
from parallel_backend.families.own_class.wan_forms import (
    MOTION,
    name_of_face,
    put_faces_into_blocks,
    wan_animate_block,
    wan_animate_model,
    wan_block,
)
from tests.families.planted_tokens import optimized_attention
from tests.support.planted_comfyui import planted


class WithTimes(nn.Module):
    """As Wan's block: repeats values of frames [B, F, 6, D] over the tokens that it gets."""

    def forward(self, x, e, freqs):
        repeats = -(-x.shape[1] // e.shape[1]) if e.shape[1] > 1 else 1
        return x * e.repeat_interleave(repeats, dim=1)[:, : x.shape[1] if e.shape[1] > 1 else 1].sum(2) + freqs


@pytest.mark.parametrize("tokens", [6, 5])
def test_frames_times_reach_each_token_of_a_part(tokens):
    g = torch.Generator().manual_seed(0)
    x, freqs = torch.randn(2, tokens, 4, generator=g), torch.randn(1, tokens, 4, generator=g)
    e, block = torch.randn(2, 3, 6, 4, generator=g), wan_block(WithTimes)()
    given = {}
    block.forward = lambda x, e, freqs: given.update(e=e) or type(block).forward(block, x, e=e, freqs=freqs)
    whole, plain = block(x, e=e, freqs=freqs), WithTimes()(x, e, freqs)
    assert torch.equal(whole, plain)
    data, index, count = given["e"]
    for part in (slice(0, 1), slice(1, 4), slice(4, 6)):
        found = block.forward(x[:, part], e=Indexed(data, index[part], count), freqs=freqs[:, part])
        assert torch.equal(found, plain[:, part])


@pytest.mark.parametrize("lacking", [(), (2,)])
def test_a_frame_sees_the_video_and_its_frame_of_the_pose(lacking):
    """Any rows in any order. Without warm-up keys of frames are not there yet."""
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 12, 2, 8, generator=g)
    queries, keys = (torch.randperm(12, generator=g) for _ in range(2))
    queries, keys = queries[:7], torch.stack([row for row in keys if int(row) // 3 not in lacking])
    attend = functools.partial(attention, None)
    found = SameFrame(3, 0.5)(attend, q[:, queries], k[:, keys], v[:, keys], queries, keys)
    pose, same = (keys >= 3).expand(len(queries), -1), queries[:, None] // 3 == keys // 3
    both = (
        torch.cat((k[:, keys, :, :4], k[:, keys, :, 4:]), dim=1),
        torch.cat((v[:, keys, :, :4], v[:, keys, :, 4:] / 2), dim=1),
    )
    seen = torch.cat((torch.ones_like(same), same & pose), dim=1)
    assert torch.allclose(found[..., :4], attention(seen, q[:, queries, :, :4], *both), atol=1e-6)
    of_pose = attention(pose, q[:, queries, :, 4:], k[:, keys, :, 4:], v[:, keys, :, 4:])
    assert torch.allclose(found[..., 4:], of_pose, atol=1e-6)


def attention(mask, *tensors):
    """[B, Q, H, D]. `mask`: [Q, K]."""
    q, k, v = (each.transpose(1, 2) for each in tensors)
    return nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)


class LooksAtFaces(nn.Module):
    """As Wan Animate's modules for faces: tokens [B, T x S, D] of frames that attend to motion [B, T, N, D]."""

    def __init__(self):
        super().__init__()
        self.heads_num = 2
        self.linear1_kv, self.linear1_q, self.linear2 = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 8)
        self.q_norm, self.k_norm = nn.RMSNorm(4), nn.RMSNorm(4)
        self.pre_norm_feat, self.pre_norm_motion = nn.LayerNorm(8), nn.LayerNorm(8)

    def forward(self, x, motion_vec):
        q = self.linear1_q(self.pre_norm_feat(x)).unflatten(1, (motion_vec.shape[1], -1)).unflatten(-1, (2, 4))
        k, v = self.linear1_kv(self.pre_norm_motion(motion_vec)).unflatten(-1, (2, 2, 4)).unbind(-3)
        q, k, v = (each.transpose(2, 3) for each in (self.q_norm(q), self.k_norm(k), v))
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.linear2(out.transpose(2, 3).flatten(3).flatten(1, 2))


class Doubles(nn.Module):
    def forward(self, x, transformer_options):
        assert not transformer_options
        return 2 * x


class OfFaces(nn.Module):
    """As Wan Animate's model. Four pictures give the motion of one frame, behind one of zeros."""

    patch_size = 1, 2, 2

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Doubles() for _ in range(6))
        self.face_adapter = nn.Module()
        self.face_adapter.fuser_blocks = nn.ModuleList(LooksAtFaces() for _ in range(2))

    def after_patch_embedding(self, x, _pose, faces):
        if faces is None:
            return x, None
        motion = torch.stack([part.mean((1, 2, 3, 4)) for part in faces.split(4, dim=2)], dim=1)
        motion = motion[..., None, None] * torch.arange(1.0, 6.0)[:, None] * torch.ones(8)
        return x, nn.functional.pad(motion, (0, 0, 0, 0, 1, x.shape[2]))[:, : x.shape[2]]

    def forward_orig(self, x, t, context, face_pixel_values=None, transformer_options=None):
        x, motion = self.after_patch_embedding(x, None, face_pixel_values)
        x = x[..., ::2, ::2].flatten(2).transpose(1, 2)
        for number, block in enumerate(self.blocks):
            x = block(x, transformer_options=transformer_options)
            if number % 5 == 0 and motion is not None:
                x = x + self.face_adapter.fuser_blocks[number // 5](x, motion)
        return x


@pytest.mark.parametrize("frames", [2, 3, 5])
def test_motion_of_faces_is_made_before_and_each_token_sees_its_frames(frames):
    g = torch.Generator().manual_seed(0)
    x, faces = torch.randn(2, 8, frames, 4, 6, generator=g), torch.randn(2, 3, 5, 512, 512, generator=g)
    plain, model = OfFaces(), OfFaces()
    model.load_state_dict(plain.state_dict())
    model.__class__ = wan_animate_model(OfFaces)
    put_faces_into_blocks(model)
    assert {name_of_face(name) for name in model.state_dict()} == plain.state_dict().keys()
    seen = []
    for block in model.blocks:
        block.__class__ = wan_animate_block(Doubles)
        block.register_forward_pre_hook(lambda *given: seen.append(given[1:]), with_kwargs=True)
    motion, options = model.face_motion(faces), {}
    assert motion.shape == (2, 3, 5, 8)
    whole = model.forward_orig(x, None, None, motion, options)
    assert options == {} and torch.allclose(whole, plain.forward_orig(x, None, None, faces, {}), atol=1e-5)
    assert torch.equal(model.forward_orig(x, None, None), plain.forward_orig(x, None, None, None, {}))
    (tokens,), named = seen[0]
    data, index, count = named["transformer_options"][MOTION]
    assert index.tolist() == [number // 6 for number in range(6 * frames)] and count == 6 * frames
    first = model.blocks[0]
    for part in (torch.tensor([3]), torch.tensor([11, 0, 5, 6])):
        found = first.forward(tokens[:, part], transformer_options={MOTION: Indexed(data, index[part], count)})
        assert torch.allclose(found, first.forward(tokens, **named)[:, part], atol=1e-6)


def test_a_face_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"^positive, negative: the face video is 8 x 9, this model needs 512 x 512"):
        wan_animate_model(OfFaces)().face_motion(torch.zeros(1, 3, 1, 9, 8))


def ltx2_call(strengths=(1.0, 1.0), **more):
    """Two guides of a frame each behind four frames of 2 x 3 tokens. The second one leaves every other token out."""
    mask = torch.ones(1, 1, 6, 2, 3)
    mask[:, :, 0], mask[:, :, 5, :, ::2] = 0.0, -1.0
    guides = [{"pre_filter_count": 6, "strength": each, "pixel_mask": None} for each in strengths]
    given = {"denoise_mask": mask, "keyframe_idxs": torch.zeros(1, 3, 12, 2), "guide_attention_entries": guides, **more}
    return sent("LTXAV", given, SimpleNamespace(_downsample_mask_to_latent=lambda mask, *_shape: mask.flatten()[None]))


def test_guides_of_ltx2_are_told_by_tokens():
    found = ltx2_call()
    assert found.keys() == {"keyframe_idxs", "spatial", "unseen"}, "weights of 1 change nothing"
    assert (found["unseen"] != 0).nonzero()[:, 1].tolist() == [30, 32, 33, 35]
    assert ltx2_call((0.5, 2.0))["guide_weights"].tolist() == [[0.5] * 6 + [1.0, 2.0, 1.0, 1.0, 2.0, 1.0]]
    half = {"pre_filter_count": 6, "strength": 0.5, "latent_shape": (1, 1, 2), "pixel_mask": torch.tensor([0.4, 0.8])}
    masked = ltx2_call(guide_attention_entries=[half | {"pixel_mask": None}, half])
    assert masked["guide_weights"][0, 6:].tolist() == pytest.approx([1, 0.2, 1, 1, 0.4, 1])
    mask = torch.ones(1, 1, 4, 2, 3)
    mask[:, :, 0] = 0.0
    assert sent("LTXAV", {"denoise_mask": mask, "frame_rate": 25}, None) == {"frame_rate": 25}, "times tell it"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"denoise_mask": None}, "^latent_image: the conditioning has guides, and this latent is without the mask"),
        (
            {"keyframe_idxs": torch.zeros(1, 3, 8, 2)},
            "^positive, negative: the guides have 8 tokens, which is no whole number",
        ),
    ],
)
def test_guides_that_do_not_fit_the_latent_are_refused(change, why):
    with pytest.raises(ValueError, match=why):
        ltx2_call(**change)


WIDTH, HEADS = 12, 4


class Compressed(nn.Module):
    """As PixArt's attention: its heads are as wide as its input says."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.sr_ratio, self.q_norm, self.k_norm = HEADS, 1, nn.Identity(), nn.Identity()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, mask=None, HW=None, block_id=None):
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, self.num_heads, x.shape[-1] // self.num_heads).unbind(2)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        return self.proj(optimized_attention(q, k, v, self.num_heads, skip_reshape=True).view(x.shape))


class Across(nn.Module):
    """As its attention to text, which all entries of a batch have in a row."""

    def __init__(self):
        super().__init__()
        self.num_heads = HEADS
        self.q_linear, self.kv_linear = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, cond, mask=None):
        k, v = self.kv_linear(cond).view(1, -1, 2, WIDTH).unbind(2)
        q, k, v = (each.view(len(x), -1, WIDTH) for each in (self.q_linear(x), k, v))
        return self.proj(optimized_attention(q, k, v, self.num_heads))


@pytest.mark.parametrize(("kind", "form", "text"), [(Compressed, pixart_attention, 0), (Across, pixart_cross_attention, 10)])
@torch.no_grad()
def test_tensor_ranks_heads_add_up_to_those_of_pixart(kind, form, text):
    torch.manual_seed(0)
    given = (torch.randn(2, 6, WIDTH), *([torch.randn(1, text, WIDTH)] if text else []))
    plain, whole = kind(), form(kind)()
    whole.load_state_dict(plain.state_dict())
    expected = plain(*given)
    assert torch.equal(whole(*given), expected)
    total = torch.zeros_like(expected)
    for rank in range(2):
        shard = form(kind)()
        shard.num_heads = HEADS // 2
        for name, layer in plain.named_children():
            if isinstance(layer, nn.Linear):
                axis = 1 if name == "proj" else 0
                parts = layer.weight.chunk(layer.weight.shape[axis] // WIDTH, axis)
                part = torch.cat([each.chunk(2, axis)[rank] for each in parts], axis)
                getattr(shard, name).weight = nn.Parameter(part)
        total += shard(*given)
    assert torch.allclose(total, expected, atol=1e-6)


class AtZero(nn.Module):
    """As Qwen-Image's block and Krea 2's: references, from a token on, have the second modulation [2 B, D]."""

    def forward(self, hidden_states, temb, timestep_zero_index=None, transformer_options=None):
        shifted, gate = self._modulate(hidden_states, temb, timestep_zero_index)
        return self._apply_gate(torch.tanh(shifted), hidden_states, gate, timestep_zero_index)

    def _modulate(self, x, mod_params, timestep_zero_index=None):
        shift, scale, gate = (each.chunk(2) for each in mod_params[:, None].chunk(3, dim=-1))
        parts = (x[:, :timestep_zero_index], x[:, timestep_zero_index:])
        shifted = [shift[n] + part * (1 + scale[n]) for n, part in enumerate(parts)]
        return torch.cat(shifted, 1), gate

    def _apply_gate(self, x, y, gate, timestep_zero_index=None):
        parts = (x[:, :timestep_zero_index], x[:, timestep_zero_index:])
        return y + torch.cat([part * gate[n] for n, part in enumerate(parts)], 1)


class InOne(nn.Module):
    """As Krea 2's block, which has the same for tokens of one time."""

    def forward(self, x, vec, freqs, mask=None, transformer_options=None):
        shift, scale, gate = vec.chunk(3, dim=-1)
        return x + gate * torch.tanh(shift + x * (1 + scale))


@pytest.mark.parametrize("adapt", ["qwen", "krea2"])
def test_tokens_at_time_zero_are_modulated_for_it_in_a_part(adapt):
    g = torch.Generator().manual_seed(0)
    x, both = torch.randn(2, 6, 4, generator=g), torch.randn(4, 12, generator=g)
    options = {"reference_image_num_tokens": [1, 2]}
    plain = AtZero()(x, both, 3)
    given = {}
    block = qwen_image_block(AtZero)() if adapt == "qwen" else krea2_block(InOne)()
    kind = type(block)
    both = both if adapt == "qwen" else both[:, None]

    def run(x, **named):
        forward = kind.forward if adapt == "qwen" else functools.partial(kind.forward, freqs=None)
        return forward(block, x, both, **named)

    def called(x=None, *_others, hidden_states=None, timestep_zero_index=None, **_named):
        given["at_zero"] = timestep_zero_index
        return run(x if x is not None else hidden_states, timestep_zero_index=timestep_zero_index)

    block.forward = called
    named = {"timestep_zero_index": 3, "transformer_options": options}
    whole = block(hidden_states=x, temb=both, **named) if adapt == "qwen" else block(x, both, None, **named)
    assert torch.allclose(whole, plain, atol=1e-6)
    for part in (slice(0, 2), slice(2, 5), torch.tensor([5, 0, 4])):
        found = run(x[:, part], timestep_zero_index=given["at_zero"][part])
        assert torch.allclose(found, plain[:, part], atol=1e-6)


class ByFrame(nn.Module):
    """As Cosmos Predict2's block: a modulation of each frame of tokens [B, T, H, W, D]."""

    def forward(self, x, emb, context, rope_emb_L_1_1_D=None, adaln_lora_B_T_3D=None):
        return x * (emb + adaln_lora_B_T_3D)[:, :, None, None] + context


def test_frames_of_tokens_on_three_axes_reach_a_part():
    g = torch.Generator().manual_seed(0)
    x, emb, lora = (torch.randn(2, *sides, generator=g) for sides in ((3, 2, 2, 4), (3, 4), (3, 4)))
    rope, context, block = torch.zeros(1, 12, 1, 1), torch.ones(4), cosmos_predict2_block(ByFrame)()
    kind, given = type(block), []
    block.forward = lambda x, emb, *others, **named: given.append(emb) or kind.forward(block, x, emb, *others, **named)
    whole = block(x, emb, context, rope_emb_L_1_1_D=rope, adaln_lora_B_T_3D=lora)
    plain = ByFrame()(x, emb, context, adaln_lora_B_T_3D=lora)
    assert torch.equal(whole, plain)
    data, index, count = given[0]
    for part in (slice(0, 12), slice(3, 9)):
        own = x.flatten(1, 3)[:, None, None, part]
        found = kind.forward(block, own, Indexed(data, index[part], count), context, adaln_lora_B_T_3D=lora)
        assert torch.equal(found, plain.flatten(1, 3)[:, None, None, part])


class InRuns(nn.Module):
    """As MiniMax H3's block."""

    def forward(self, x, t_emb, mod_segments, rope_freqs, transformer_options=None):
        self.seen = mod_segments
        return torch.cat([x[start:stop] * t_emb[row] for start, stop, row in mod_segments]) + rope_freqs


@pytest.mark.parametrize("masked", [False, True])
def test_runs_of_tokens_reach_each_token_of_a_part(masked):
    g = torch.Generator().manual_seed(0)
    x, freqs, times = (torch.randn(count, 4, generator=g) for count in (7, 7, 3))
    runs = [(0, 2, 1), (2, 7, torch.tensor([0, 0, 2, 2, 1]) if masked else 2)]
    block, given = minimax_h3_block(InRuns)(), []
    block.forward = lambda x, t, rows, freqs, **more: given.append(rows) or type(block).forward(block, x, t, rows, freqs)
    for _ in range(2):
        whole = block(x, times, runs, freqs, transformer_options={})
    plain = InRuns()(x, times, runs, freqs)
    assert torch.equal(whole, plain)
    assert given[0] is given[1], "blocks of a call share them"
    assert all(isinstance(row, int) for _, _, row in block.seen)
    part = slice(1, 5)
    found = type(block).forward(block, x[None, part], times, given[0][part], freqs[part])
    assert torch.equal(found[0], plain[part])


def test_segments_of_minimax_h3_are_those_of_its_layout():
    latents = torch.zeros(1, 24, 3, 5, 6), torch.zeros(1, 32, 2, 7)
    sizes = (4, 3, 6, 6, 7)
    kinds = (0, 4, "text"), (4, 6, "ref_img"), (6, 20, "audio"), (20, 47, "video")
    layout = SimpleNamespace(signature=sizes, segments=list(kinds))
    of_another = SimpleNamespace(signature=(5, *sizes[1:]), segments=[])
    expected = ((4, "rest"), (2, "rest"), (14, "sound"), (27, "video")), (3, 3, 3)
    arguments = {"context": torch.zeros(1, 4, 8), "minimax_payload": {"layout": layout}}
    assert minimax_h3_segments(latents, arguments, nn.Module) == expected
    made = []
    module = SimpleNamespace(PackedLayout=lambda *given, **named: made.append((given, named)) or layout)
    native = type("Native", (), {"__module__": "planted_h3"})
    arguments["minimax_payload"] = {"layout": of_another, "refs": ["one"]}
    with mock.patch.dict(sys.modules, {"planted_h3": module}):
        assert minimax_h3_segments(latents, arguments, native) == expected
    assert made == [(sizes, {"keyframes": None, "refs": ["one"]})]


@pytest.mark.usefixtures("comfyui")
@pytest.mark.parametrize("pictures", [(), (1, 4)], ids=["words alone", "pictures between them"])
def test_a_prefix_by_rows_is_what_the_class_itself_computes(pictures):
    g = torch.Generator().manual_seed(0)
    by_rows, as_it_is = (build(planted(name)) for name in ("Prefixed", "PrefixAsItIs"))
    draw_weights(by_rows, 7)
    as_it_is.load_state_dict(by_rows.state_dict(), assign=True)
    x, context = torch.randn(2, 4, 1, 4, 6, generator=g), torch.randn(2, 5, 16, generator=g)
    references = [torch.randn(2, 4, 1, 3, 5, generator=g) for _ in pictures]
    given = x, torch.tensor([700.0, 300.0]), context, references, pictures
    with torch.no_grad():
        assert torch.allclose(by_rows(*given), as_it_is(*given), atol=1e-6)
