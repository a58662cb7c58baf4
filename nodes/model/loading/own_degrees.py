"""Checks the degrees of a UNet, and reports how many of a model's blocks the ranks share."""

from torch import nn

from parallel_backend.core.degrees import WIDGETS, Degrees
from parallel_backend.core.own_class import OwnClass
from parallel_backend.own_class.plans.block_order import block_lists
from parallel_backend.own_class.plans.proof import Proof


def check_own_class(own: OwnClass, name: str, degrees: Degrees, planned: bool, compiled: bool) -> None:
    """Raise ValueError, naming the widget, if ranks cannot run a UNet with these settings."""
    if not own.unet:
        return
    runs = f"{name} runs only with split_batch_degree"
    if planned:
        raise ValueError(f"degrees: {runs}, which auto cannot choose. Set degrees to 'as set'.")
    for axis, widget in WIDGETS.items():
        if axis != "batch" and getattr(degrees, axis) > 1:
            raise ValueError(f"{widget} is {getattr(degrees, axis)}: {runs}. Set it to 1.")
    if compiled:
        raise ValueError(f"compile: {runs}. Switch it off.")


def shared_out(proof: Proof, model: nn.Module, degrees: Degrees) -> str:
    """Text for the user: how many of the model's blocks the ranks share. Every rank runs the other blocks in full. Empty if
    one rank runs a whole call."""
    if degrees.pipe == degrees.sequence == degrees.tensor == 1:
        return ""
    return f": {len(proof.blocks)} of {sum(map(len, block_lists(model).values()))} blocks are shared out"
