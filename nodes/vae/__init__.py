"""Runs ComfyUI's VAEs on the ranks: decides which of them can be cut, and has the nodes for it."""
