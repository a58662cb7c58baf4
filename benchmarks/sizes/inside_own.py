"""Run by ComfyUI's Python, in its folder: ranks run ComfyUI's own class of models of real size on hollow devices (own.py).

Arguments: cases like "flux-dev:ulysses:2". A line of JSON for each, its figures by rank, goes to standard output.
"""

import dataclasses
import importlib
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
PACK = "parallel_dit_pack"
cases = [case.split(":") for case in sys.argv[1:]]
said, sys.stdout = sys.stdout, sys.stderr  # whatever ComfyUI prints
sys.argv = [sys.argv[0], "--cpu", "--use-pytorch-cross-attention"]
sys.path.insert(0, str(Path.cwd()))

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import torch  # noqa: E402

import nodes  # noqa: E402, F401 - ComfyUI's, before a folder of the same name is in the path

sys.path.append(str(ROOT))

from benchmarks.sizes.hollow.ranks import hollow_pool  # noqa: E402
from benchmarks.sizes.real_models import REAL_MODELS, RealModel  # noqa: E402
from benchmarks.sizes.trace import Figures, Inputs, traced  # noqa: E402
from parallel_backend.checkpoints.checkpoint import open_own_class  # noqa: E402
from parallel_backend.core.degrees import Degrees  # noqa: E402
from parallel_backend.own_class.adapters.adapters import adapter_of  # noqa: E402
from parallel_backend.own_class.built.building import build  # noqa: E402
from parallel_backend.own_class.calls.call_arguments import (  # noqa: E402
    OPTIONS,
    in_form,
    structure_of,
    to_tensors,
)
from parallel_backend.own_class.calls.tried_calls import Call  # noqa: E402
from parallel_backend.own_class.trials.trial import trial  # noqa: E402
from parallel_backend.rank import stage_forward  # noqa: E402
from testing.files import write_header  # noqa: E402
from testing.models import on_ranks  # noqa: E402


def load_pack() -> None:
    """The pack under a name of its own: its `nodes` are then no module of ComfyUI's."""
    spec = importlib.util.spec_from_file_location(PACK, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
    assert spec is not None and spec.loader is not None
    sys.modules[PACK] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[PACK])


def figures(real: RealModel, degrees: Degrees) -> list[Figures]:
    """By rank, as trace.py has them, of all blocks. What the degrees need is tried first."""
    model_file = importlib.import_module(f"{PACK}.nodes.model.loading.model_file")
    with tempfile.TemporaryDirectory() as folder:
        path = real.save(Path(folder) / "model.safetensors")
        own = model_file.open_file(path, model_file.importing("cuda:0")).own
        # Of the file some of the class's tensors are missing: those that compute on a prompt.
        keys, shapes = dict(own.keys), {name: tuple(each.shape) for name, each in build(own).state_dict().items()}
        write_header(path, {keys.get(name, name): shape for name, shape in shapes.items()})
        x, timestep, form = in_form(real.noise(), torch.full((real.entries,), real.timestep), 5 if own.video else 4)
        arguments = real.call_tensors()
        context = arguments.pop("context")
        sent = adapter_of(own.kind).arguments(arguments, None, tuple(x.shape[2:]))
        named = {"context": context, "control": None, OPTIONS: {}, **sent, **form}
        if degrees.world > 1:
            times = real.timestep, real.timestep / 2
            kept = degrees.pipe > 1 or degrees.displaced
            call = Call(x, timestep, named)
            proof = trial(own, call, times, lambda _: None, degrees.sequence > 1, kept, degrees.tensor)
            own = dataclasses.replace(own, blocks=proof.blocks, latent=proof.latent)
        halves = {name: each.bfloat16() if isinstance(each, torch.Tensor) else each for name, each in named.items()}
        tensors = to_tensors(halves, timestep, tuple(x.shape[1:]))
        told = structure_of(tensors)  # no value can be read from a hollow device
        told_once = mock.patch.object(stage_forward, "structure_of", lambda _: told)
        with hollow_pool(degrees.world) as (pool, accounts), told_once:
            opened = open_own_class(path, own)
            model = on_ranks(pool, opened, degrees, "bf16", "sdpa", lambda: None, stage_split="even", own_class=own)
            return traced(pool, model, Inputs(x, tensors, real.timestep), accounts)


load_pack()
for name, axis, ranks in cases:
    print(json.dumps(figures(REAL_MODELS[name], Degrees(**{axis: int(ranks)}))), file=said, flush=True)
