"""Trials: runs of a small copy of a class that find out how ranks can split it, and prove that the result is the same."""
