"""Parallel Self-Test's node on a tiny model: ComfyUI's own of the same file, one rank and two. Run by serve.py."""

import json
from unittest.mock import patch

import torch
from boot import BASE, Results, ksampler, node, nodes, outputs_of, parallel

FILE = "tiny.safetensors"
CHECKS = ("system", "model file")


def main(results: Results) -> None:
    from parallel_backend.acceptance import checks
    from parallel_backend.client.registry import registry

    kind = nodes.NODE_CLASS_MAPPINGS["ParallelSelfTest"]

    def look(model) -> dict:
        pool = registry().pool_for(("cpu", "cpu"), lambda: None)
        with patch.object(checks, "CHECKS", {check: checks.CHECKS[check] for check in CHECKS}):
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

    def own_class() -> dict:
        """Before its first call, and after it."""
        model = parallel(FILE, 1, devices="cpu")
        try:
            look(model)
        except ValueError as refusal:
            said = str(refusal)
        g = torch.Generator().manual_seed(0)
        shape = model.model.diffusion_model.checkpoint.shape
        text, pooled = (shape(layer)[1] for layer in ("txt_in.weight", "vector_in.in_layer.weight"))
        prompt = [[torch.randn(1, 9, text, generator=g), {"pooled_output": torch.randn(1, pooled, generator=g)}]]
        ksampler(model, (prompt, prompt), torch.zeros(1, 16, 16, 16), cfg=1.0, steps=1)
        trace = outputs_of("ParallelTrace", "of_a_class")["result"][0]
        return look(model) | {"refusal": said, "trace": trace}

    results.case("own class", own_class)
