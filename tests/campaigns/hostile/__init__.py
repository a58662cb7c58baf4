"""Hostile model files: made at random, opened, and what is opened put on ranks and run.

The property: a named error on the client, or a right picture. No file ends a rank.
"""
