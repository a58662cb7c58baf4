"""Ways in which a user may have set up the loader: a model file and the degrees that it is loaded with."""

from dataclasses import dataclass, field
from typing import Any

DIGITS, FLUX_DEV = "digits", "flux-dev"
FILES = {DIGITS: "digits.safetensors", FLUX_DEV: "flux1-dev.safetensors"}
"""By model: the trained mini model, and a tiny Flux with real text encoders' layout."""

CONFIG = {
    "ulysses_degree": 1,
    "ring_degree": 1,
    "patch_mode": "none",
    "patch_degree": 1,
    "attention": "auto",
    "comm_overlap": True,
}


@dataclass(frozen=True)
class Setup:
    """`loader`: widgets of Parallel DiT Loader beside the defaults; `config`: of Ulysses Config.

    `ranks`: 0 where ComfyUI's own loader is used.
    """

    name: str
    model: str
    ranks: int
    loader: dict[str, Any] = field(default_factory=dict, hash=False)
    config: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def bands(self) -> bool:
        """Whether PipeFusion pipelines its steps."""
        return self.loader.get("pipefusion_degree", 1) > 1


PIPE = {"pipefusion_degree": 2}
DISPLACED = {"patch_mode": "displaced", "patch_degree": 2}
TWO_RANKS = (
    Setup("pipe", DIGITS, 2, PIPE),
    Setup("ulysses", DIGITS, 2, config={"ulysses_degree": 2}),
    Setup("ring", DIGITS, 2, config={"ring_degree": 2}),
    Setup("tensor", DIGITS, 2, {"tensor_parallel_degree": 2}),
    Setup("split batch", DIGITS, 2, {"split_batch_degree": 2}),
    Setup("displaced", DIGITS, 2, config=DISPLACED),
    Setup("naive", DIGITS, 2, config=DISPLACED | {"patch_mode": "naive"}),
    Setup("native", DIGITS, 0),
    Setup("flux-dev, pipe", FLUX_DEV, 2, PIPE),
    Setup("flux-dev, ulysses", FLUX_DEV, 2, config={"ulysses_degree": 2}),
)
"""On the same two devices, so that the rank processes live on from one to the next."""
OTHER_RANKS = (
    Setup("one rank", DIGITS, 1),
    Setup("pipe x ulysses", DIGITS, 4, PIPE, {"ulysses_degree": 2}),
)
"""On other devices: with each of them the ranks are ended and new ones started."""
