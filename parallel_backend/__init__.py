"""Runs one diffusion transformer across several processes. Imports no ComfyUI: the nodes call it, a rank is nothing else.

Read `remote_transformer.py` for the calls that the nodes make, `worker.py` and `engine.py` for what a rank does with them.
"""
