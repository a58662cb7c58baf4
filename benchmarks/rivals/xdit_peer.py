"""One rank of xDiT (the `xfuser` package, 0.7) on a CPU: the field's own PipeFusion, Ulysses and CFG split as a peer.

Runs in an interpreter of its own, which has xfuser and none of this repository: `peers.XditRanks` starts it as

    /path/to/xdit/bin/python benchmarks/rivals/xdit_peer.py '{"rank": 0, "world": 2, ...}'    (see Settings)

and sends lines of JSON. The pipelines, wrappers, schedulers and collectives are xDiT's as shipped. As shipped they do not
start on a CPU: `load_xfuser` says what is changed, in this process only, and why.
"""

import contextlib
import importlib.util
import json
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

PIXELS = 8
"""Of a picture, per latent pixel: what the pipelines take for granted without a VAE."""


@dataclass(frozen=True)
class Settings:
    """`degrees`: pipe, ulysses, ring, cfg, tensor; `patches`: PipeFusion's. `inputs`: a safetensors file, see `arguments`.

    `folder`: the transformer as diffusers saves it. `sample`: the file to which the last rank writes each run's latent.
    `links`: folder of the Switch that is between the ranks (harness/slow_link.py); empty for the machine's own links.
    """

    rank: int
    world: int
    threads: int
    store: str
    folder: str
    inputs: str
    sample: str
    degrees: dict[str, int]
    patches: int
    links: str


