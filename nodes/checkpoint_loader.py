"""Parallel Checkpoint Loader: loads an all-in-one file, with the MODEL on the ranks, and CLIP and VAE in ComfyUI."""

from .loader import CHECKPOINTS, check_widgets, file_path, load_model, safetensors_names, widgets
from .model.early_start import start_ranks_of
from .model.loading.all_in_one import clip_and_vae
from .ui.input_checks import coerce, renamed_input, short, validate
from .ui.widgets import CATEGORY, SEVERAL_GPUS


@validate("ckpt_name", early=check_widgets)
class ParallelCheckpointLoader:
    CATEGORY = CATEGORY
    SEARCH_ALIASES = (*SEVERAL_GPUS, "load checkpoint", "checkpoint loader")
    RETURN_TYPES = ("MODEL", "CLIP", "VAE")
    FUNCTION = "load"
    DESCRIPTION = (
        "Loads an all-in-one file. Its transformer is split over several GPUs, and only the rank processes read it. "
        "Text encoder and VAE load as in Load Checkpoint."
    )

    @classmethod
    def INPUT_TYPES(cls):
        tooltip = "An all-in-one safetensors file in models/checkpoints. The model type is detected from the weights."
        return widgets("ckpt_name", (safetensors_names(CHECKPOINTS), {"tooltip": tooltip}))

    def load(self, ckpt_name, **values):
        path = file_path(CHECKPOINTS, coerce("ckpt_name", ckpt_name, "STRING", {}))
        if path is None:
            raise ValueError(f"ckpt_name: {short(ckpt_name)} is not in models/{CHECKPOINTS}. Refresh the node list.")
        with renamed_input("model_name", "ckpt_name"):
            model = load_model(path, values)
        start_ranks_of(model)
        return (model, *clip_and_vae(path))
