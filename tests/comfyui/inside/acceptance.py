"""Parallel Self-Test's node on a tiny model: ComfyUI's own of the same file, one rank and two. Run by serve.py."""

import json
from unittest.mock import patch

from boot import BASE, Results, node, nodes, parallel

FILES = ("tiny.safetensors", "tiny-sd3.safetensors")
CHECKS = ("system", "model file")


def main(results: Results) -> None:
    from parallel_backend.acceptance import kit, model_file
    from parallel_backend.client.registry import registry

    kind = nodes.NODE_CLASS_MAPPINGS["ParallelSelfTest"]

    def look(name: str) -> dict:
        model = parallel(name)
        pool = registry().pool_for(("cpu", "cpu"), lambda: None)
        chosen = patch.object(kit, "CHECKS", {check: kit.CHECKS[check] for check in CHECKS})
        with chosen, patch.dict(model_file.TOKENS, {False: 64}):
            done = kind().look("cpu,cpu", model)
        text, document = done["result"]
        saved = sorted((BASE / "output").glob("parallel_dit_self_test_*.json"))
        again = node("QuickstartPrompt", "1")  # the pack goes on
        return {
            "others_ended": pool.error is not None,
            "shown": done["ui"]["text"] == [text],
            "text": text,
            "document": json.loads(document),
            "saved": json.loads(saved[-1].read_text()),
            "again": list(again[0][0].shape),
        }

    for name in FILES:
        results.case(name, lambda name=name: look(name))
