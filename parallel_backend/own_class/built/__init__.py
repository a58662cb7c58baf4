"""A class, built without values of weights: its parameters, sizes and counts."""
