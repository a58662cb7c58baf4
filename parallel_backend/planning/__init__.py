"""Predicts seconds, traffic and memory of every mode (degrees and patches), and ranks the modes. Costs come from a
calibration of a few seconds. Parallel Doctor also tries the best modes for a few steps."""
