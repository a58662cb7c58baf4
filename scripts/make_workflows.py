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
GRAPHS: dict[str, Callable[[], Graph]] = {
    graph.__name__: graph
    for graph in (
        bundled.quickstart,
        bundled.native_ksampler,
        flux.parallelize_model,
        flux.flux_schnell_pipefusion,
        images.sd3_split_batch,
        flux.flux_dev_ulysses_pipefusion,
        images.z_image_turbo_ring,
        flux.flux_2_dev_tensor,
        flux.flux_dev_displaced,
        images.pixart_2048,
        images.krea_2,
        images.qwen_edit_2511,
        images.qwen_image_2_1,
        images.qwen_image_2_1_edit,
        videos.wan_2_2,
        videos.ltx_2_3,
        videos.minimax_h3,
        videos.fasth3,
    )
}


def files() -> dict[str, str]:
    """Path below workflows/ -> content."""
    out = {}
    for name, make in GRAPHS.items():
        graph = make()
        for path, form in ((f"{name}.json", ui_form(name, graph)), (f"api/{name}.json", api_form(graph))):
            out[path] = json.dumps(form, indent=2, ensure_ascii=False) + "\n"
    return out


if __name__ == "__main__":
    for path, content in files().items():
        (WORKFLOWS / path).parent.mkdir(parents=True, exist_ok=True)
        (WORKFLOWS / path).write_text(content, encoding="utf-8")
