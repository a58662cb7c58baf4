"""Writes workflows/*.json (what ComfyUI opens) and workflows/api/*.json (what its HTTP interface takes). No arguments.

Each graph is described once, in graphs/. tests/comfyui/test_workflows.py compares both forms with a running ComfyUI, and
the committed files with what this script writes.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.graphs import bundled, flux, images, videos  # noqa: E402
from scripts.workflow_form import Graph, api_form, ui_form  # noqa: E402

WORKFLOWS = ROOT / "workflows"
TITLES: dict[Callable[[], Graph], str] = {
    bundled.quickstart: "Quickstart, no GPU needed",
    bundled.native_ksampler: "Apply PipeFusion, no GPU needed",
    flux.parallelize_model: "Parallelize Model, Flux.1 dev",
    images.qwen_image_2_1: "Qwen-Image 2.1, Ulysses",
    images.qwen_image_2_1_edit: "Qwen-Image 2.1 edit, Ulysses",
    images.qwen_edit_2511: "Qwen-Image Edit, PipeFusion",
    images.z_image_turbo_ring: "Z-Image turbo, ring",
    images.krea_2: "Krea 2 turbo, PipeFusion",
    flux.flux_2_dev_tensor: "Flux.2 dev, tensor parallel",
    flux.flux_schnell_pipefusion: "Flux.1 schnell, PipeFusion",
    flux.flux_dev_ulysses_pipefusion: "Flux.1 dev, two modes, 4 GPUs",
    flux.flux_dev_displaced: "Flux.1 dev, displaced patches",
    images.sd3_split_batch: "SD 3.5 large, split batch",
    images.pixart_2048: "PixArt Sigma 2K, PipeFusion",
    videos.minimax_h3: "MiniMax H3 video, PipeFusion",
    videos.fasth3: "FastH3 video, Ulysses",
    videos.ltx_2_3: "LTX-2.3 video, PipeFusion",
    videos.wan_2_2: "Wan 2.2 video, split batch",
    videos.wan_animate_2: "Wan Animate 2 video, Ulysses",
}
"""In the order of ComfyUI's Templates dialog. It shows a file's name as the title, in one line of about 34 letters."""
GRAPHS = {graph.__name__: graph for graph in TITLES}
FILES = {graph.__name__: f"{place:02} {title}" for place, (graph, title) in enumerate(TITLES.items(), 1)}
"""Names of the files that ComfyUI opens, without suffix. web/js/templates.js puts these names in order."""


def files() -> dict[str, str]:
    """Path below workflows/ -> content."""
    out = {}
    for name, make in GRAPHS.items():
        graph = make()
        for path, form in ((f"{FILES[name]}.json", ui_form(name, graph)), (f"api/{name}.json", api_form(graph))):
            out[path] = json.dumps(form, indent=2, ensure_ascii=False) + "\n"
    return out


if __name__ == "__main__":
    for path, content in files().items():
        (WORKFLOWS / path).parent.mkdir(parents=True, exist_ok=True)
        (WORKFLOWS / path).write_text(content, encoding="utf-8")
