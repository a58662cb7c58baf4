"""Small classes in the form of ComfyUI's Qwen-Image 2.1: words and reference pictures in front of the latent's tokens, which
they do not see. Words see those before them, pictures all up to their own end. The adapter of that class is theirs."""

from typing import Any

import torch
from torch import nn

from tests.own_class.planted_classes import WIDTH
from tests.own_class.planted_tokens import SIZE, optimized_attention, rows


def note(_tokens: int) -> None:
    """Called with how many tokens a block computes, for tests that count them."""


class Block(nn.Module):
    def __init__(self, layers: Any):
        super().__init__()
        self.qkv, self.out = layers.Linear(WIDTH, 3 * WIDTH), layers.Linear(WIDTH, WIDTH)

    def forward(self, x, mod, pe, attn_fn, prefix_len, transformer_options):
        note(x.shape[1])
        at_zero, at_time = mod
        scale = torch.cat((at_zero.expand(len(x), prefix_len, -1), at_time.expand(-1, x.shape[1] - prefix_len, -1)), 1)
        q, k, v = (each.unflatten(-1, (-1, SIZE)) for each in self.qkv(x * (1 + scale)).chunk(3, dim=-1))
        x += scale * self.out(torch.tanh(attn_fn(q * (1 + pe), k * (1 + pe), v, q.shape[2])))
        return x


def causal_attention(segments):
    """`segments`: (start, stop, mask) of tokens that see those before `stop`; words have a mask."""

    def attend(q, k, v, heads):
        parts = ((start, stop, mask, (k[:, :stop], v[:, :stop])) for start, stop, mask in segments)
        return torch.cat([seen(q[:, start:stop], *keys, heads, mask) for start, stop, mask, keys in parts], 1)

    return attend


def seen(q, k, v, heads, mask):
    return optimized_attention(*(each.flatten(2) for each in (q, k, v)), heads, mask=mask)


class Prefixed(nn.Module):
    """Latent [B, 4, T, H, W] -> the same. `ref_latents` [B, 4, T, h, w] stand in front of the words number `image_slots`."""

    kind = "QwenImage21"
    block: Any = Block

    def __init__(self, operations: Any, dtype: Any, device: Any):
        super().__init__()
        sides = (4, WIDTH), (WIDTH, 4), (1, WIDTH), (16, WIDTH)
        self.inp, self.out, self.time, self.text = (operations.Linear(*side) for side in sides)
        self.transformer_blocks = nn.ModuleList(self.block(operations) for _ in range(4))

    def build_sequence(self, x, context, ref_latents, image_slots):
        words, parts, segments, stop = self.text(context), [], [], 0
        ends = (*image_slots, words.shape[1])
        for begin, end, picture in zip((0, *image_slots), ends, (*ref_latents, x), strict=True):
            for part, count in ((words[:, begin:end], end - begin), (self.tokens(picture), picture[0, 0].numel())):
                start, stop = stop, stop + count
                mask = torch.ones(stop - start, stop, dtype=torch.bool, device=x.device).tril(start)
                segments.append((start, stop, None if len(parts) % 2 else mask))
                parts.append(part)
        return torch.cat(parts, 1), rows(stop, x)[:, :, None], [each for each in segments if each[0] < each[1]]

    def forward(self, x, timestep, context=None, ref_latents=(), image_slots=(), transformer_options=None, **_extra):
        h, pe, segments = self.build_sequence(x, context, ref_latents, image_slots)
        prefix = h.shape[1] - x[0, 0].numel()
        mod = self.modulation(timestep / 1000.0)
        for block in self.transformer_blocks:
            h = block(h, mod, pe, causal_attention(segments), prefix, transformer_options)
        return self.out(h[:, prefix:]).transpose(1, 2).reshape(x.shape)

    def tokens(self, latent):
        return self.inp(latent.flatten(2).transpose(1, 2))

    def modulation(self, t):
        """At time 0 [1, 1, WIDTH], for words and references, and at the call's [B, 1, WIDTH]."""
        return tuple(torch.tanh(self.time(each[:, None]))[:, None] for each in (t[:1] * 0, t))


class PrefixAsItIs(Prefixed):
    """No adapter has its blocks attend by rows."""

    kind = "Planted"


class WordsAtTime(Prefixed):
    """Words that each call has others of, although the adapter says that all have the same."""

    def modulation(self, t):
        _, at_time = super().modulation(t)
        return at_time[:1], at_time
