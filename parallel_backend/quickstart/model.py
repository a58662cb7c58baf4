"""Weights of the bundled quickstart model, a `diffusers.FluxTransformer2DModel` of 6.7 M parameters."""

from pathlib import Path

WEIGHTS = Path(__file__).with_name("quickstart-digits.safetensors")
