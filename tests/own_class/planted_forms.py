"""Small classes in the form of ComfyUI's whose calls or blocks have another form than one latent and tensors by name: nested
latents, tokens on axes of frames, rows and columns as Cosmos has, numbers of blocks as LTX-2 is told, a gate as H3 has."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.own_class.planted_classes import WIDTH
from tests.own_class.planted_tokens import HEADS, Mixing, Tokens, optimized_attention, rows

CHANNELS, STEREO = 3, 2
"""Of sound [B, CHANNELS, STEREO, T]."""
LOUD = 1.0


class SoundToo(Tokens):
    """A video and its sound, each at a time of its own, in one stream."""

    def __init__(self, operations, dtype, device):
        super().__init__(operations, dtype, device)
        self.sound_in, self.sound_out = (
            operations.Linear(*sides) for sides in ((CHANNELS * STEREO, WIDTH), (WIDTH, CHANNELS * STEREO))
        )

    def forward(self, x, timestep, context=None, **_extra):
        video, sound = x
        of_video, of_sound = timestep if isinstance(timestep, tuple) else (timestep, timestep)
        emb = torch.tanh(self.time(of_video[:, None] / 1000)) - self.time(of_sound[:, None] / 1000)
        h, s = self.inp(video.flatten(2).transpose(1, 2)), self.sound_in(sound.flatten(1, 2).transpose(1, 2))
        h, s = self.both(h + self.pos[:, : h.shape[1]], s, emb + self.text(context).mean(1))
        return [self.out(h).transpose(1, 2).reshape(video.shape), self.sound_out(s).transpose(1, 2).reshape(sound.shape)]

    def both(self, h, s, emb):
        both = self.mixed(torch.cat((s, h), 1), None, emb, None)
        return both[:, s.shape[1] :], both[:, : s.shape[1]]


class Pairs(SoundToo):
    """Its blocks take and return both streams as one argument."""

    class block(Mixing):
        def forward(self, x: Any, emb: torch.Tensor, table: torch.Tensor, **mask: Any) -> Any:
            h, s = super().forward(torch.cat(x, 1), emb, table).split([part.shape[1] for part in x], 1)
            return h, s

    def both(self, h, s, emb):
        table = rows(h.shape[1] + s.shape[1], h)
        for block in self.blocks:
            h, s = block((h, s), emb, table)
        return h, s


class SoundMixedInLate(SoundToo):
    """Behind a comparison, so that a single change of the sound does not show."""

    def both(self, h, s, emb):
        return super().both(h + 0.1 * (s.abs().amax((1, 2), keepdim=True) > LOUD), s, emb)


class PictureInSound(SoundToo):
    """The picture is mixed into the sound's tokens in front of the blocks."""

    def both(self, h, s, emb):
        return super().both(h, s + 0.1 * h.mean(1, keepdim=True), emb)


class SoundBehind(SoundToo):
    """What the blocks make of the sound is added to the picture."""

    def both(self, h, s, emb):
        h, s = super().both(h, s, emb)
        return h + 0.1 * s.mean(1, keepdim=True), s


class TakesPayload(Tokens):
    """A dictionary with tensors, one of them in another, and a number that only says how a random part is drawn."""

    def forward(self, x, timestep, context=None, payload=None, **extra):
        words = context * payload["gain"] + payload["more"]["bias"]
        noise = torch.randn(4, generator=torch.Generator().manual_seed(payload["seed"]))
        return super().forward(x, timestep, words + noise.mean(), **extra)


class ReadsSigmas(Tokens):
    """As HunyuanVideo with mean flow: it looks up the next step's time."""

    def forward(self, x, timestep, context=None, transformer_options=None, **extra):
        of_call, of_run = (transformer_options[name] for name in ("sigmas", "sample_sigmas"))
        (at,) = torch.where(of_call[0] == of_run)[0]
        self.is_last = int(at) == len(of_run) - 2
        out = super().forward(x, timestep, context + of_run[at + 1], **extra)
        del self.is_last
        return out


class SkipsInLastStep(ReadsSigmas):
    """Behind its blocks, what the first one has returned."""

    def mixed(self, h, words, emb, t):
        table, outputs = rows(h.shape[1], h), []
        for block in self.blocks:
            h = block(h, emb, table)
            outputs.append(h)
        return h + outputs[0] if self.is_last else h


class RefinesText(Tokens):
    """ComfyUI has its text pass a layer once, and reads the weight of one in it by itself."""

    def __init__(self, operations, dtype, device):
        super().__init__(operations, dtype, device)
        self.refiner = Refiner(operations)

    def preprocess_text_embeds(self, text: torch.Tensor, twice: bool = False) -> torch.Tensor:
        return self.refiner(self.refiner(text) if twice else text)


