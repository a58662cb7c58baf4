"""One of ComfyUI's own templates, made small, with its own loaders and with ours. Run by serve.py.

A template runs up to its samplers, in ComfyUI's executor, with its own nodes. What counts is every sampler's
latent.
"""

import asyncio
import inspect
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import comfy.lora
import comfy.samplers
import comfy.sd
import comfy.utils
import core_controls
import execution
import folder_paths
import stand_ins
from boot import BASE, Results, masking, other_attention, torch
from fun_control import KINDS, network
from safetensors.torch import save_file
from server import PromptServer
from small_cases import detecting
from small_models import detected, small_model

import nodes

SMALL = {  # inputs of nodes, by the last word of their name -> the largest value
    **dict.fromkeys(("width", "height", "target_width", "target_height", "longer_size", "longer_edge", "largest_size",
                     "shorter_size", "resolution", "size"), stand_ins.SIDE),
    **dict.fromkeys(("length", "frames_number", "num_frames", "video_frames", "frames"), stand_ins.FRAMES),
    "megapixels": stand_ins.SIDE**2 / 2**20,
}  # fmt: skip
H3_FRAMES, H3_FRAMES_WITH_GUIDES = 22, 124
RANK = 4
LOADERS = {"UNETLoader": "unet_name", "CheckpointLoaderSimple": "ckpt_name"}
ON_TWO_RANKS = {
    "weight_dtype": "fp32",
    "pipefusion_degree": 1,
    "tensor_parallel_degree": 1,
    "split_batch_degree": 1,
    "devices": "cpu,cpu",
    "stage_split": "even",
}
STAGES = {"pipefusion_degree": 2}
MODES = {
    "stages": STAGES,
    "split batch": {"split_batch_degree": 2},
    "ulysses": {"parallel_config": ["ulysses", 0]},
    "bands": STAGES,
}
"""Inputs of the loader. In bands Apply PipeFusion is behind it, with all steps exact."""
ULYSSES = {
    "ulysses_degree": 2,
    "ring_degree": 1,
    "patch_mode": "none",
    "patch_degree": 1,
    "attention": "auto",
    "comm_overlap": True,
}
PIPEFUSION = {"num_pipeline_patch": 2, "warmup_steps": 1000, "overlap": True}


class Server(SimpleNamespace):
    """What executor and nodes tell of progress goes nowhere."""

    def send_sync(self, *_arguments: Any, **_named: Any) -> None:
        """Nobody listens."""

    send_progress_text = send_sync


def make_small(kind: str, inputs: dict[str, list], h3_frames: int) -> None:
    """Cut sizes down where a node is about to be run with them; start and end of sampling are left, which are of steps."""
    for name, values in inputs.items():
        last = name.rpartition(".")[2]
        if last in SMALL:
            most = h3_frames if last == "length" and kind.startswith("MiniMaxH3") else SMALL[last]
            inputs[name] = [min(value, most) if isinstance(value, (int, float)) else value for value in values]


def write_lora(name: str, model_file: str) -> None:
    """A LoRA of every linear layer of some width, under the file's keys."""
    state = comfy.utils.load_torch_file(folder_paths.get_full_path_or_raise("diffusion_models", model_file))
    lora = {}
    for key, value in state.items():
        if value.ndim != 2 or not key.endswith(".weight") or min(value.shape) < RANK or "block" not in key:
            continue
        layer = f"diffusion_model.{key.removesuffix('.weight')}"
        lora[f"{layer}.lora_A.weight"] = 0.1 * stand_ins.random(name + key, RANK, value.shape[1])
        lora[f"{layer}.lora_B.weight"] = 0.1 * stand_ins.random(key + name, value.shape[0], RANK)
    path = BASE / "models" / "loras" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(lora, path)


