"""What the nodes' inputs and outputs have in common: widgets, checks, devices, progress and text."""
