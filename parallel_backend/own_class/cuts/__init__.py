"""How a class's blocks run on one of several ranks: its stage, tokens, bands, heads, and attention between them."""
