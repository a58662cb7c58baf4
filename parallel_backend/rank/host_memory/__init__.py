"""Host memory for weights that are not on the rank's device: one copy for all ranks of a machine that hold the same ones."""
