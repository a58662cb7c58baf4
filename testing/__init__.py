"""Tiny models, quantised files, devices and ranks that are not there, a ComfyUI that runs scripts."""
