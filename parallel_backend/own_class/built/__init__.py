"""A model's class, built without weight values: its parameters, sizes, and counts of tokens and operations."""
