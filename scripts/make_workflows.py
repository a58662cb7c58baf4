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

from scripts.graphs import bundled, pictures, videos  # noqa: E402
from scripts.workflow_form import Graph, api_form, ui_form  # noqa: E402

WORKFLOWS = ROOT / "workflows"
GRAPHS: dict[str, Callable[[], Graph]] = {
    graph.__name__: graph
    for graph in (
        bundled.quickstart,
        bundled.native_ksampler,
        pictures.parallelize_model,
        pictures.flux_schnell_pipefusion,
        pictures.sd3_split_batch,
        pictures.flux_dev_ulysses_pipefusion,
        pictures.pixart_2048,
        pictures.krea_2,
        pictures.qwen_edit_2511,
        pictures.qwen_image_2_1,
        pictures.qwen_image_2_1_edit,
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
