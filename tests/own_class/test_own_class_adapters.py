"""Blocks of classes that take tokens in another form compute a part of their tokens as they compute all of them."""

import functools
import itertools
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

from parallel_backend.own_class.adapters.adapters import Indexed, PixartAttention, PixartCrossAttention
from parallel_backend.own_class.adapters.animate2_forms import SameFrame
from parallel_backend.own_class.adapters.ltx_forms import ltx2_arguments
from parallel_backend.own_class.adapters.minimax_forms import minimax_h3_segments
from parallel_backend.own_class.adapters.seedvr_forms import CONDITION, InWindows, places_of, seedvr2_arguments
from parallel_backend.own_class.adapters.wan_forms import (
    MOTION,
    WanAnimateBlock,
    WanAnimateModel,
    name_of_face,
    put_faces_into_blocks,
)
from parallel_backend.own_class.built.building import build
from parallel_backend.own_class.calls.tried_calls import draw_weights
from parallel_backend.own_class.cuts.attention_calls import Rows, attention_by_rows
from parallel_backend.own_class.cuts.forms import formed, put_form
from tests.own_class.planted_tokens import optimized_attention
from tests.support.planted_comfyui import planted


@pytest.mark.parametrize("lacking", [(), (2,)])
def test_a_frame_sees_the_video_and_its_frame_of_the_pose(lacking):
    """Any rows in any order. Without warm-up keys of frames are not there yet."""
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 12, 2, 8, generator=g)
    queries, keys = (torch.randperm(12, generator=g) for _ in range(2))
    queries, keys = queries[:7], torch.stack([row for row in keys if int(row) // 3 not in lacking])
    attend = functools.partial(attention, None)
    found = SameFrame(3, 0.5)(attend, Rows(q[:, queries], k[:, keys], v[:, keys], queries, keys))
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
    put_form(WanAnimateModel, model)
    put_faces_into_blocks(model)
    assert {name_of_face(name) for name in model.state_dict()} == plain.state_dict().keys()
    seen = []
    for block in model.blocks:
        put_form(WanAnimateBlock, block)
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
        formed(WanAnimateModel, OfFaces)().face_motion(torch.zeros(1, 3, 1, 9, 8))


def ltx2_call(strengths=(1.0, 1.0), **more):
    """Two guides of a frame each behind four frames of 2 x 3 tokens. The second one leaves every other token out."""
    mask = torch.ones(1, 1, 6, 2, 3)
    mask[:, :, 0], mask[:, :, 5, :, ::2] = 0.0, -1.0
    guides = [{"pre_filter_count": 6, "strength": each, "pixel_mask": None} for each in strengths]
    given = {"denoise_mask": mask, "keyframe_idxs": torch.zeros(1, 3, 12, 2), "guide_attention_entries": guides, **more}
    native = SimpleNamespace(_downsample_mask_to_latent=lambda mask, *_shape: mask.flatten()[None])
    return ltx2_arguments(given, native, ())


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
    assert ltx2_arguments({"denoise_mask": mask, "frame_rate": 25}, None, ()) == {"frame_rate": 25}, "times tell it"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"denoise_mask": None}, "^latent_image: the conditioning has guides, but this latent lacks their mask"),
        (
            {"keyframe_idxs": torch.zeros(1, 3, 8, 2)},
            "^positive, negative: the guides have 8 tokens, which is not a whole number",
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


@pytest.mark.parametrize(("kind", "form", "text"), [(Compressed, PixartAttention, 0), (Across, PixartCrossAttention, 10)])
@torch.no_grad()
def test_tensor_ranks_heads_add_up_to_those_of_pixart(kind, form, text):
    torch.manual_seed(0)
    given = (torch.randn(2, 6, WIDTH), *([torch.randn(1, text, WIDTH)] if text else []))
    plain, whole = kind(), formed(form, kind)()
    whole.load_state_dict(plain.state_dict())
    expected = plain(*given)
    assert torch.equal(whole(*given), expected)
    total = torch.zeros_like(expected)
    for rank in range(2):
        shard = formed(form, kind)()
        shard.num_heads = HEADS // 2
        for name, layer in plain.named_children():
            if isinstance(layer, nn.Linear):
                axis = 1 if name == "proj" else 0
                parts = layer.weight.chunk(layer.weight.shape[axis] // WIDTH, axis)
                part = torch.cat([each.chunk(2, axis)[rank] for each in parts], axis)
                getattr(shard, name).weight = nn.Parameter(part)
        total += shard(*given)
    assert torch.allclose(total, expected, atol=1e-6)


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


WINDOWS = InWindows(((2, 1), (3,), (1, 2)))
GRID, WORDS = (3, 3, 3), 5


@pytest.mark.parametrize("queries", [range(32), range(9, 27), (31, 28, 4, 0, 30, 22), (29,)])
def test_rows_of_any_order_attend_in_windows_as_the_whole_video_does(queries):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 32, 2, 8, generator=g) for _ in range(3))
    expected, of_text, tokens = torch.empty_like(q), [], torch.arange(27).view(GRID)
    for frames, columns in itertools.product((slice(0, 2), slice(2, 3)), (slice(0, 1), slice(1, 3))):
        rows = torch.cat((tokens[frames, :, columns].flatten(), torch.arange(27, 32)))
        weights = torch.einsum("bqhd,bkhd->bhqk", q[:, rows], k[:, rows]).div(8**0.5).softmax(-1)
        out = torch.einsum("bhqk,bkhd->bqhd", weights, v[:, rows])
        expected[:, rows], of_text = out, [*of_text, out[:, -WORDS:]]
    expected[:, 27:] = torch.stack(of_text).mean(0)
    assert torch.allclose(attention_by_rows(WINDOWS, q, k, v), expected, atol=1e-6)

    def attend(*tensors):
        return nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in tensors)).transpose(1, 2)

    numbers, keys = torch.tensor(list(queries)), torch.randperm(32, generator=g)
    found = WINDOWS(attend, Rows(q[:, numbers], k[:, keys], v[:, keys], numbers, keys))
    assert torch.allclose(found, expected[:, numbers], atol=1e-6)


def test_places_are_those_in_a_window_behind_the_text_or_around_its_middle():
    (video, text), (around, middle) = (places_of(WINDOWS, each, WORDS, torch.device("cpu")) for each in (False, True))
    assert video.view(*GRID, 3)[:, 0, 0, 0].tolist() == [5, 6, 5]
    assert video.view(*GRID, 3)[0, 0, :, 2].tolist() == [0, 0, 1]
    assert text.tolist() == [[number] * 3 for number in range(WORDS)]
    assert around.view(*GRID, 3)[:, 2, 2].tolist() == [[-1, 1, 1], [1, 1, 1], [-1, 1, 1]]
    assert middle.tolist() == [[0.0] * 3] * WORDS


@pytest.mark.parametrize(
    ("sizes", "given", "why"),
    [
        ((3, 4, 6), None, "^positive, negative: .* Connect an Apply SeedVR2 Conditioning node"),
        ((3, 4, 6), (2, 4, 6), "^latent_image: its 3 x 4 x 6 .* are not the 2 x 4 x 6 .* of the conditioning"),
        ((3, 5, 6), (3, 5, 6), "^latent_image: SeedVR2 needs even numbers of latent rows and columns, not 5 x 6"),
    ],
)
def test_a_video_that_seedvr2_cannot_make_sharper_is_refused(sizes, given, why):
    with pytest.raises(ValueError, match=why):
        seedvr2_arguments({} if given is None else {CONDITION: torch.zeros(1, 17, *given)}, None, sizes)


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
