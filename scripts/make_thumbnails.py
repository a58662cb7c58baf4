"""Writes workflows/*.jpg, which ComfyUI's template browser shows.

    python scripts/make_thumbnails.py ~/ComfyUI [workflow ...]

quickstart shows what a real ComfyUI makes with it here, on the CPU. The others name the model and what it does, and show the
GPUs that they use: a column for each pipeline stage, a row for each other rank.
"""

import argparse
import io
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.comfyui_server import ComfyUIServer  # noqa: E402
from scripts.make_workflows import FILES  # noqa: E402

Graph = dict[str, dict[str, Any]]
WORKFLOWS = ROOT / "workflows"
SIDE, STRIP, QUALITY = 512, 84, 85
BADGE = 60
"""Height at the top that the template browser covers with a label of its own."""
INK, PAPER, GREY = (255, 255, 255), (24, 28, 32), (150, 170, 180)
QUICKSTART, ANYWHERE = "quickstart", "runs anywhere, no files needed"
PICTURE, EDIT, VIDEO = (38, 84, 124), (36, 110, 84), (104, 62, 128)
"""Colours of what a workflow makes."""
DRAWN = {
    "native_ksampler": ("Apply\nPipeFusion", ANYWHERE, PICTURE),
    "parallelize_model": ("FLUX.1 dev\n+ LoRA", "ComfyUI's own loader", PICTURE),
    "flux_schnell_pipefusion": ("FLUX.1\nschnell", "text to image", PICTURE),
    "flux_dev_ulysses_pipefusion": ("FLUX.1\ndev", "text to image", PICTURE),
    "sd3_split_batch": ("SD 3.5", "text to image", PICTURE),
    "z_image_turbo_ring": ("Z-Image\nturbo", "text to image", PICTURE),
    "flux_2_dev_tensor": ("FLUX.2\ndev", "text to image", PICTURE),
    "flux_dev_displaced": ("FLUX.1\ndev", "text to image", PICTURE),
    "pixart_2048": ("PixArt\nSigma 2K", "text to image", PICTURE),
    "krea_2": ("Krea 2\nturbo", "text to image", PICTURE),
    "qwen_image_2_1": ("Qwen-Image\n2.1", "text to image, ComfyUI 0.37", PICTURE),
    "qwen_image_2_1_edit": ("Qwen-Image\n2.1 edit", "image to image, ComfyUI 0.37", EDIT),
    "qwen_edit_2511": ("Qwen-Image\nEdit 2511", "image to image", EDIT),
    "wan_2_2": ("Wan 2.2", "text to video", VIDEO),
    "ltx_2_3": ("LTX-2.3", "text to video, with audio", VIDEO),
    "minimax_h3": ("MiniMax\nH3", "image to video, with audio", VIDEO),
    "fasth3": ("FastH3", "video with audio, ComfyUI 0.38", VIDEO),
    "wan_animate_2": ("Wan\nAnimate 2", "image and video to video", VIDEO),
}
"""Model, what the workflow makes and which ComfyUI it needs, and its colour."""
MODES = {
    "pipefusion_degree": "PipeFusion",
    "ulysses_degree": "Ulysses",
    "ring_degree": "Ring",
    "tensor_parallel_degree": "Tensor",
    "patch_degree": "Displaced patches",
    "split_batch_degree": "Split batch",
}


def read(name: str) -> Graph:
    return json.loads((WORKFLOWS / "api" / f"{name}.json").read_text())


def degrees(graph: Graph) -> dict[str, int]:
    """Above 1, by widget. Those of Parallelize Model's `gpus` are pipeline stages."""
    inputs = [item for node in graph.values() for item in node["inputs"].items()]
    named = [("pipefusion_degree" if name == "gpus" else name, value) for name, value in inputs]
    return {name: value for name, value in named if name in MODES and value > 1}


def picture(server: ComfyUIServer, graph: Graph) -> Image.Image:
    outcome = server.run(graph)
    if outcome.status != "success":
        raise RuntimeError(outcome.error)
    return Image.open(io.BytesIO(outcome.images[0])).convert("RGB")


def drawing(model: str, colour: tuple[int, int, int], graph: Graph) -> Image.Image:
    """The model's name above the GPUs of the workflow, in the size of a picture."""
    side = SIDE - BADGE - STRIP
    out = Image.new("RGB", (SIDE, side), colour)
    draw = ImageDraw.Draw(out)
    draw.text((SIDE // 2, 118), model, INK, ImageFont.load_default(76), anchor="mm", align="center", spacing=14)
    found = degrees(graph)
    ranks, columns = math.prod(found.values()), found.get("pipefusion_degree", 1)
    rows = ranks // columns
    height, gap = (100 - 12 * (rows - 1)) // rows, 24
    width = min(116, (SIDE - 2 * gap) // columns - gap)
    left = (SIDE - columns * width - (columns - 1) * gap) // 2
    for rank in range(ranks):
        row, column = rank // columns, rank % columns
        x, y = left + column * (width + gap), side - 124 + row * (height + 12)
        draw.rounded_rectangle((x, y, x + width, y + height), 10, PAPER, INK, 2)
        draw.text((x + width // 2, y + height // 2), f"GPU {rank}", INK, ImageFont.load_default(24), anchor="mm")
        if column:
            draw.line((x - gap, y + height // 2, x, y + height // 2), INK, 3)
    return out


def thumbnail(shown: Image.Image, title: str, line: str) -> Image.Image:
    """The picture above two lines of text."""
    out = Image.new("RGB", (SIDE, SIDE), PAPER)
    out.paste(shown, ((SIDE - shown.width) // 2, BADGE))
    draw = ImageDraw.Draw(out)
    middle = SIDE - STRIP
    draw.text((SIDE // 2, middle + 26), title, INK, ImageFont.load_default(32), anchor="mm")
    draw.text((SIDE // 2, middle + 60), line, GREY, ImageFont.load_default(24), anchor="mm")
    return out


def make(name: str, checkout: Path) -> Image.Image:
    graph = read(name)
    if name in DRAWN:
        model, line, colour = DRAWN[name]
        title = " x ".join(f"{MODES[widget]} {degree}" for widget, degree in degrees(graph).items())
        return thumbnail(drawing(model, colour, graph), title, line)
    with (
        tempfile.TemporaryDirectory(prefix="parallel-dit-thumbnails-") as base,
        ComfyUIServer(checkout, Path(base)) as server,
    ):
        side = SIDE - BADGE - STRIP
        shown = picture(server, graph).resize((side, side), Image.Resampling.LANCZOS)
    return thumbnail(shown, "Bundled model · PipeFusion 2", ANYWHERE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder with ComfyUI's main.py")
    parser.add_argument("workflow", nargs="*", default=[QUICKSTART, *DRAWN], help="all if none is named")
    options = parser.parse_args()
    for name in options.workflow:
        make(name, options.checkout.expanduser().resolve()).save(
            WORKFLOWS / f"{FILES[name]}.jpg", quality=QUALITY, optimize=True
        )
        print(f"wrote {name}.jpg", flush=True)


if __name__ == "__main__":
    main()
