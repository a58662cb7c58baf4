"""Parallel Checkpoint Loader: an all-in-one file -> MODEL on the ranks, CLIP and VAE in ComfyUI."""

from parallel_backend.placement.residency import AUTO as STREAMED

from .loader import CHECKPOINTS, LoadSettings, file_path, load_model, safetensors_names, widgets
from .model.all_in_one import clip_and_vae
from .sampling.auto_degrees import AS_SET
from .ui.input_checks import coerce, short, validate
from .ui.widgets import CATEGORY


@validate("ckpt_name")
class ParallelCheckpointLoader:
    CATEGORY = CATEGORY
    RETURN_TYPES = ("MODEL", "CLIP", "VAE")
    FUNCTION = "load"
    DESCRIPTION = (
        "Loads an all-in-one file: its transformer split over several GPUs, its text encoder and VAE as Load Checkpoint "
        "does. The transformer is read by the GPUs' processes alone."
    )

    @classmethod
    def INPUT_TYPES(cls):
        tooltip = "An all-in-one safetensors file of models/checkpoints. The kind of model is read from its weights."
        return widgets("ckpt_name", (safetensors_names(CHECKPOINTS), {"tooltip": tooltip}))

    def load(
        self,
        ckpt_name,
        weight_dtype,
        pipefusion_degree,
        tensor_parallel_degree,
        split_batch_degree,
        devices,
        parallel_config=None,
        stage_split="auto",
        compile=False,
        degrees=AS_SET,
        offload=STREAMED,
        cuda_graphs=False,
    ):
        path = file_path(CHECKPOINTS, coerce("ckpt_name", ckpt_name, "STRING", {}))
        if path is None:
            raise ValueError(f"ckpt_name: {short(ckpt_name)} is not in models/{CHECKPOINTS}. Refresh the node list.")
        settings = LoadSettings(
            weight_dtype=weight_dtype,
            pipefusion_degree=pipefusion_degree,
            tensor_parallel_degree=tensor_parallel_degree,
            split_batch_degree=split_batch_degree,
            devices=devices,
            parallel_config=parallel_config,
            stage_split=stage_split,
            compile=compile,
            degrees=degrees,
            offload=offload,
            cuda_graphs=cuda_graphs,
        )
        try:
            model = load_model(path, settings)
        except ValueError as error:  # as Parallel DiT Loader words it, by the name of its own input
            if not str(error).startswith("model_name: "):
                raise
            raise ValueError(str(error).replace("model_name: ", "ckpt_name: ", 1)) from error
        return (model, *clip_and_vae(path))
