"""Model files: what is in them, in which format, which bounds they must keep, and slices of their tensors."""
