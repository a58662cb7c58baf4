"""Messages by which ranks run a VAE's decoder or encoder on bands of an image, or of a video's frames.

Ranks have one such part of a VAE at a time.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RunVAE:
    """Client -> rank: run the rank's band. Answered by VAEOutput."""

    band: torch.Tensor
    """[B, C, (frames,) rows, columns]: the rank's band of the input."""
    sizes: tuple[int, ...]
    """Each rank's number of input rows, or columns. Empty: `band` has independent batch entries (tiles) instead."""
    columns: bool
    """Bands are columns instead of rows."""


@dataclass(frozen=True)
class PutVAE:
    """Client -> rank: keep this part of a VAE until DropVAE or Unload."""

    name: str
    """Name of the part; equal weights have equal names."""
    recipe: str
    """JSON of own_class.built.module_tree: "tree", the module; "folder" and "settings", by which it is imported;
    "constants". And "call", the name of the module's function that computes the part."""
    tensors: dict[str, torch.Tensor]
    """All tensors by their names in the module, in the dtype to compute in."""
    trial: RunVAE | None
    """A small image with which bands are tried at the first BeginVAE; `band` is all of it. None: there are no bands."""
    ranks: tuple[int, ...] = ()
    """As Load.ranks."""


@dataclass(frozen=True)
class BeginVAE:
    """Client -> rank: an image or video begins. Answered by VAEBegun."""

    name: str
    """PutVAE.name of the part."""
    bytes_needed: int
    """Memory for the bands of all ranks on the rank's device, without weights."""
    weight_bytes: int = 0
    """Memory for the weights on the rank's device, if the ranks lack them."""


@dataclass(frozen=True)
class VAEBegun:
    """Rank -> client: whether the rank has begun. No rank begins unless all can."""

    rank: int
    held: bool
    """The rank has the part."""
    missing: int
    """Bytes that this rank's device lacks for bands, and for the weights if the rank lacks them."""
    wrong: str = ""
    """Why the rank's bands are not those of the whole image, as a trial has shown. Empty: they are."""


@dataclass(frozen=True)
class DropVAE:
    """Client -> rank: free the part of a VAE, between images. Sent to all ranks or none."""


@dataclass(frozen=True)
class VAEOutput:
    """Rank -> client: the rank's band of the output."""

    rank: int
    band: torch.Tensor
    """[B, C, (frames,) rows, columns]."""


@dataclass(frozen=True)
class EndVAE:
    """Client -> rank: no band or tiles of this image follow. Memory that they took is given back."""