def slow_down(links: Path, world: int) -> None:
    """As slow_link.slow_down. The module is read by its path: this interpreter has no other part of the repository."""
    spec = importlib.util.spec_from_file_location("slow_link", Path(__file__).parents[1] / "harness" / "slow_link.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there for their annotations
    spec.loader.exec_module(module)
    module.slow_down(links, world)


def load_xfuser() -> ModuleType:
    """xfuser with what it takes for granted about CUDA changed from outside.

    It asks for a CUDA version while it is imported and for a collective backend by device name, and knows neither for a
    CPU; it takes sequence parallelism for missing where there is no CUDA device; between two exchanges of shapes it
    synchronises with a device; and it lets go of a send under way, which NCCL finishes all the same and Gloo does not. Its
    submodule `envs` is loaded before the package, which reads the first three at once.
    """
    spec = importlib.util.find_spec("xfuser")
    package = importlib.util.module_from_spec(spec)
    sys.modules["xfuser"] = package
    envs = importlib.import_module("xfuser.envs")
    envs.get_device_version = lambda: "12.4"  # it checks that one is at least 11.3, for CUDA graphs
    envs.get_torch_distributed_backend = lambda: "gloo"
    envs.PACKAGES_CHECKER.packages_info["has_long_ctx_attn"] = True
    spec.loader.exec_module(package)
    coordinator = importlib.import_module("xfuser.core.distributed.group_coordinator")
    coordinator.synchronize = lambda: None
    keep_sends(coordinator.PipelineGroupCoordinator)
    groups = importlib.import_module("yunchang.globals").PROCESS_GROUP
    importlib.import_module("xfuser.model_executor.layers.usp").PROCESS_GROUP = groups
    return package


def keep_sends(coordinator: type) -> None:
    """Hold on to each send and its tensor until it is done."""
    shipped, under_way = coordinator._pipeline_isend, deque()

    def isend(self: Any, tensor: torch.Tensor) -> dist.Work:
        while under_way and under_way[0][0].is_completed():
            under_way.popleft()
        under_way.append((shipped(self, tensor), tensor))
        return under_way[-1][0]

    coordinator._pipeline_isend = isend


def engine_config(settings: Settings) -> Any:
    from xfuser.config import config as c

    degrees, world = settings.degrees, settings.world
    parallel = c.ParallelConfig(
        dp_config=c.DataParallelConfig(1, degrees["cfg"] == 2, world),
        sp_config=c.SequenceParallelConfig(degrees["ulysses"], degrees["ring"], dit_parallel_size=world),
        pp_config=c.PipeFusionParallelConfig(degrees["pipe"], settings.patches, None, world),
        tp_config=c.TensorParallelConfig(degrees["tensor"], dit_parallel_size=world),
        fs_config=c.FullyShardConfig(dit_parallel_size=world),
        vae_config=c.VaeParallelConfig(),
        world_size=world,
        dit_parallel_size=world,
        vae_parallel_size=0,
    )
    runtime = c.RuntimeConfig(warmup_steps=1, dtype=torch.float32, attention_backend="SDPA")
    return c.EngineConfig(c.ModelConfig(settings.folder), runtime, parallel, c.FastAttnConfig())


def pipeline(settings: Settings, package: ModuleType) -> Any:
    import diffusers

    timesteps = 1000  # the pipeline hands on a thousandth of it: the model gets sigma
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(timesteps, shift=1.0)
    parts = {"vae": None, "text_encoder": None, "tokenizer": None, "scheduler": scheduler}
    transformer = diffusers.FluxTransformer2DModel.from_pretrained(settings.folder)
    parts |= {"text_encoder_2": None, "tokenizer_2": None}
    theirs, wrapper = diffusers.FluxPipeline, package.xFuserFluxPipeline
    made = wrapper(theirs(transformer=transformer.eval().requires_grad_(False), **parts), engine_config(settings))
    made.set_progress_bar_config(disable=True)
    return made


def arguments(settings: Settings) -> dict[str, Any]:
    """The pipeline's, from tensors `latent` [1, C, H, W], `context` [1, T, D] and `pooled` [1, v]."""
    given = load_file(settings.inputs)
    height, width = (PIXELS * side for side in given["latent"].shape[-2:])
    made = {"height": height, "width": width, "prompt_embeds": given["context"], "output_type": "latent"}
    batch, channels, rows, columns = given["latent"].shape
    patches = given["latent"].view(batch, channels, rows // 2, 2, columns // 2, 2).permute(0, 2, 4, 1, 3, 5)
    made["latents"] = patches.reshape(batch, rows * columns // 4, 4 * channels)
    return made | {"pooled_prompt_embeds": given["pooled"], "max_sequence_length": given["context"].shape[1]}


class Clock:
    """Times the loop alone: a pipeline opens its progress bar just before the first step and closes it behind the last."""

    def __init__(self, made: Any):
        self.seconds = self.cpu_seconds = 0.0
        shipped = made.module.progress_bar

        @contextlib.contextmanager
        def progress_bar(*given: Any, **named: Any) -> Iterator[Any]:
            dist.barrier()
            started, cpu = time.perf_counter(), time.process_time()
            with shipped(*given, **named) as bar:
                yield bar
            self.seconds, self.cpu_seconds = time.perf_counter() - started, time.process_time() - cpu

        made.module.progress_bar = progress_bar


def serve(settings: Settings, answers: Any) -> None:
    """{"steps": n} in; {"seconds", "cpu_seconds", "peak_bytes", "weight_bytes"} out, until the input ends."""
    torch.set_num_threads(settings.threads)
    package = load_xfuser()
    from xfuser.core.distributed import init_distributed_environment

    if settings.links:
        slow_down(Path(settings.links), settings.world)
    store = dist.FileStore(settings.store, settings.world)
    dist.init_process_group(
        "gloo", store=store, rank=settings.rank, world_size=settings.world, timeout=timedelta(minutes=30)
    )
    init_distributed_environment(settings.world, settings.rank, "", settings.rank, "gloo")
    made = pipeline(settings, package)
    clock, given = Clock(made), arguments(settings)
    weights = sum(parameter.nbytes for parameter in made.module.transformer.parameters())
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        steps = json.loads(line)["steps"]
        output = made(num_inference_steps=steps, **given)
        if output is not None:
            save_file({"sample": output.images.contiguous()}, settings.sample)
        answer = {
            "seconds": clock.seconds,
            "cpu_seconds": clock.cpu_seconds,
            "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            "weight_bytes": weights,
        }
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    serve(Settings(**json.loads(sys.argv[1])), answers)
    os._exit(0)  # their groups have threads that outlive them


if __name__ == "__main__":
    main()
