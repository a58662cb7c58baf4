"""LoRA files in published layouts, loaded on ComfyUI's own MODEL and on Parallel DiT Loader's. Run by serve.py."""

from boot import Results, node, parallel, torch


def patched(model, file: str) -> list:
    """Which weights, by which kinds of patches, of which sizes and parts."""
    patches = node("LoraLoaderModelOnly", model, file, 1.0).patches
    return sorted([key, [[kind(patch[1]), repr(patch[3])] for patch in each]] for key, each in patches.items())


def kind(value) -> str:
    parts = getattr(value, "weights", value)
    shapes = [list(part.shape) if isinstance(part, torch.Tensor) else repr(part) for part in parts]
    return f"{type(value).__name__} {shapes}"


def main(results: Results, files: list[str]) -> None:
    native, ours = node("UNETLoader", "tiny.safetensors", "default"), parallel("tiny.safetensors", stage_split="even")
    for file in files:
        results.case(file, lambda file=file: {"comfyui": patched(native, file), "pack": patched(ours, file)})
