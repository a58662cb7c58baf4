"""Small classes whose blocks have tokens of reference pictures beside the latent's, which bands share out. Most have one
thing that goes wrong then."""

import torch

from tests.own_class.planted_bands import Banded
from tests.own_class.planted_classes import LATE
from tests.own_class.planted_forms import SoundToo


class Refers(Banded):
    """One stream: the latent, then its references."""

    def forward(self, x, timestep, context=None, ref_latents=(), **_extra):
        self.pictures = torch.cat([self.inp(each.flatten(2).transpose(1, 2)) for each in ref_latents], 1)
        out = super().forward(x, timestep, context)
        del self.pictures
        return out

    def mixed(self, h, words, emb, t):
        references = self.between(self.pictures, h, t)
        parts = {"words": words, "latent": h, "references": references}
        both = super().mixed(torch.cat([parts[kind] for kind in self.layout], 1), words, emb, t)
        lengths = [parts[kind].shape[1] for kind in self.layout]
        left = dict(zip(self.layout, both.split(lengths, 1), strict=True))
        return self.left(left["latent"], left["references"], t)

    layout = "latent", "references"

    def between(self, references, h, t):
        return references

    def left(self, h, references, t):
        return h


class WordsReferences(Refers):
    layout = "words", "references", "latent"


class LatentBetween(Refers):
    layout = "words", "latent", "references"


class LatentInReferences(Refers):
    def between(self, references, h, t):
        return references + 0.1 * h.mean(1, keepdim=True)


class LatentInReferencesLate(LatentInReferences):
    def between(self, references, h, t):
        return references if float(t[0]) >= LATE else super().between(references, h, t)


class ReferencesBehind(Refers):
    """What the blocks make of references goes into the output."""

    def left(self, h, references, t):
        return h + 0.1 * references.mean(1, keepdim=True)


class Interleaved(Refers):
    """A reference token behind each of the latent's."""

    def mixed(self, h, words, emb, t):
        count = min(h.shape[1], self.pictures.shape[1])
        pairs = torch.stack((h[:, :count], self.pictures[:, :count]), 2).flatten(1, 2)
        both = Banded.mixed(self, torch.cat((pairs, h[:, count:]), 1), words, emb, t)
        return torch.cat((both[:, : 2 * count : 2], both[:, 2 * count :]), 1)


class Ahead(Refers):
    """As SCAIL: an argument's references before the latent, others behind it."""

    def forward(self, x, timestep, context=None, ahead=None, **more):
        self.ahead = self.inp(ahead.flatten(2).transpose(1, 2))
        out = super().forward(x, timestep, context, **more)
        del self.ahead
        return out

    def mixed(self, h, words, emb, t):
        before, behind = self.sides(self.ahead, self.pictures, t)
        both = Banded.mixed(self, torch.cat((before, h, behind), 1), words, emb, t)
        return both[:, before.shape[1] : before.shape[1] + h.shape[1]]

    def sides(self, ahead, pictures, t):
        return ahead, pictures


class AheadTwice(Ahead):
    def sides(self, ahead, pictures, t):
        return ahead, torch.cat((pictures, ahead), 1)


class AheadBehindLate(Ahead):
    def sides(self, ahead, pictures, t):
        return (ahead, pictures) if bool((t > LATE).any()) else (pictures, ahead)


class RegisterBetween(LatentBetween):
    """A token more than words."""

    def mixed(self, h, words, emb, t):
        return super().mixed(h, torch.cat((words, emb[:, None]), 1), emb, t)


class SoundAndReferences(SoundToo):
    """As MiniMax H3: words, references, sound and video in one stream."""

    def forward(self, x, timestep, context=None, ref_latents=(), **_extra):
        self.first = self.text(context), *(self.inp(each.flatten(2).transpose(1, 2)) for each in ref_latents)
        out = super().forward(x, timestep, context)
        del self.first
        return out

    def both(self, h, s, emb):
        stream = torch.cat((*self.first, s, h), 1)
        left = self.mixed(stream, None, emb, None)[:, -s.shape[1] - h.shape[1] :]
        return left[:, s.shape[1] :], left[:, : s.shape[1]]


class Beside(Banded):
    """As HiDream-E1: the picture stands at the right of the latent."""

    def forward(self, x, timestep, context=None, image_cond=None, **_extra):
        self.picture = image_cond
        out = super().forward(x, timestep, context)
        del self.picture
        return out

    def latent(self, x, t):
        return torch.cat((x, self.between(self.picture, x, t)), -1)

    def between(self, picture, x, t):
        return picture

    def leaving(self, h, x):
        return h.transpose(1, 2).reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]


class BesideLeft(Beside):
    def latent(self, x, t):
        return torch.cat((self.picture, x), -1)

    def leaving(self, h, x):
        return h.transpose(1, 2).reshape(*x.shape[:-1], -1)[..., -x.shape[-1] :]


class LatentBeside(Beside):
    def between(self, picture, x, t):
        return picture + 0.1 * x.roll(1, -2)


class LatentBesideLate(LatentBeside):
    def between(self, picture, x, t):
        return picture if float(t[0]) >= LATE else super().between(picture, x, t)
