"""Parallelize Model against Parallel DiT Loader with the same degrees, and against the native MODEL. Run by serve.py."""

import functools
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import comfy.model_management
import folder_paths
from boot import BASE, PACK, Results, comfy, difference, ksampler, node, nodes, parallel, random_prompts, sequence, torch
from comfy_extras import nodes_model_advanced, nodes_model_merging
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(PACK))
from parallel_backend.checkpoints.tensor_files import MappedFile, read_header
from testing.gguf_files import write_gguf

sys.path.remove(str(PACK))

FLUX, SD3 = "tiny.safetensors", "tiny-sd3.safetensors"
LAYERS = ("double_blocks.0.img_attn.proj", "single_blocks.1.linear2")
LATENT = torch.zeros(1, 16, 8, 12)


def taken(model, mode: str = "ulysses", gpus: int = 2, config=None):
    return node("ParallelizeModel", model, gpus, mode, config)


def sampled(model, texts=None, **settings) -> torch.Tensor:
    return ksampler(model, random_prompts(9, 5) if texts is None else texts, LATENT, **({"steps": 2} | settings))


def mapped(model, name: str) -> float:
    """Share of the native weights' bytes that lie in the map of the file."""
    spans = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            if line.rstrip().endswith(name):
                spans.append([int(end, 16) for end in line.split()[0].split("-")])
    weights = list(model.model.diffusion_model.parameters())
    inside = [each for each in weights if any(start <= each.data_ptr() < stop for start, stop in spans)]
    return sum(each.nbytes for each in inside) / sum(each.nbytes for each in weights)


@functools.cache
def native():
    """Load Diffusion Model's MODEL."""
    return node("UNETLoader", FLUX, "default")


GGUF = "of another list.GGUF"


def gguf_model(name: str):
    """As ComfyUI-GGUF's loaders make it: layers and a ModelPatcher of a pack's, and no file on the MODEL."""
    path = str(BASE / "custom_nodes" / "gguf" / "ops.py")
    pack = sys.modules["gguf_pack.ops"] = SimpleNamespace(__file__=path)
    ops = type("GGMLOps", (comfy.ops.manual_cast,), {})
    ops.Linear = type("Linear", (comfy.ops.manual_cast.Linear,), {"__module__": "gguf_pack.ops"})
    patcher = type("GGUFModelPatcher", (comfy.model_patcher.ModelPatcher,), {"__module__": "gguf_pack.ops"})
    pack.GGMLOps = ops
    path = BASE / "models" / "diffusion_models" / name
    header, file = read_header(path), MappedFile(path)
    tensors = {key: file.tensor(entry).clone() for key, entry in header.entries.items()}
    model = comfy.sd.load_diffusion_model_state_dict(
        tensors, model_options={"custom_operations": ops}, metadata=header.texts
    )
    return patcher.clone(model)


def gguf_loader() -> dict:
    """The prompt's graph names the file."""
    folder = BASE / "models" / "diffusion_models"
    values = {key: (value.numpy(), "F32") for key, value in load_file(folder / FLUX).items()}
    write_gguf(folder / GGUF, values)
    listed = nodes.NODE_CLASS_MAPPINGS["ParallelDiTLoader"].INPUT_TYPES()["required"]["model_name"][0]
    kind = SimpleNamespace(RETURN_TYPES=("MODEL",))
    graph = {
        "1": {"class_type": "UnetLoaderGGUFDisTorch2MultiGPU", "inputs": {"unet_name": GGUF, "compute_device": "cpu"}},
        "2": {"class_type": "LoraLoaderModelOnly", "inputs": {"model": ["1", 0], "lora_name": "parallelize 0.safetensors"}},
        "3": {"class_type": "ParallelizeModel", "inputs": {"model": ["2", 0]}},
    }
    module = sys.modules[nodes.NODE_CLASS_MAPPINGS["ParallelizeModel"].__module__]
    with (
        patch.object(module, "executing", lambda: (graph, "3")),
        patch.dict(nodes.NODE_CLASS_MAPPINGS, {"UnetLoaderGGUFDisTorch2MultiGPU": kind}),
    ):
        got = sampled(taken(two_loras(gguf_model(GGUF))))
    expected = sampled(two_loras(parallel(GGUF, pipe=1, config=sequence(ulysses=2))))
    return {"listed": GGUF in listed, "behind": difference(got, expected)}


def lora(number: int) -> dict[str, torch.Tensor]:
    layer, g = LAYERS[number], torch.Generator().manual_seed(number)
    weight = load_file(BASE / "models" / "diffusion_models" / FLUX)[f"{layer}.weight"]
    up, down = torch.randn(len(weight), 4, generator=g), 0.05 * torch.randn(4, weight.shape[1], generator=g)
    return {f"diffusion_model.{layer}.lora_B.weight": up, f"diffusion_model.{layer}.lora_A.weight": down}


def two_loras(model):
    for number in range(len(LAYERS)):
        save_file(lora(number), BASE / "models" / "loras" / f"parallelize {number}.safetensors")
        folder_paths.filename_list_cache.clear()
        model = node("LoraLoaderModelOnly", model, f"parallelize {number}.safetensors", 1.0 - 0.3 * number)
    return model


def wrapped(model):
    """With a wrapper that scales each call's output, a callback, an attachment and an option of a call."""
    clone, kinds = model.clone(), comfy.patcher_extension.WrappersMP
    clone.add_wrapper_with_key(kinds.APPLY_MODEL, "half", lambda executor, *args, **named: 0.5 * executor(*args, **named))
    clone.add_callback(comfy.patcher_extension.CallbacksMP.ON_PRE_RUN, lambda patcher: patcher.set_attachments("ran", True))
    clone.set_attachments("mine", [1])
    clone.set_model_sampler_post_cfg_function(lambda args: 1.1 * args["denoised"])
    return clone


