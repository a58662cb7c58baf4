"""Sequence and patch parallelism, and how attention is computed: an optional input of the loader."""

from dataclasses import dataclass

from .widgets import CATEGORY, degree


@dataclass(frozen=True)
class ParallelConfig:
    """What a PARALLEL_CONFIG link carries."""

    ulysses_degree: int = 1
    ring_degree: int = 1
    patch_mode: str = "none"
    patch_degree: int = 1
    attention: str = "auto"
    comm_overlap: bool = True


class UlyssesConfig:
    CATEGORY = CATEGORY
    RETURN_TYPES = ("PARALLEL_CONFIG",)
    RETURN_NAMES = ("parallel_config",)
    FUNCTION = "configure"
    DESCRIPTION = "Splits one image's tokens over GPUs (Ulysses). Connect it to Parallel DiT Loader."

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "ulysses_degree": degree(
                    "GPUs that share one image's tokens; exact. Must divide the model's attention heads. Best with fast "
                    "links between the GPUs (NVLink, PCIe P2P)."
                ),
                "ring_degree": degree("Ring attention; only 1 in this version."),
                "patch_mode": (
                    ["none", "displaced", "naive"],
                    {"default": "none", "tooltip": "DistriFusion's displaced patches; only 'none' in this version."},
                ),
                "patch_degree": degree("GPUs for patch_mode; only 1 in this version."),
                "attention": (
                    ["auto", "sdpa", "flash"],
                    {
                        "default": "auto",
                        "tooltip": "auto takes flash-attn where it is installed and torch's SDPA otherwise.",
                    },
                ),
                "comm_overlap": (
                    "BOOLEAN",
                    {"default": True, "tooltip": "Let transfers between GPUs run while they compute."},
                ),
            }
        }

    def configure(self, ulysses_degree, ring_degree, patch_mode, patch_degree, attention, comm_overlap):
        for name, value, only in (("patch_mode", patch_mode, "none"), ("patch_degree", patch_degree, 1)):
            if value != only:
                raise ValueError(f"{name} is {value}; this version supports only {only} for it.")
        return (ParallelConfig(ulysses_degree, ring_degree, patch_mode, patch_degree, attention, comm_overlap),)
