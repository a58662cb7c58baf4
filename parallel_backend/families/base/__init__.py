"""What a family is to the backend: data, and a few functions of a line or two."""
