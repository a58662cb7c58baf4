"""Host memory for weights that are not on the rank's device. All ranks of a machine with the same weights share one copy."""
