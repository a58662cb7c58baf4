"""What ComfyUI chooses on graphics cards that are not here, beside what the pack chooses. Run by serve.py.

torch.cuda's answers are a stand-in's (testing/fake_cuda.py), and ComfyUI, which runs on the CPU, is told that it has a
GPU. Nothing is computed on it.
"""

import importlib.util
import json
import sys
from unittest.mock import patch

from boot import Results, comfy, node, nodes, torch

management = comfy.model_management
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8_e4m3fn"}
STORED = {name: dtype for dtype, name in NAMES.items() if name != "fp32"}
PARAMETERS = 12_000_000_000
GPU = torch.device("cuda:0")
LOADERS = (
    ("UNETLoader", {"unet_name": "tiny.safetensors", "weight_dtype": "default"}),
    ("AnyPacksLoader", {"model_name": "tiny.safetensors", "vae_name": "no-such-file.safetensors", "number": 1}),
    ("UNETLoader", {"unet_name": "vae.safetensors"}),
    ("UNETLoader", {"unet_name": "../diffusion_models/../../input/four-channels.latent"}),
    ("UNETLoader", {"unet_name": ["12", 0]}),
    ("Two", {"high": "tiny.safetensors", "low": "tiny-sd3.safetensors"}),
    ("ParallelDiTLoader", {"model_name": "tiny.safetensors"}),
)


def comfyuis_choice(supported: list[torch.dtype], stored: torch.dtype) -> str:
    """What ComfyUI's own loader computes a file in, by the functions that it asks."""
    kept = management.unet_dtype(GPU, PARAMETERS, supported, stored)
    return NAMES[management.unet_manual_cast(kept, GPU, supported) or kept]


def main(results: Results) -> None:
    from parallel_backend.core import device_choice
    from parallel_backend.core.dtypes import HALVES, compute_name, native_halves, resolve_dtype
    from testing import fake_cuda as fake

    package = nodes.NODE_CLASS_MAPPINGS["ParallelDiTLoader"].__module__.rpartition(".")[0]
    devices = sys.modules[f"{package}.ui.devices"]
    cards = {name: card for name, card in vars(fake).items() if isinstance(card, fake.Card)}
    lists = {tuple(kind.supported_inference_dtypes) for kind in comfy.supported_models.models}
    halves = {theirs: tuple(NAMES[dtype] for dtype in theirs if NAMES[dtype] in HALVES) for theirs in lists}
    kinds = {", ".join(NAMES[dtype] for dtype in theirs): (list(theirs), ours) for theirs, ours in halves.items()}

    def choices(card) -> dict[str, object]:
        found: dict[str, object] = {}
        with (
            fake.fake_cuda(card),
            patch.object(management, "cpu_state", management.CPUState.GPU),
            patch.object(management, "get_torch_device", lambda: GPU),
        ):
            found["halves"] = [list(devices.half_dtypes(("cuda:0",))), list(native_halves("cuda:0"))]
            native = devices.half_dtypes(("cuda:0",))
            for kind, (theirs, ours) in kinds.items():
                for name, stored in STORED.items():
                    chosen = compute_name(resolve_dtype("default", name, ("cuda:0",), ours, native))
                    found[f"{kind} {name}"] = [comfyuis_choice(theirs, stored), chosen, name in native and name in ours]
        return found

    for name, card in cards.items():
        results.case(name, lambda card=card: choices(card))

    def host() -> list[object]:
        found = devices.host()
        return [found.kind, found.cuda_device, list(devices.gpus())]

    results.case("host", host)

    def attentions() -> dict[str, list[str]]:
        """By ComfyUI's name of a kernel that it was started with: what ranks take for `auto`, and what the log says."""
        ours = sys.modules[f"{package}.ui.attention"]
        native, said = ours.native, []

        def chosen(name: str, function) -> list[str]:
            flags = {flag: name == kind for flag, kind in ours.FLAGS.items() if name != "as started"}
            registered = {} if name == "as started" else {name: function}
            with (
                patch.object(native, "optimized_attention", function),
                patch.dict(native.REGISTERED_ATTENTION_FUNCTIONS, registered),
                patch.dict(vars(ours.args), flags),
            ):
                found = [ours.attention_for("auto", ("cuda:0",), "bf16"), *said]
            said.clear()
            return found

        with (
            fake.fake_cuda(fake.AMPERE),
            patch.object(importlib.util, "find_spec", lambda name: name if name != "sageattention" else None),
            patch.object(ours.log, "warning", lambda text, *words: said.append(text % words)),
        ):
            made = {name: chosen(name, lambda: None) for name in (*ours.OURS, "new")}
            own = {name: chosen(name, native.REGISTERED_ATTENTION_FUNCTIONS[name]) for name in ours.FLAGS.values()}
            return {"as started": chosen("as started", native.optimized_attention), **made, **own}

    results.case("attention", attentions)

    def loaded(kind: str) -> str:
        with patch.object(management, "get_torch_device", lambda: torch.device(kind)):
            node("ParallelDiTLoader", "quickstart-digits (bundled)", "default", 2, 1, 1, "auto")
        return "loaded"

    for kind in ("mps", "xpu", "cuda"):
        results.case(f"loader on {kind}", lambda kind=kind: loaded(kind))

    def hidden() -> str:
        with (
            fake.fake_cuda(fake.AMPERE),
            patch.object(management, "get_torch_device", lambda: GPU),
            patch.object(comfy.cli_args.args, "cuda_device", "0"),
        ):
            return device_choice.why_hidden(devices.host(), {"CUDA_VISIBLE_DEVICES": "0"})

    results.case("hidden", hidden)

    def menu(*cards, peers: bool = True) -> list[object]:
        """What *Run on several GPUs* is told of loaders."""
        menu = sys.modules[f"{package}.run_on_several_gpus"]
        with (
            fake.fake_cuda(*cards),
            patch.object(management, "cpu_state", management.CPUState.GPU),
            patch.object(management, "get_torch_device", lambda: GPU),
            patch.object(torch.cuda, "can_device_access_peer", lambda _one, _two: peers),
        ):
            menu.file_plan.cache_clear()  # of other cards
            answer = menu.answer([{"class_type": kind, "inputs": inputs} for kind, inputs in LOADERS])
        return [answer["devices"], answer["why"], *({k: v for k, v in plan.items() if v} for plan in answer["loaders"])]

    tiny = fake.Card("too small", (8, 6), 1000)
    results.case("menu", lambda: menu(fake.AMPERE, fake.AMPERE))
    results.case("menu, small cards", lambda: menu(fake.AMPERE, tiny))
    results.case("menu, no P2P", lambda: menu(fake.AMPERE, fake.AMPERE, peers=False))
    results.case("menu, one card", lambda: menu(fake.AMPERE))

    def answered(text: bytes) -> str:
        menu = sys.modules[f"{package}.run_on_several_gpus"]
        try:
            menu.asked(text)
        except ValueError as error:
            return str(error)
        return "taken"

    unread = (b"", b"{", b"[" * 100_000, b"\xff", b" " * (1 << 23))
    loader = {"class_type": "A", "inputs": {}}
    loaders = ({}, [1], [{}] * 1001, [{"class_type": 1}], [{"class_type": "A"}], [loader])
    bodies = (None, [], {}, *({"loaders": each} for each in loaders))
    texts = (*unread, *(json.dumps(body).encode() for body in bodies))
    results.case("menu's requests", lambda: [answered(text) for text in texts])
