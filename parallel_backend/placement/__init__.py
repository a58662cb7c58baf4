"""Which rank gets which blocks, and whether that fits its memory."""
