"""State that lasts as long as a sampling run: its shapes, bands, step cache, progress and memory. The speed-up by several
GPUs is computed here too."""
