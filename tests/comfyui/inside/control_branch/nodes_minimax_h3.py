"""A control of VACE's kind: a branch of copies of the model's blocks, which adds to the outputs of some blocks.

Unlike core's it adds to the sound's tokens too, and its hint is noise for each token in place of a picture's latent.
"""

import copy
from typing import Any

import comfy.patcher_extension
import torch


class Branch:
    """`blocks`: the native model's blocks around which patches are -> their copies in the branch."""

    def __init__(self, blocks: dict[int, torch.nn.Module], strength: float, sigmas: tuple[float, float], seed: int):
        self.blocks, self.strength, self.sigmas, self.seed = blocks, strength, sigmas, seed
        self.active = False
        self.stream: torch.Tensor | None = None

    def around_model(self, executor, x, timestep, *arguments, **named):
        options = next(each for each in (*arguments, *named.values()) if isinstance(each, dict) and "sigmas" in each)
        self.active = self.sigmas[0] <= float(options["sigmas"][0]) <= self.sigmas[1]
        self.stream = None
        return executor(x, timestep, *arguments, **named)

    def start(self, tokens: torch.Tensor) -> None:
        hint = torch.randn(tokens.shape[-2:], generator=torch.Generator().manual_seed(self.seed))
        self.stream = tokens + hint.to(tokens)


class MiniMaxH3FunControlBlockPatch:
    """By the names of core's module (0.38)."""

    def __init__(self, branch: Branch, index: int, previous: Any):
        self.control_patch, self.block_index, self.previous = branch, index, previous

    def __call__(self, args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        branch = self.control_patch
        if branch.active and self.block_index == min(branch.blocks):
            branch.start(args["img"])  # the model's own block writes into its input
        out = extra["original_block"](args) if self.previous is None else self.previous(args, extra)
        if branch.active:
            given = (args[name] for name in ("t_emb", "mod_segments", "rope_freqs", "transformer_options"))
            branch.stream = branch.blocks[self.block_index](branch.stream, *given)
            out["img"].add_(branch.stream, alpha=branch.strength)
        return out


def controlled(model: Any, branch: Branch) -> Any:
    """The MODEL with the branch, on top of what it has."""
    clone = model.clone()
    clone.add_wrapper(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, branch.around_model)
    for index in branch.blocks:
        before = clone.model_options["transformer_options"].get("patches_replace", {}).get("dit", {})
        around = MiniMaxH3FunControlBlockPatch(branch, index, before.get(("double_block", index)))
        clone.set_model_patch_replace(around, "dit", "double_block", index)
    return clone


def copies(native: Any, indices: tuple[int, ...], seed: int) -> dict[int, torch.nn.Module]:
    """Of the native model's blocks, with other weights."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for index in indices:
        found[index] = copy.deepcopy(native.model.diffusion_model.blocks[index])
        for parameter in found[index].parameters():
            parameter.data += torch.randn(parameter.shape, generator=generator).to(parameter) * parameter.std(correction=0)
    return found
