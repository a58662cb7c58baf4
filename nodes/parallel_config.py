"""Ulysses Config: settings for sequence and patch parallelism and for attention, an optional input of the loader."""

from dataclasses import dataclass

from parallel_backend.core.attention_kernels import ATTENTION, AUTO
from parallel_backend.core.degrees import PATCH_MODES, TRANSFER_DTYPES, Degrees
from parallel_backend.core.validate import check_ranks

from .model.call.diffusion_model import RemoteDiffusionModel
from .ui.input_checks import validate
from .ui.widgets import CATEGORY, SEVERAL_GPUS, choice, degree, flag, whole_number


@dataclass(frozen=True)
class ParallelConfig:
    """The value of a PARALLEL_CONFIG link: the widgets of Ulysses Config."""

    ulysses_degree: int = 1
    ring_degree: int = 1
    patch_mode: str = "none"
    patch_degree: int = 1
    attention: str = AUTO
    comm_overlap: bool = True
    patch_warmup_steps: int = 1
    transfer_dtype: str = "full"
    keep_run: bool = True

    @property
    def degrees(self) -> Degrees:
        """Its degrees. The others are 1."""
        sequence = {"ring": self.ring_degree, "ulysses": self.ulysses_degree}
        return Degrees(patch=self.patch_degree, patch_mode=self.patch_mode, **sequence)


def config_of(stub: RemoteDiffusionModel) -> ParallelConfig:
    """Return the settings of a MODEL on ranks that do not depend on its degrees. All degrees are 1."""
    setup = stub.setup
    return ParallelConfig(
        attention=setup.attention,
        comm_overlap=stub.comm_overlap,
        transfer_dtype=setup.transfer_dtype,
        keep_run=setup.keep_run,
    )


def check_widgets(
    ulysses_degree: int | None,
    ring_degree: int | None,
    patch_mode: str | None,
    patch_degree: int | None,
) -> None:
    """Raise ValueError for degrees and transfers that cannot be combined. None: another node's output is connected."""
    known = ParallelConfig(ulysses_degree or 1, ring_degree or 1, patch_mode or "displaced", patch_degree or 1)
    check_ranks(known.degrees)


@validate(early=check_widgets)
class UlyssesConfig:
    CATEGORY = CATEGORY
    SEARCH_ALIASES = (*SEVERAL_GPUS, "ring attention", "distrifusion")
    RETURN_TYPES = ("PARALLEL_CONFIG",)
    RETURN_NAMES = ("parallel_config",)
    FUNCTION = "configure"
    DESCRIPTION = (
        "Splits one image's tokens over GPUs by Ulysses, ring attention or patches (DistriFusion). Connect it to "
        "Parallel DiT Loader or Parallelize Model."
    )

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "ulysses_degree": degree(
                    "Number of GPUs that split one image's tokens. Each computes some of the attention heads. Exact. "
                    "Best with fast links between the GPUs (NVLink, PCIe P2P)."
                ),
                "ring_degree": degree(
                    "Number of GPUs that split one image's tokens and pass keys and values around. Exact. For long "
                    "sequences, slower links, or more GPUs than attention heads. Multiplies with ulysses_degree."
                ),
                "patch_mode": choice(
                    list(PATCH_MODES),
                    "none",
                    "displaced (DistriFusion): each GPU has all blocks and one patch of the image. It sees the other "
                    "patches as they were one step ago. naive: patches never see each other, for comparison only.",
                ),
                "patch_degree": degree("Number of GPUs for patch_mode. Does not combine with pipefusion_degree."),
                "attention": choice(
                    list(ATTENTION),
                    AUTO,
                    "auto: the kernel that ComfyUI was started with (such as --use-sage-attention), or torch's SDPA. "
                    "Other kernels need their package. sage and comfy_kitchen quantise.",
                ),
                "comm_overlap": flag(True, "Transfers between GPUs run during computation."),
            },
            "optional": {
                "patch_warmup_steps": whole_number(
                    1,
                    1,
                    10000,
                    "For patch_mode displaced: number of first steps that are exact. In these steps GPUs wait for "
                    "each other's keys.",
                ),
                "transfer_dtype": choice(
                    list(TRANSFER_DTYPES),
                    "full",
                    "full: ulysses_degree sends exact values. int8 and fp8: it sends one byte per value, for slow "
                    "links. That is half the traffic of bf16, and the image differs a little; int8 is closer. residual: "
                    "patch_mode displaced sends the change since the last step in 4 bits per value, and ulysses_degree "
                    "sends int8.",
                ),
                "keep_run": flag(
                    True,
                    "If a GPU fails or hangs during a run, the run goes on with the other GPUs, and only that step is "
                    "computed again. If one runs out of memory, more weights are streamed. Off: the run ends with an error.",
                ),
            },
        }

    def configure(self, **settings):
        return (ParallelConfig(**settings),)
