"""Writes workflows/*.jpg, which ComfyUI's template browser shows, from pictures that a real ComfyUI makes here on the CPU.

    python scripts/make_thumbnails.py ~/ComfyUI [workflow ...]

The bundled model's workflows show what they make. Those for users' own files show the bundled model in their mode, with
their degrees, steps and patches, and say so.
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

Graph = dict[str, dict[str, Any]]
WORKFLOWS = ROOT / "workflows"
SIDE, STRIP, QUALITY = 512, 84, 85
BADGE = 60
"""Height at the top that the template browser covers with a label of its own."""
INK, PAPER, GREY = (255, 255, 255), (24, 28, 32), (150, 170, 180)
CAPTIONS = {
    "quickstart": ("Bundled model · PipeFusion 2", "runs anywhere, no files needed"),
    "native_ksampler": ("Apply PipeFusion · KSampler", "runs anywhere, no files needed"),
    "flux_schnell_pipefusion": ("FLUX.1 schnell · PipeFusion 2", "shown: bundled mini model"),
    "flux_dev_ulysses_pipefusion": ("FLUX.1 dev · PipeFusion 2 x Ulysses 2", "shown: bundled mini model"),
    "sd3_split_batch": ("SD 3.5 · split batch 2", "shown: bundled mini model"),
    "pixart_2048": ("PixArt-Sigma 2K · PipeFusion 4", "shown: bundled mini model"),
    "krea_2": ("Krea 2 turbo · PipeFusion 2", "shown: bundled mini model"),
    "qwen_edit_2511": ("Qwen-Image-Edit 2511 · PipeFusion 2", "shown: bundled mini model"),
    "wan_2_2": ("Wan 2.2 video · split batch 2", "shown: bundled mini model"),
    "ltx_2_3": ("LTX-2.3 video, sound · PipeFusion 2", "shown: bundled mini model"),
    "minimax_h3": ("MiniMax H3 video, sound · PipeFusion 4", "shown: bundled mini model"),
    "fasth3": ("FastH3 video, sound · Ulysses 2", "shown: bundled mini model"),
    "parallelize_model": ("Parallelize Model · FLUX.1 dev, LoRA", "shown: bundled mini model"),
    "qwen_image_2_1": ("Qwen-Image 2.1 · Ulysses 2", "shown: bundled mini model"),
    "qwen_image_2_1_edit": ("Qwen-Image 2.1 edit · Ulysses 2", "shown: bundled mini model"),
}
PROMPTS = ("3 1 4 1", "2 7 1 8", "5 9 2 6", "0 4 7 3")
SETTINGS = ("num_pipeline_patch", "warmup_steps", "overlap", "extrapolate")


def read(name: str) -> Graph:
    return json.loads((WORKFLOWS / "api" / f"{name}.json").read_text())


def widgets(graph: Graph, *names: str) -> dict[str, Any]:
    """Values of these widgets, from whichever node has them."""
    return {name: node["inputs"][name] for node in graph.values() for name in names if name in node["inputs"]}


def in_mode_of(name: str, digits: str) -> Graph:
    """quickstart's graph with the degrees, steps and patches of the workflow `name`, on CPU ranks."""
    graph, model = read("quickstart"), read(name)
    positive, loader, sampler = (graph[node]["inputs"] for node in ("2", "1", "5"))
    degrees = widgets(model, *(key for node in model.values() for key in node["inputs"] if key.endswith("_degree")))
    if gpus := widgets(model, "gpus"):
        degrees["pipefusion_degree"] = gpus["gpus"]
    loader |= {key: value for key, value in degrees.items() if key in loader}
    loader["devices"] = ",".join(["cpu"] * math.prod(degrees.values()))
    for node in (node for node in model.values() if node["class_type"] == "UlyssesConfig"):
        graph["20"], loader["parallel_config"] = node, ["20", 0]
    sampler |= widgets(model, "steps", *SETTINGS)
    if not widgets(model, "warmup_steps") and not gpus:
        sampler["warmup_steps"] = sampler["steps"]  # as KSampler: all exact
    sampler["seed"] = list(CAPTIONS).index(name)
    positive["text"] = digits
    return graph


def picture(server: ComfyUIServer, graph: Graph) -> Image.Image:
    outcome = server.run(graph)
    if outcome.status != "success":
        raise RuntimeError(outcome.error)
    return Image.open(io.BytesIO(outcome.images[0])).convert("RGB")


def thumbnail(pictures: list[Image.Image], title: str, line: str) -> Image.Image:
    """The pictures in a square, 1 or 4 of them, above two lines of text."""
    out = Image.new("RGB", (SIDE, SIDE), PAPER)
    per_row = math.isqrt(len(pictures))
    side = (SIDE - BADGE - STRIP) // per_row
    left = (SIDE - per_row * side) // 2
    for index, shown in enumerate(pictures):
        place = (left + index % per_row * side, BADGE + index // per_row * side)
        out.paste(shown.resize((side, side), Image.Resampling.LANCZOS), place)
    draw = ImageDraw.Draw(out)
    size = 32
    while draw.textlength(title, ImageFont.load_default(size)) > SIDE - 24:
        size -= 1
    middle = SIDE - STRIP
    draw.text((SIDE // 2, middle + 26), title, INK, ImageFont.load_default(size), anchor="mm")
    draw.text((SIDE // 2, middle + 60), line, GREY, ImageFont.load_default(24), anchor="mm")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder with ComfyUI's main.py")
    parser.add_argument("workflow", nargs="*", default=list(CAPTIONS), help="all where none is named")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="parallel-dit-thumbnails-") as base,
        ComfyUIServer(options.checkout.expanduser().resolve(), Path(base)) as server,
    ):
        for name in options.workflow:
            title, line = CAPTIONS[name]
            own = "(bundled)" in widgets(read(name), "model_name").get("model_name", "")
            graphs = [read(name)] if own else [in_mode_of(name, digits) for digits in PROMPTS]
            shown = thumbnail([picture(server, graph) for graph in graphs], title, line)
            shown.save(WORKFLOWS / f"{name}.jpg", quality=QUALITY, optimize=True)
            print(f"wrote {name}.jpg", flush=True)


if __name__ == "__main__":
    main()