WRAPS: dict[str, Callable] = {
    "nothing": lambda model: model,
    "two LoRAs": two_loras,
    "wrappers and options": wrapped,
    "merge": lambda model: nodes_model_merging.ModelMergeSimple().merge(model, two_loras(native()), 0.4)[0],
}


def main(results: Results) -> None:
    loaded, given = [], comfy.model_management.load_models_gpu

    def load_models_gpu(models, *arguments, **named):
        loaded.extend(model.model for model in models)
        return given(models, *arguments, **named)

    def compare(wrap: Callable) -> dict:
        ours = sampled(wrap(parallel(FLUX, pipe=1, config=sequence(ulysses=2))))
        loaded.clear()
        with patch.object(comfy.model_management, "load_models_gpu", load_models_gpu):
            behind = difference(ours, sampled(wrap(taken(native()))))
            ahead = difference(ours, sampled(taken(wrap(native()))))
        return {"behind": behind, "ahead": ahead, "native loaded": any(model is native().model for model in loaded)}

    for name, wrap in WRAPS.items():
        results.case(name, partial(compare, wrap))

    def pipelined() -> dict:
        """`mode` pipefusion is Apply PipeFusion with its defaults, and one behind replaces its settings."""
        model, ours = taken(native(), "pipefusion"), parallel(FLUX)
        few = {"steps": 4}
        default = sampled(node("ApplyPipeFusion", ours, 0, 1, True), **few)
        warmed = sampled(node("ApplyPipeFusion", ours, 2, 3, True), **few)
        return {
            "behind": difference(default, sampled(model, **few)),
            "replaced": difference(warmed, sampled(node("ApplyPipeFusion", model, 2, 3, True), **few)),
            "apart": difference(default, warmed),
        }

    results.case("pipefusion", pipelined)

    def checkpoint() -> dict:
        """Load Checkpoint's MODEL, of an all-in-one file without other parts."""
        folder = BASE / "models" / "checkpoints"
        folder.mkdir(exist_ok=True)
        tensors = load_file(BASE / "models" / "diffusion_models" / SD3)
        save_file(
            {f"model.diffusion_model.{key.removeprefix('model.diffusion_model.')}": value for key, value in tensors.items()},
            folder / "parallelize.safetensors",
        )
        folder_paths.filename_list_cache.clear()
        model = node("CheckpointLoaderSimple", "parallelize.safetensors")

        def shifted(model, shift):
            return nodes_model_advanced.ModelSamplingSD3().patch(model, shift)[0]

        expected = sampled(shifted(parallel(SD3, pipe=1, config=sequence(ulysses=2)), 2.0))
        own = sampled(model)
        found = sampled(taken(shifted(model, 2.0)))
        return {
            "behind": difference(expected, found),
            "mapped": mapped(model, "parallelize.safetensors"),
            "native": difference(own, sampled(model)),
        }

    results.case("CheckpointLoaderSimple", checkpoint)

    def memory() -> dict:
        """A MODEL that was sampled natively, with LoRAs in its weights, and is again after the ranks took its place."""
        own = node("UNETLoader", FLUX, "default")
        block = own.model.diffusion_model.single_blocks[0]
        block.forward = block.forward  # what ComfyUI leaves behind of a LoRA in bypass mode
        patched = two_loras(own)
        before = sampled(patched)
        loaded, copies = own.model.model_loaded_weight_memory, mapped(own, FLUX)
        taken(patched)
        found = {"loaded": [loaded, own.model.model_loaded_weight_memory], "mapped": [copies, mapped(own, FLUX)]}
        return found | {"again": difference(before, sampled(patched))}

    results.case("memory", memory)

    def fp8() -> list[str]:
        own, other = node("UNETLoader", FLUX, "fp8_e4m3fn"), native().clone()
        other.set_model_compute_dtype(torch.bfloat16)
        return [*(taken(each).model.diffusion_model.setup.dtype for each in (own, other)), str(mapped(own, FLUX))]

    results.case("fp8", fp8)

    def edited(change: Callable) -> None:
        own = node("UNETLoader", FLUX, "default")
        taken(change(own) or own)

    def written(model) -> None:
        model.model.diffusion_model.double_blocks[1].img_mlp[0].weight.mul_(1.1)

    def other_forward(model) -> None:
        block = model.model.diffusion_model.single_blocks[0]
        block.forward = partial(lambda *_arguments, **_named: None)

    def made_elsewhere(model) -> None:
        model.cached_patcher_init = (partial(written), ("file",))

    def second_file(model) -> None:
        def _load_diffusion_model_kj(unet_path, model_options=None, extra_state_dict=None, disable_dynamic=False):
            """KJNodes' loader."""

        _load_diffusion_model_kj.__module__ = "custom_nodes.kj.nodes.model_optimization_nodes"
        _load_diffusion_model_kj.__qualname__ = "_load_diffusion_model_kj"
        model.cached_patcher_init = (_load_diffusion_model_kj, (model.cached_patcher_init[1][0], {}, "vace.safetensors"))

    for change in (written, other_forward, made_elsewhere, second_file):
        results.case(change.__name__, partial(edited, change))
    results.case("GGUF", gguf_loader)
    results.case("GGUF, loader not known", lambda: taken(gguf_model(GGUF)) and None)
    results.case("no multiple", lambda: taken(native(), "pipefusion", 3, sequence(ulysses=2)) and None)
