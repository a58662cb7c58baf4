"""ComfyUI's own class on the same file. Arguments: the model's name, the folder of its file, the checkout."""

import dataclasses
import importlib
import importlib.util
import os
import sys
from pathlib import Path

said, sys.stdout = sys.stdout, sys.stderr
name, folder, root = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
here, comfyui = str(Path(__file__).parent), str(Path.home() / "ComfyUI")
sys.argv = [sys.argv[0], "--cpu", "--use-pytorch-cross-attention"]
os.chdir(comfyui)
sys.path.insert(0, comfyui)

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import comfy.model_detection  # noqa: E402
import torch  # noqa: E402

import nodes  # noqa: E402, F401 - ComfyUI's, before a folder of the same name is in the path

sys.path += [root, here]
PACK = "parallel_dit_pack"
spec = importlib.util.spec_from_file_location(PACK, f"{root}/__init__.py", submodule_search_locations=[root])
assert spec is not None and spec.loader is not None
sys.modules[PACK] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[PACK])

from cases import SIZES, drawn, latents, text  # noqa: E402
from replay_server import serve  # noqa: E402

from benchmarks.one_gpu import host_time  # noqa: E402
from parallel_backend.checkpoints.checkpoint import open_own_class  # noqa: E402
from parallel_backend.own_class.adapters.adapters import adapter_of  # noqa: E402
from parallel_backend.own_class.calls.call_arguments import OPTIONS, in_form, to_tensors  # noqa: E402
from parallel_backend.own_class.calls.tried_calls import Call  # noqa: E402
from parallel_backend.own_class.trials.trial import trial  # noqa: E402

model_file = importlib.import_module(f"{PACK}.nodes.model.loading.model_file")
detected = {
    "krea-2": {"txtheads": 3, "txtkvheads": 3},
    "qwen-image": {"num_attention_heads": 2, "joint_attention_dim": 64},
}.get(name, {})
detect = comfy.model_detection.detect_unet_config
comfy.model_detection.detect_unet_config = lambda *given, **named: (detect(*given, **named) or {}) | detected
path = folder / "small.safetensors"
own = model_file.open_file(path, model_file.importing("cuda:0")).own

latent, time = latents(name), torch.full((1,), SIZES[name][2])
parts = list(latent) if isinstance(latent, tuple) else latent
x, timestep, form = in_form(parts, [time] * len(parts) if name == "ltx-2.3" else time, 5)
# MiniMax H3 gets its text as ComfyUI's preprocess_text_embeds makes it.
given = {"context": drawn(1, 8, 64) if name == "minimax-h3" else text(name), "control": None, OPTIONS: {}}
given |= {"frame_rate": 24.0} if name == "ltx-2.3" else {}
named = {**adapter_of(own.kind).arguments(given, None, tuple(x.shape[2:])), **form}
proof = trial(own, Call(x, timestep, named), (1000.0, 1.0) if name == "minimax-h3" else (1.0, 0.01), bands=True)
own = dataclasses.replace(own, blocks=proof.blocks, latent=proof.latent)
opened = open_own_class(path, own)
tensors = to_tensors(named, timestep, () if isinstance(parts, list) else x.shape[1:])
sent = x if opened.built.patching.companion is None else latent
serve(
    host_time,
    lambda degrees, bands: host_time.recorded(opened, (sent, timestep, tensors), degrees, bands, own_class=own),
    said,
)
