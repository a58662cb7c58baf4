"""Decides which rank gets which blocks, and whether they fit its memory."""
