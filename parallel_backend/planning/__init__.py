"""Predicts seconds, traffic and memory of every mode (degrees and patches), and ranks the modes.

Costs come from rehearsals of the modes (Parallel Doctor), or from a calibration of a few seconds (`degrees` auto).
"""
