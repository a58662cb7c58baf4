"""Tiny models, quantised files, devices and ranks that are not there: what tests and benchmarks share."""
