"""What ComfyUI takes Sana for, and what our loader says. Run by ComfyUI's Python, see boot.py."""

from boot import BASE, Results, comfy, load_pack, parallel
from safetensors.torch import load_file

FILE = "sana.safetensors"


def main() -> None:
    load_pack()
    results = Results()
    state = load_file(BASE / "models" / "diffusion_models" / FILE)
    results.case("detected", lambda: comfy.model_detection.detect_unet_config(state, "")["image_model"])
    results.case("loader", lambda: str(parallel(FILE, pipe=1, devices="cpu")))
    results.write()


if __name__ == "__main__":
    main()
