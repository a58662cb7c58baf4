"""Reads model files: their headers, tensor formats and slices of their tensors. Checks files that may be damaged."""