class Refiner(torch.nn.Module):
    def __init__(self, layers: Any):
        super().__init__()
        self.one, self.two = layers.Linear(16, 16), layers.Linear(16, 16)
        self.register_buffer("scale", torch.empty(16))

    def forward(self, text):
        return torch.tanh(F.linear(self.one(text) * self.scale, self.two.weight))


class Axes(Mixing):
    """[B, T, H, W, D], and a place of each token in the same form."""

    def forward(self, x: torch.Tensor, places: torch.Tensor, emb: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        mixed = super().forward((x + places).flatten(1, 3), emb, table)
        return x + self.last((mixed.unflatten(1, x.shape[1:4]) - x) * torch.sigmoid(emb[:, None, None, None]))

    def last(self, x: torch.Tensor) -> torch.Tensor:
        return x


class OnAxes(Tokens):
    block: Any = Axes

    def forward(self, x, timestep, context=None, **_extra):
        t = timestep / 1000.0
        emb = torch.tanh(self.time(t[:, None])) + self.text(context).mean(1)
        h, tokens = self.inp(x.movedim(1, -1)), x[0, 0].numel()
        places = self.pos[:, :tokens].unflatten(1, x.shape[2:]).expand(len(x), -1, -1, -1, -1)
        return self.out(self.blocks_of(h, places, emb, rows(tokens, h))).movedim(-1, 1)

    def blocks_of(self, h, places, emb, table):
        for block in self.blocks:
            h = block(h, places, emb, table)
        return h


class PoolsEachFrame(OnAxes):
    """The mean of each frame."""

    class block(Axes):
        def last(self, x):
            return x + 0.1 * x.mean((2, 3), keepdim=True)


TOLD = "stg_self_attn_blocks"


class Passing(Mixing):
    """Gives its values through where it is told. It attends all the same."""

    def forward(self, x, emb, table, told=False):
        q, k, v = self.turned(x, table)
        out = optimized_attention(q, k, v, HEADS, skip_reshape=True)
        return x + self.out(torch.tanh(v.transpose(1, 2).flatten(2) if told else out))


class Numbered(Tokens):
    block = Passing

    def forward(self, x, timestep, context=None, transformer_options=None, **_extra):
        told = (transformer_options or {}).get(TOLD, ())
        h = self.inp(x.flatten(2).transpose(1, 2))
        h = h + self.pos[:, : h.shape[1]] + self.text(context).mean(1, keepdim=True)
        emb, table = torch.tanh(self.time(timestep[:, None] / 1000.0)), rows(h.shape[1], h)
        for number, block in enumerate(self.blocks):
            h = block(h, emb, table, number in told)
        return self.out(h).transpose(1, 2).reshape(x.shape)


class LeavesCallOut(Numbered):
    """Does not attend where it is told, as ComfyUI's LTX-2."""

    class block(Passing):
        def forward(self, x, emb, table, told=False):
            if not told:
                return super().forward(x, emb, table)
            return x + self.out(torch.tanh(self.turned(x, table)[2].transpose(1, 2).flatten(2)))


class PoolsWhereTold(Numbered):
    class block(Passing):
        def forward(self, x, emb, table, told=False):
            x = super().forward(x, emb, table, told)
            return x + x.mean(1, keepdim=True) if told else x


class MixesEntries(Numbered):
    """Where it is told, entries of a batch get each other's values."""

    class block(Passing):
        def forward(self, x, emb, table, told=False):
            x = super().forward(x, emb, table, told)
            return x + x.mean(0, keepdim=True) if told else x


class GatedAttention(nn.Module):
    turned = Mixing.turned

    def __init__(self, layers):
        super().__init__()
        self.q, self.kv, self.out = (layers.Linear(WIDTH, width) for width in (WIDTH, 2 * WIDTH, WIDTH))
        self.to_gate_compress = layers.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, table):
        return self.out(optimized_attention(*self.turned(x, table), HEADS, skip_reshape=True))


class GatedBlock(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.mod, self.attn = layers.Linear(WIDTH, 2 * WIDTH), GatedAttention(layers)

    def forward(self, x, emb, table):
        shift, gate = self.mod(emb)[:, None].chunk(2, dim=-1)
        return x + gate * torch.tanh(self.attn(x + shift, table))


class Gated(Tokens):
    """Words and video in one stream."""

    block = GatedBlock

    def mixed(self, h, words, emb, t):
        h = torch.cat((words, h), 1)
        table = rows(h.shape[1], h)
        for block in self.blocks:
            h = block(h, emb, table)
        return h[:, words.shape[1] :]
