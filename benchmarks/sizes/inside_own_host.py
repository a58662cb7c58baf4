"""Run by ComfyUI's Python, in its folder: milliseconds of a rank's CPU for a step, by ComfyUI's own class and by the family.

    cd ~/ComfyUI && .venv/bin/python PACK/benchmarks/sizes/inside_own_host.py OUT.json

Small files with the published numbers of blocks. The messages of a run on CPU ranks in threads are handled once more by a
worker whose transfers move nothing (benchmarks/one_gpu/host_time.py), in turn for both; medians and least of ROUNDS.
"""

import dataclasses
import importlib
import importlib.util
import json
import statistics
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACK = "parallel_dit_pack"
OUT = Path(sys.argv[1]).resolve()
sys.argv = [sys.argv[0], "--cpu", "--use-pytorch-cross-attention"]
sys.path.insert(0, str(Path.cwd()))

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import comfy.ldm.flux.model  # noqa: E402
import comfy.ldm.wan.model  # noqa: E402
import comfy.ops  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

import nodes  # noqa: E402, F401 - ComfyUI's, before a folder of the same name is in the path

sys.path.append(str(ROOT))

from benchmarks.one_gpu.host_time import recorded, replayed  # noqa: E402
from parallel_backend.checkpoints.checkpoint import open_checkpoint  # noqa: E402
from parallel_backend.checkpoints.own_class import open_own_class  # noqa: E402
from parallel_backend.core.degrees import Degrees  # noqa: E402
from parallel_backend.families.own_class.call_arguments import OPTIONS, to_tensors  # noqa: E402
from parallel_backend.families.own_class.trial import trial  # noqa: E402
from parallel_backend.families.own_class.tried_calls import Call  # noqa: E402

MODES = {
    "one rank": (Degrees(), 0),
    "two stages": (Degrees(pipe=2), 0),
    "Ulysses 2": (Degrees(ulysses=2), 0),
    "two patches": (Degrees(pipe=2), 2),
    "four patches": (Degrees(pipe=2), 4),
}
ROUNDS = 5
FLUX = {
    "in_channels": 16, "out_channels": 16, "vec_in_dim": 768, "context_in_dim": 4096, "hidden_size": 256, "mlp_ratio": 4.0,
    "num_heads": 2, "depth": 19, "depth_single_blocks": 38, "axes_dim": [16, 56, 56], "theta": 10000, "patch_size": 2,
    "qkv_bias": True, "guidance_embed": True, "txt_ids_dims": [], "image_model": "flux",
}  # fmt: skip
WAN = {
    "model_type": "t2v", "dim": 256, "ffn_dim": 512, "num_heads": 2, "num_layers": 40, "patch_size": (1, 2, 2),
    "freq_dim": 256, "in_dim": 16, "out_dim": 16, "text_dim": 4096, "qk_norm": True, "cross_attn_norm": True, "eps": 1e-6,
}  # fmt: skip


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


MODELS = {
    "Flux.1 dev": (
        comfy.ldm.flux.model.Flux,
        FLUX,
        Call(
            drawn(1, 16, 16, 8),
            torch.tensor([0.7]),
            {
                "context": drawn(1, 8, 4096),
                "y": drawn(1, 768),
                "guidance": torch.tensor([3.5]),
                "control": None,
                OPTIONS: {},
            },
        ),
        {"y": "pooled"},
        (1.0, 0.01),
    ),
    "Wan 2.1 T2V": (
        comfy.ldm.wan.model.WanModel,
        WAN,
        Call(drawn(1, 16, 2, 16, 8), torch.tensor([700.0]), {"context": drawn(1, 8, 4096), OPTIONS: {}}),
        {},
        (1000.0, 1.0),
    ),
}
"""Name -> (ComfyUI's class, its arguments, a call, names of the family's for those of the class, times that are tried)."""


def load_pack() -> None:
    """The pack under a name of its own: its `nodes` are then no module of ComfyUI's."""
    spec = importlib.util.spec_from_file_location(PACK, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
    assert spec is not None and spec.loader is not None
    sys.modules[PACK] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[PACK])


def figures(name: str, folder: Path) -> dict[str, Any]:
    """By mode: milliseconds of both, and their ratio."""
    kind, arguments, call, renamed, times = MODELS[name]
    model = kind(**arguments, dtype=torch.float32, device="cpu", operations=comfy.ops.disable_weight_init)
    save_file({key: 0.02 * drawn(*value.shape) for key, value in model.state_dict().items()}, folder / "small.safetensors")
    path = folder / "small.safetensors"
    own = importlib.import_module(f"{PACK}.nodes.model.loading.own_class_file").own_class(
        path, ("cpu",), ValueError(f"no {name}")
    )
    proof = trial(own, call, times, bands=True)
    own = dataclasses.replace(own, blocks=proof.blocks, latent=proof.latent)
    tensors = {renamed.get(key, key): value for key, value in call.named.items() if isinstance(value, torch.Tensor)}
    both = {
        "own class": (
            open_own_class(path, own),
            {"own_class": own},
            to_tensors(call.named, call.timestep, call.x.shape[1:]),
        ),
        "family": (open_checkpoint(path), {}, tensors),
    }
    found = {}
    for mode, (degrees, bands) in MODES.items():
        logs = {
            who: recorded(opened, (call.x, call.timestep, given), degrees, bands, **setup)
            for who, (opened, setup, given) in both.items()
        }
        rounds: dict[str, list[float]] = {who: [] for who in logs}
        for _ in range(ROUNDS):
            for who, log in logs.items():
                rounds[who].append(replayed(log, degrees, "cpu")["host_ms"])
        medians = {who: statistics.median(each) for who, each in rounds.items()}
        least = {who: min(each) for who, each in rounds.items()}
        found[mode] = {
            "ms": rounds,
            "ratio of medians": round(medians["own class"] / medians["family"], 3),
            "of least": round(least["own class"] / least["family"], 3),
        }
        print(name, mode, found[mode], flush=True)
    return found


torch.set_num_threads(1)
load_pack()
result: dict[str, Any] = {"what": "own_class_host_cpu", "date": date.today().isoformat(), "models": {}}
for each in MODELS:
    with tempfile.TemporaryDirectory() as place:
        result["models"][each] = figures(each, Path(place))
    OUT.write_text(json.dumps(result) + "\n")