def run(prompt: dict[str, Any]) -> list[torch.Tensor]:
    """What each call of a sampler gave, in the order of their ends. RuntimeError, with the node, if the prompt fails."""
    found: list[torch.Tensor] = []
    sample, get_output_data = comfy.samplers.CFGGuider.sample, execution.get_output_data

    def recorded(self, *arguments, **named):
        samples = sample(self, *arguments, **named)
        found.extend(samples.unbind() if samples.is_nested else [samples])
        return samples

    async def smaller(prompt_id, unique_id, obj, input_data_all, *arguments, **named):
        make_small(prompt[unique_id]["class_type"] if unique_id in prompt else "", input_data_all, h3_frames)
        return await get_output_data(prompt_id, unique_id, obj, input_data_all, *arguments, **named)

    guided = any(node["class_type"] == "MiniMaxH3AddGuide" for node in prompt.values())
    h3_frames = H3_FRAMES_WITH_GUIDES if guided else H3_FRAMES
    samplers = [name for name, node in prompt.items() if "LATENT" in returns(node) and takes_model(node)]
    assert samplers, "no sampler"
    server = Server(client_id=None, last_node_id=None, prompt_queue=None)
    executor = execution.PromptExecutor(server, cache_args={"ram": 0, "ram_inactive": 0, "lru": 0})
    with (
        patch.object(comfy.samplers.CFGGuider, "sample", recorded),
        patch.object(execution, "get_output_data", smaller),
        patch.object(PromptServer, "instance", server, create=True),
    ):
        executor.execute(prompt, "template", {}, samplers)
    if not executor.success:
        (failed,) = [
            data for event, data in executor.status_messages if event in ("execution_error", "execution_interrupted")
        ]
        text = f"{failed['node_type']}: {failed.get('exception_type', '')} {failed.get('exception_message', '')}"
        raise RuntimeError("".join(failed.get("traceback", ())[-3:]) + text)
    return found


def returns(node: dict[str, Any]) -> tuple[str, ...]:
    kind = nodes.NODE_CLASS_MAPPINGS.get(node["class_type"])
    return () if kind is None else tuple(kind.RETURN_TYPES)


def takes_model(node: dict[str, Any]) -> bool:
    return bool({"model", "guider"} & set(node["inputs"]))


def load_native(name: str) -> Any:
    path = folder_paths.get_full_path_or_raise("diffusion_models", name)
    return comfy.sd.load_diffusion_model(path, model_options={"dtype": torch.float32})


def install_loaders(load: Callable[[str], Any], files: Collection[str], case: stand_ins.Case, vae: stand_ins.Vae) -> None:
    """ComfyUI's loaders give what `load` does of these diffusion models, with stand-ins for an all-in-one file's rest. Of
    other files, which are for nodes with stand-ins, they give None."""

    def loaded(name: str) -> Any:
        return load(name) if name in files else None

    stand_ins.replace("UNETLoader", lambda unet_name, **_inputs: (loaded(unet_name),))
    stand_ins.replace("CheckpointLoaderSimple", lambda ckpt_name: (loaded(ckpt_name), stand_ins.Clip(case), vae))


def with_ours(prompt: dict[str, Any], files: dict[str, str], mode: str = "stages") -> dict[str, Any]:
    """Our loader on two ranks, in one of MODES, for the MODEL of each loader; an all-in-one file's CLIP and VAE stay."""
    loaders = {
        name: file
        for name, node in prompt.items()
        if node["class_type"] in LOADERS and (file := node["inputs"][LOADERS[node["class_type"]]]) in files
    }
    ours: dict[str, Any] = {"ulysses": {"class_type": "UlyssesConfig", "inputs": ULYSSES}} if mode == "ulysses" else {}
    for name, file in loaders.items():
        loaded, model = (
            f"{name} loaded",
            {"class_type": "ParallelDiTLoader", "inputs": ON_TWO_RANKS | MODES[mode] | {"model_name": file}},
        )
        ours[f"{name} ours"] = model
        if mode == "bands":
            ours[loaded] = model
            ours[f"{name} ours"] = {"class_type": "ApplyPipeFusion", "inputs": {"model": [loaded, 0], **PIPEFUSION}}

    def linked(value: Any) -> Any:
        return [f"{value[0]} ours", 0] if isinstance(value, list) and value[0] in loaders and value[1] == 0 else value

    for name, node in prompt.items():
        ours[name] = {**node, "inputs": {key: linked(value) for key, value in node["inputs"].items()}}
    return ours


