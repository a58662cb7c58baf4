"""Classes of diffusers' form, called as ComfyUI's classes are."""

import torch
import torch.nn.functional as F
from torch import nn

from parallel_backend.core.own_class import OwnForm


def in_form_of_comfyui(kind: type[nn.Module], form: OwnForm) -> type[nn.Module]:
    """The class, with a forward of a latent [B, C, h, w], times [B] and the call's other arguments by name."""
    names = dict(form.names)

    class Called(kind):  # type: ignore[valid-type, misc]
        def forward(self, x, timestep, transformer_options=None, **arguments):
            named = {names.get(name, name): value for name, value in arguments.items() if value is not None}
            height, width = x.shape[-2:]
            x = F.pad(x, (0, -width % form.patch, 0, -height % form.patch), mode="circular")
            rows, columns = x.shape[-2] // form.patch, x.shape[-1] // form.patch
            of_image, of_text = form.places
            if of_image:
                named[of_image] = places(rows, columns, form.axes, x.device)
                named[of_text] = torch.zeros(arguments["context"].shape[1], form.axes, device=x.device)
                if form.counts_text:
                    named[of_text][:, -1] = torch.arange(len(named[of_text]), device=x.device)
            tokens = x if form.patch == 1 else pack(x, form.patch)
            out = super().forward(hidden_states=tokens, timestep=timestep, return_dict=False, **named)[0]
            out = out if form.patch == 1 else unpack(out, rows, columns, form.patch)
            return out[..., :height, :width]

    return Called


def places(rows: int, columns: int, axes: int, device: torch.device) -> torch.Tensor:
    """[N, axes]: 0, row and column of each token, and 0."""
    row, column = torch.arange(rows, device=device), torch.arange(columns, device=device)
    return F.pad(torch.cartesian_prod(row, column), (1, axes - 3)).float()


def pack(x: torch.Tensor, patch: int) -> torch.Tensor:
    """[B, C, h, w] -> [B, N, C x patch x patch]"""
    cells = x.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))
    return cells.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpack(tokens: torch.Tensor, rows: int, columns: int, patch: int) -> torch.Tensor:
    """The inverse."""
    cells = tokens.unflatten(1, (rows, columns)).unflatten(3, (-1, patch, patch))
    return cells.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
