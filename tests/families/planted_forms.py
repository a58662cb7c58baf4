"""Small classes in the form of ComfyUI's whose calls or blocks have another form than one latent and tensors by name."""

from typing import Any

import torch
import torch.nn.functional as F

from tests.families.planted_classes import WIDTH
from tests.families.planted_tokens import Mixing, Tokens, rows

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