def differences(expected: list[torch.Tensor], found: list[torch.Tensor]) -> list[float]:
    assert [each.shape for each in expected] == [each.shape for each in found]
    pairs = zip(expected, found, strict=True)
    return [float(torch.nan_to_num((a - b).abs(), nan=math.inf).max() / a.abs().max()) for a, b in pairs]


def figures(samples: list[torch.Tensor]) -> dict[str, Any]:
    return {
        "shapes": [list(each.shape) for each in samples],
        "largest": [float(each.abs().max()) for each in samples],
        "finite": all(bool(each.isfinite().all()) for each in samples),
    }


def with_stand_ins(clip: stand_ins.Clip, vae: stand_ins.Vae) -> AbstractContextManager:
    """Within it our loader of all-in-one files has these beside the MODEL."""
    loader = nodes.NODE_CLASS_MAPPINGS["ParallelCheckpointLoader"]
    return patch.dict(inspect.unwrap(loader.load).__globals__, clip_and_vae=lambda _path: (clip, vae))


def has_boolean_masks(case: stand_ins.Case) -> bool:
    return small_model(case.name).get("boolean_masks", False)


@contextmanager
def prepared(files: dict[str, str], loras: dict[str, str]) -> Iterator[tuple[stand_ins.Case, stand_ins.Vae]]:
    """Within it nodes have stand-ins for a template's files: whose prompts they make, and its VAE. See `main`."""
    case = stand_ins.Case(next(iter(files.values())))
    with detecting(detected(case.name)):
        native = load_native(next(iter(files))).model
        vae = stand_ins.install(case, native.latent_format)
        if case.name.startswith("z-image"):
            config = native.model_config.unet_config
            blocks = (config["n_layers"] + 1) // 2  # of the network, each behind one of two blocks of the model
            control = network(config["dim"], config["n_heads"], 0, KINDS["refining"], blocks)
            stand_ins.replace("ModelPatchLoader", lambda name: (control,))
        if case.name.startswith("minimax-h3"):
            branch = core_controls.of_h3(native.model_config.unet_config)
            stand_ins.replace("ModelPatchLoader", lambda name: (branch,))
        if case.name == "qwen-image":
            config = {name: value for name, value in native.model_config.unet_config.items() if name != "dtype"}
            stand_ins.replace(
                "ControlNetLoader",
                lambda control_net_name: (core_controls.of_qwen(config, "Inpainting" in control_net_name),),
            )
        attending = masking if has_boolean_masks(case) else lambda model: model
        install_loaders(lambda name: attending(load_native(name)), files, case, vae)
        for name, file in loras.items():
            write_lora(name, file)
        yield case, vae


def main(
    results: Results,
    prompt: dict[str, Any],
    files: dict[str, str],
    loras: dict[str, str],
    alone: bool = False,
) -> None:
    """`files`: a diffusion model's name in the template -> the case it is of. `loras`: a LoRA's name -> the model's file.
    `alone`: the prompt has our loaders, and there is nothing to compare it with."""
    asyncio.run(nodes.init_builtin_extra_nodes())
    with prepared(files, loras) as (case, vae):
        if alone:
            with with_stand_ins(stand_ins.Clip(case), vae):
                results.case("alone", lambda: figures(run(prompt)))
            return
        expected: list[torch.Tensor] = []

        def native() -> dict[str, Any]:
            expected.extend(run(prompt))
            return figures(expected)

        results.case("native", native)
        if not expected:
            return
        results.case("ours", lambda: differences(expected, run(with_ours(prompt, files))))
        if has_boolean_masks(case):  # read as such by one kernel alone
            results.case("native itself", lambda: [0.0 for _ in expected])
            return
        install_loaders(lambda name: other_attention(load_native(name)), files, case, vae)
        results.case("native itself", lambda: differences(expected, run(prompt)))
