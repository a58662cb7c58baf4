"""Messages by which ranks run a VAE's decoder or encoder on bands of a picture, or of a video's frames.

A video goes through in pieces of some frames. `part` is "decoder" or "encoder".
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PutVAE:
    """Client -> rank: keep this part of a VAE until DropVAE or Unload. It replaces the same part of another VAE."""

    name: str
    """Name of the weights; equal weights have equal names."""
    kind: str
    """Key of vaes.VAES."""
    part: str
    config: str
    """vaes.base.Weights.config in JSON."""
    tensors: dict[str, torch.Tensor]
    """All weights by the names of the class, in the dtype to compute in."""
    ranks: tuple[int, ...] = ()
    """As Load.ranks."""


@dataclass(frozen=True)
class BeginVAE:
    """Client -> rank: a picture or video begins. State of an earlier one is dropped. Answered by VAEBegun."""

    name: str
    """PutVAE.name of the part."""
    part: str
    bytes_needed: int
    """Memory for the bands of all ranks on the rank's device, without weights."""
    weight_bytes: int = 0
    """Memory for the weights on the rank's device, if the ranks lack them; counts in VAEBegun.missing."""


@dataclass(frozen=True)
class VAEBegun:
    """Rank -> client: whether the rank has begun. No rank begins unless all can."""

    rank: int
    held: bool
    """The rank has the part."""
    short_of_memory: bool
    """At least one rank has too little memory."""
    missing: int
    """Bytes that this rank's device lacks for bands, and for the weights if the rank lacks them."""


@dataclass(frozen=True)
class DropVAE:
    """Client -> rank: free the parts of VAEs, between pictures. Sent to all ranks or none."""

    keep: str = ""
    """The part that stays. Empty: neither."""


@dataclass(frozen=True)
class RunVAE:
    """Client -> rank: run the rank's band of a piece. Answered by VAEOutput."""

    part: str
    band: torch.Tensor
    """[B, C, (frames,) rows, columns]: the rank's band of the input."""
    sizes: tuple[int, ...]
    """Each rank's number of input rows, or columns. Empty: `band` has independent batch entries (tiles) instead."""
    columns: bool
    """Bands are columns instead of rows."""
    first: bool
    """The first piece: no state of earlier pieces is used."""
    output: torch.Tensor | None
    """[B, C, (frames,) rows, columns] in shared memory, for the whole output. None: the rank sends its band."""
    frame: int
    """First frame of the piece in `output`."""


@dataclass(frozen=True)
class VAEOutput:
    """Rank -> client: the rank's band of the piece's output."""

    rank: int
    band: torch.Tensor | None
    """[B, C, (frames,) rows, columns]. None: the rank has written it into RunVAE.output."""
    bytes_sent: dict[str, int]
    """Payload that the rank sent to others for this piece, by mesh axis."""


@dataclass(frozen=True)
class EndVAE:
    """Client -> rank: no piece follows. State between pieces is dropped."""

    part: str
