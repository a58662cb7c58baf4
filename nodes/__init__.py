"""The nodes that ComfyUI sees; only modules in here import ComfyUI."""

from parallel_backend.client.registry import registry

from .doctor import ParallelDoctor
from .loader import ParallelCheckpointLoader, ParallelDiTLoader
from .move_in import move_in
from .parallel_config import UlyssesConfig
from .parallelize import ParallelizeModel
from .pipefusion import ApplyPipeFusion, PipeFusionSampler
from .quickstart import QuickstartDecode, QuickstartPrompt
from .run_on_several_gpus import plans_of
from .self_test import ParallelSelfTest
from .step_cache import ParallelStepCache
from .trace import ParallelTrace
from .ui.host import folder
from .ui.routes import add_route
from .unload import UnloadParallelDiT
from .vae.nodes import ParallelVAEDecode, ParallelVAEEncode

NODE_CLASS_MAPPINGS = {
    "ParallelDiTLoader": ParallelDiTLoader,
    "ParallelCheckpointLoader": ParallelCheckpointLoader,
    "UlyssesConfig": UlyssesConfig,
    "PipeFusionSampler": PipeFusionSampler,
    "ApplyPipeFusion": ApplyPipeFusion,
    "QuickstartPrompt": QuickstartPrompt,
    "QuickstartDecode": QuickstartDecode,
    "UnloadParallelDiT": UnloadParallelDiT,
    "ParallelVAEDecode": ParallelVAEDecode,
    "ParallelVAEEncode": ParallelVAEEncode,
    "ParallelTrace": ParallelTrace,
    "ParallelDoctor": ParallelDoctor,
    "ParallelStepCache": ParallelStepCache,
    "ParallelSelfTest": ParallelSelfTest,
    "ParallelizeModel": ParallelizeModel,
}
registry().folder = folder
add_route("GET", "/parallel_dit/ranks", lambda _body: {"pools": registry().overview()})
add_route("POST", "/parallel_dit/plan", plans_of)
add_route("POST", "/parallel_dit/move_in", move_in)
NODE_DISPLAY_NAME_MAPPINGS = {
    "ParallelDiTLoader": "Parallel DiT Loader",
    "ParallelCheckpointLoader": "Parallel Checkpoint Loader",
    "UlyssesConfig": "Ulysses Config",
    "PipeFusionSampler": "PipeFusion Sampler",
    "ApplyPipeFusion": "Apply PipeFusion",
    "QuickstartPrompt": "Quickstart Prompt",
    "QuickstartDecode": "Quickstart Decode",
    "UnloadParallelDiT": "Unload Parallel DiT",
    "ParallelVAEDecode": "Parallel VAE Decode",
    "ParallelVAEEncode": "Parallel VAE Encode",
    "ParallelTrace": "Parallel Trace",
    "ParallelDoctor": "Parallel Doctor",
    "ParallelStepCache": "Parallel Step Cache",
    "ParallelSelfTest": "Parallel Self-Test",
    "ParallelizeModel": "Parallelize Model",
}
