"""Common parts of the nodes' inputs and outputs: widgets, checks, devices, progress and text."""
