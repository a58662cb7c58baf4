"""Parallelize Model: turns the MODEL of any loader into the same MODEL on several GPUs, with the changes of all nodes."""

from pathlib import Path
from typing import Any

from parallel_backend.core.degrees import Degrees
from parallel_backend.core.dtypes import storage_name
from parallel_backend.placement.residency import AUTO as STREAMED
from parallel_backend.placement.residency import offload_of
from parallel_backend.planning.named_modes import AUTO, MODES, degrees_of, ranks_of

from .loader import SETUP_WIDGETS, model_of, widgets
from .model.call.concurrent_conds import WRAPPER_KEY as CONDS_KEY
from .model.call.diffusion_model import RemoteDiffusionModel
from .model.carry_over import carry_over
from .model.early_start import start_ranks_of
from .model.loading.model_file import importing, open_file
from .model.loading.native_source import NativeSource, check_not_rewritten, give_back_memory, native_source, unload
from .model.patcher import RemoteModelPatcher
from .parallel_config import ParallelConfig, config_of
from .run_on_several_gpus import model_file
from .sampling.pipefusion import AUTO_KEY, apply_pipefusion, has_pipefusion
from .sampling.pipefusion import WRAPPER_KEY as PIPEFUSION_KEY
from .ui.devices import choose_devices, possible_devices, why_hidden
from .ui.input_checks import defaults, renamed_input, validate
from .ui.node_text import say
from .ui.prompt_graph import executing, loader_inputs
from .ui.widgets import CATEGORY, MAX_DEGREE, SEVERAL_GPUS, choice, link, offload, whole_number


def check_widgets(gpus: int | None, offload: str | None = STREAMED) -> None:
    """Raise ValueError for more GPUs than there are, and if the text is not an `offload`. None: the value comes from another
    node."""
    if offload is not None:
        offload_of(offload)
    _check_gpus(gpus or 0, possible_devices("auto"))


@validate(early=check_widgets)
class ParallelizeModel:
    CATEGORY = CATEGORY
    SEARCH_ALIASES = (*SEVERAL_GPUS, "split model")
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "parallelize"
    DESCRIPTION = (
        "Runs the MODEL of any loader on several GPUs. LoRA, model sampling and other nodes may come before or after. "
        "The rank processes read the weights from the loader's file."
    )

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "model": link(
                    "MODEL", "From Load Diffusion Model, Load Checkpoint or another loader. Other nodes may be in between."
                ),
                "gpus": whole_number(
                    0,
                    0,
                    MAX_DEGREE,
                    "Number of GPUs, counted from the first. 0 takes all. With --cpu: number of CPU processes; 0 means one.",
                ),
                "mode": choice(
                    list(MODES),
                    AUTO,
                    "auto: finds the fastest mode at the first image. It is exact; with Apply PipeFusion after this node, "
                    "it may be close to exact. pipefusion: for slow links, close to exact. ulysses, ring, tensor: "
                    "exact, for fast links. split batch: positive and negative prompt at the same time, exact.",
                ),
            },
            "optional": {
                "parallel_config": link(
                    "PARALLEL_CONFIG",
                    "From Ulysses Config or Parallel Doctor. Its degrees are used as they are. Optional.",
                ),
                "offload": offload(),
            },
        }

    def parallelize(self, model, gpus, mode, parallel_config=None, offload=STREAMED):
        stub = getattr(getattr(model, "model", None), "diffusion_model", None)
        ours = stub if isinstance(stub, RemoteDiffusionModel) else None
        config = ParallelConfig()
        setup_values: dict[str, Any] = {}
        stays = [AUTO_KEY, CONDS_KEY]
        if ours is None:
            source = native_source(model, _named_file())
            unload(model)
            check_not_rewritten(model)
        else:
            source = NativeSource(ours.checkpoint.path, storage_name(ours.setup.dtype))
            config = config_of(ours)
            # stage_split belongs to the stages of the old degrees.
            setup_values = {name: getattr(ours.setup, name) for name in SETUP_WIDGETS if name != "stage_split"}
            if ours.setup.degrees.displaced:  # then the loader has applied PipeFusion, not the user
                stays.append(PIPEFUSION_KEY)
        if parallel_config is not None:
            config = parallel_config
        with renamed_input("model_name", "model"):
            parallel, degrees, left_over = _parallel(source, gpus, mode, config, setup_values, offload)
        carry_over(model, parallel, stays)
        if ours is None:
            give_back_memory(model, source.path)
        if degrees is not None:
            if degrees.pipe > 1 and mode != AUTO and not has_pipefusion(parallel):
                parallel, _ = apply_pipefusion(parallel, 0, 1, True, True, is_asked=False)
            devices = ", ".join(parallel.model.diffusion_model.setup.devices)
            say("\n".join(filter(None, (left_over, f"Parallel DiT: {degrees} on {devices}"))))
        start_ranks_of(parallel)
        return (parallel,)


def _named_file() -> Path | None:
    """Return the model file that the loader of this node's MODEL names in the prompt's graph, or None if it is unknown."""
    found = executing()
    inputs = None if found is None else loader_inputs(*found)
    named = None if inputs is None else model_file(inputs)
    return None if named is None else named[1]


def _check_gpus(ranks: int, possible: tuple[str, ...]) -> None:
    """Raise ValueError if there are fewer GPUs than `ranks`. Any number of CPU ranks is allowed."""
    if possible[0] != "cpu" and ranks > len(possible):
        raise ValueError(
            f"gpus: {ranks} are needed, but ComfyUI shows {len(possible)} on this machine.{why_hidden()} Set gpus to 0."
        )


def _parallel(
    source: NativeSource, gpus: int, mode: str, config: ParallelConfig, setup_values: dict[str, Any], offload: str
) -> tuple[RemoteModelPatcher, Degrees | None, str]:
    """(the MODEL of the file on its ranks, its degrees, ModelFile.left_over). No degrees: the first image's plan has them.

    `setup_values`: values of SETUP_WIDGETS that are not the loader's defaults.
    """
    if not isinstance(config, ParallelConfig):
        raise ValueError("parallel_config: this input is not from Ulysses Config or Parallel Doctor.")
    config_degrees = Degrees(
        patch=config.patch_degree,
        patch_mode=config.patch_mode,
        ring=config.ring_degree,
        ulysses=config.ulysses_degree,
    )
    possible = possible_devices("auto")
    on_gpus = possible[0] != "cpu"
    ranks = ranks_of(mode, gpus, len(possible), config_degrees)
    _check_gpus(ranks, possible)
    devices = possible[:ranks] if on_gpus else ("cpu",) * ranks
    file = open_file(source.path, importing(devices[0]))
    if file.own.unet and mode == AUTO:
        mode = "split batch"  # which alone a UNet has
    degrees = config_degrees if config_degrees.world > 1 else None
    if mode != AUTO:
        degrees = degrees_of(mode, ranks, config_degrees)
    if degrees is not None:
        devices = choose_devices(",".join(devices), degrees)
    values = defaults(widgets("", ("", {}))) | setup_values | {"weight_dtype": source.weight_dtype, "offload": offload}
    return model_of(file, degrees or Degrees(), devices, degrees is None, values, config), degrees, file.left_over
