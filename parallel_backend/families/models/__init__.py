"""Arithmetic of blocks: fused operations, and normalized guidance."""
