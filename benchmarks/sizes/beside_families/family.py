"""The family of a checkout that still has it. Arguments: the model's name, a folder for its file, the checkout."""

import sys
from pathlib import Path

said, sys.stdout = sys.stdout, sys.stderr
name, folder = sys.argv[1], Path(sys.argv[2])
sys.path.insert(0, sys.argv[3])

import torch  # noqa: E402
from cases import SIZES, latents, text  # noqa: E402
from replay_server import serve  # noqa: E402
from testing.cases import krea2, ltx2, minimax_h3, qwen_image  # noqa: E402

from benchmarks.one_gpu import host_time  # noqa: E402
from parallel_backend.checkpoints.checkpoint import open_checkpoint  # noqa: E402

torch.manual_seed(0)
case, config = {
    "krea-2": (krea2.CASES[0], krea2.NATIVE | {"num_layers": 28}),
    "qwen-image": (qwen_image.CASES[0], qwen_image.CONFIG | qwen_image.NATIVE | {"num_layers": 60}),
    "ltx-2.3": (ltx2.CASES[0], ltx2.LTX23 | {"num_layers": 48}),
    "minimax-h3": (minimax_h3.CASES[0], minimax_h3.CONFIG | {"num_layers": 50, "hidden_size": 64, "freq_dim": 256}),
}[name]
opened = open_checkpoint(case.save(case.model(config), folder / "small.safetensors", config))
x = latents(name)
shape = tuple((x[0] if isinstance(x, tuple) else x).shape)
call = {"context": text(name), "grid": case.row.patching.grid(shape), "frame_rate": 24.0}
tensors = case.row.inputs.conditioning(opened.config, call)
timestep = torch.full((1,), SIZES[name][2])
serve(host_time, lambda degrees, bands: host_time.recorded(opened, (x, timestep, tensors), degrees, bands), said)
