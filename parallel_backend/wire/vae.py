"""Messages by which ranks run a VAE's decoder or encoder on bands of an image, or of the frames of a video. A rank has one
such part of a VAE at a time."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RunVAE:
    """Client -> rank: compute the rank's band. Answered by VAEOutput."""

    band: torch.Tensor
    """[B, C, (frames,) rows, columns]: the rank's band of the input."""
    sizes: tuple[int, ...]
    """For each rank, its number of input rows or columns. Empty: `band` has independent batch entries (tiles) instead."""
    columns: bool
    """Whether bands are ranges of columns instead of rows."""


@dataclass(frozen=True)
class PutVAE:
    """Client -> rank: store this part of a VAE until DropVAE or Unload."""

    name: str
    """Name of the part. Equal names mean equal weights."""
    recipe: str
    """JSON of own_class.built.module_tree: "tree", the module; "folder" and "settings", with which it is imported;
    "constants"; and "call", the name of the module's function that computes the part."""
    tensors: dict[str, torch.Tensor]
    """All tensors by their names in the module, in the dtype in which to compute."""
    trial: RunVAE | None
    """A small image with which bands are tested at the first BeginVAE; `band` is the complete image. None: there are no
    bands."""
    ranks: tuple[int, ...] = ()
    """The ranks of the pool that have the part, as Load.ranks."""


@dataclass(frozen=True)
class BeginVAE:
    """Client -> rank: an image or video begins. Answered by VAEBegun."""

    name: str
    """The part, by PutVAE.name."""
    bytes_needed: int
    """Bytes that the bands of all ranks on the rank's device need, without weights."""
    weight_bytes: int = 0
    """Bytes that the weights need on the rank's device, if the ranks do not have them."""


@dataclass(frozen=True)
class VAEBegun:
    """Rank -> client: whether the rank has begun. No rank begins unless all ranks can."""

    rank: int
    held: bool
    """Whether the rank has the part."""
    missing: int
    """Bytes that this rank's device is short of for bands, and for the weights if the rank does not have them."""
    wrong: str = ""
    """Why the rank's bands differ from those of the complete image, as a test has shown. Empty: they are equal."""


@dataclass(frozen=True)
class DropVAE:
    """Client -> rank: free the part of a VAE, between images. Sent to all ranks or to none."""


@dataclass(frozen=True)
class VAEOutput:
    """Rank -> client: the rank's band of the output."""

    rank: int
    band: torch.Tensor
    """[B, C, (frames,) rows, columns]."""
    bytes_sent: dict[str, int]
    """Bytes of payload that the rank sent to other ranks for it, by mesh axis."""


@dataclass(frozen=True)
class EndVAE:
    """Client -> rank: no more bands or tiles of this image follow. The memory that they used is freed."""
