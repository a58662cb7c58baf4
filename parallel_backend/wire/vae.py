"""Messages that have ranks run a part of a VAE, its decoder or its encoder, on bands of a picture or of a video's frames."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PutVAE:
    """Client -> rank: hold this part of a VAE, in place of another decoder or encoder, until DropVAE or an unloading."""

    name: str
    """Stands for the weights."""
    kind: str
    """Name of its class in vaes."""
    part: str
    """"decoder" or "encoder"."""
    config: str
    """Its Weights.config in JSON."""
    tensors: dict[str, torch.Tensor]
    """All weights by the names of the class, in the dtype to compute in."""


@dataclass(frozen=True)
class BeginVAE:
    """Client -> rank: a picture or video is about to be run, in pieces. What was left of another one is dropped."""

    name: str
    """PutVAE.name of the part."""
    part: str
    bytes_needed: int
    """Memory that the bands of all ranks on the rank's device take, beside the weights."""
    weight_bytes: int = 0
    """Of the weights there, where the ranks lack them: what `missing` is said of too."""


@dataclass(frozen=True)
class VAEBegun:
    """Rank -> client."""

    rank: int
    held: bool
    """The rank has the part. If one has not, none begins."""
    short_of_memory: bool
    """One of the ranks has too little memory. None begins."""
    missing: int
    """Bytes that this rank's device lacks, for the weights too where the rank does not hold them."""


@dataclass(frozen=True)
class DropVAE:
    """Client -> rank: free the parts of VAEs, between pictures. All ranks, or none: see VAEBegun.held."""

    keep: str = ""
    """A part that stays. Empty: none."""


@dataclass(frozen=True)
class RunVAE:
    """Client -> rank: the rank's band of a piece."""

    part: str
    band: torch.Tensor
    """[B, C, (frames,) rows, columns] of the input, the rank's own."""
    sizes: tuple[int, ...]
    """Each rank's rows of the input, or columns. Empty: no bands, but entries that have nothing to do with each other."""
    columns: bool
    """The picture is cut along its columns."""
    first: bool
    """The first piece of its video: earlier ones have nothing to do with it."""
    output: torch.Tensor | None
    """[B, C, (frames,) rows, columns], in shared memory: all of the output, to write into. None: it is sent."""
    frame: int
    """Where the piece begins in `output`."""


@dataclass(frozen=True)
class VAEOutput:
    """Rank -> client: the rank's band of the piece's output."""

    rank: int
    band: torch.Tensor | None
    """[B, C, (frames,) rows, columns]. None: it is where RunVAE.output says."""
    bytes_sent: dict[str, int]
    """Payload that left this rank for others, by mesh axis, since the piece before."""


@dataclass(frozen=True)
class EndVAE:
    """Client -> rank: no piece follows. What is kept between pieces is dropped."""

    part: str
