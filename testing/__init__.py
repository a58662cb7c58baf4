"""Tiny models, quantised files, a ComfyUI that runs scripts, ranks in threads: tests, benchmarks and scripts share them."""
