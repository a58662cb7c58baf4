"""How a class's blocks run on one of several ranks: stages, tokens, bands, heads, and the attention between ranks."""
