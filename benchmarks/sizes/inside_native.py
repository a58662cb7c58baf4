"""Run by ComfyUI's Python, in its folder: a call of ComfyUI's own class of each model on a hollow device.

Reads cases from standard input as JSON, and writes their figures to standard output.
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
said, sys.stdout = sys.stdout, sys.stderr  # whatever ComfyUI prints
sys.argv = [sys.argv[0], "--cpu", "--use-pytorch-cross-attention"]
sys.path.insert(0, str(Path.cwd()))

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import comfy.model_detection  # noqa: E402
import torch  # noqa: E402

sys.path.append(str(ROOT))

from benchmarks.sizes.hollow.account import Account  # noqa: E402
from benchmarks.sizes.hollow.cuda import hollow_cuda  # noqa: E402
from benchmarks.sizes.hollow.tensors import Devices  # noqa: E402

DEVICE = torch.device("cuda", 0)


def built(case: dict[str, Any]) -> torch.nn.Module:
    """The class that ComfyUI makes for a file of these shapes, in bf16, on the hollow device."""
    state = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in case["shapes"].items()}
    config = comfy.model_detection.model_config_from_unet(state, "", metadata={})
    config.set_inference_dtype(torch.bfloat16, None)
    with torch.device("meta"):
        model = config.get_model(state, "", device=torch.device("meta")).diffusion_model.eval()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            on_device = torch.empty(parameter.shape, dtype=parameter.dtype, device=DEVICE)
            setattr(module, name, torch.nn.Parameter(on_device, requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=DEVICE))
    return model


def on_device(value: Any) -> Any:
    """A value of a call, with zeros for each {"shape": ...}."""
    if isinstance(value, dict):
        return torch.zeros(*value["shape"], dtype=torch.bfloat16, device=DEVICE)
    return [on_device(each) for each in value] if isinstance(value, list) else value


def figures(case: dict[str, Any]) -> dict[str, int]:
    """Of the second call, whose inputs are on the device."""
    accounts = (Account(),)
    with hollow_cuda(accounts), Devices(accounts), torch.inference_mode():
        model = built(case)
        made = {name: torch.zeros(*shape, dtype=torch.bfloat16, device=DEVICE) for name, shape in case["tensors"].items()}
        latents = [torch.zeros(case["entries"], *shape, dtype=torch.bfloat16, device=DEVICE) for shape in case["latents"]]
        x = latents if len(latents) > 1 else latents[0]
        timestep = torch.full((case["entries"],), case["timestep"], device=DEVICE)
        values = {name: on_device(value) for name, value in case["values"].items()}
        for _ in range(2):
            accounts[0].begin()
            model(x, timestep, transformer_options={}, **made, **values)
        (account,) = accounts
        return {
            "kernels": account.kernels.total(),
            "products": account.products,
            "moved": account.moved.total(),
            "stops": account.stops,
            "by name": {name: (count, account.moved[name]) for name, count in account.kernels.most_common()},
        }


print(json.dumps([figures(case) for case in json.load(sys.stdin)]), file=said)
