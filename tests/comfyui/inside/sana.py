"""What ComfyUI takes Sana for, and what our loader says. Run by serve.py."""

from boot import BASE, Results, comfy, parallel
from safetensors.torch import load_file

FILE = "sana.safetensors"


def main(results: Results) -> None:
    state = load_file(BASE / "models" / "diffusion_models" / FILE)
    results.case("detected", lambda: comfy.model_detection.detect_unet_config(state, "")["image_model"])
    results.case("loader", lambda: str(parallel(FILE, pipe=1, devices="cpu")))
