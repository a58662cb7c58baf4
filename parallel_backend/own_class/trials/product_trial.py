"""Tries tensor parallelism times a cut of tokens: whether ranks that share a class's layers, and have a part of the tokens,
compute what the whole class computes with it.

A rank's run with a part of the tokens is noted in place of the whole's, and tensor ranks are held against it.
"""

from collections.abc import Iterable, Sequence

from torch import nn

from parallel_backend.core.own_class import OwnBlock, OwnLatent
from parallel_backend.own_class.calls.tried_calls import Call
from parallel_backend.own_class.calls.unproven import Unproven
from parallel_backend.own_class.trials.band_trial import runs_of_bands
from parallel_backend.own_class.trials.feature_trial import Run, Sharing
from parallel_backend.own_class.trials.token_trial import runs_of_ranks


def why_no_products(
    sharing: Sharing,
    model: nn.Module,
    blocks: Sequence[OwnBlock],
    cut: Sequence[OwnBlock],
    latent: OwnLatent | None,
    actual: Call,
    sequence: bool,
) -> tuple[str, str]:
    """Why tensor ranks are not proven times sequence ranks, and times bands. Empty: they are. `cut`: `blocks` with the cut
    of their tokens. Without `sequence` no sequence ranks are tried, and without a `latent` no bands."""
    of_ranks = runs_of_ranks(model, blocks, cut, actual) if sequence else ()
    of_bands = () if latent is None else runs_of_bands(model, cut, latent, actual)
    return _first(sharing, of_ranks), _first(sharing, of_bands)


def _first(sharing: Sharing, runs: Iterable[Run]) -> str:
    try:
        return next(filter(None, map(sharing.why_not_in, runs)), "")
    except Unproven as unproven:
        return str(unproven)
