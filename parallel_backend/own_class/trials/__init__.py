"""Trials: runs of a small copy of a class that show, and prove, how ranks can share it out."""
