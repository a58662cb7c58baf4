"""State that lasts as long as a sampling run: its shapes, bands, step cache, progress and memory.

What several GPUs gained in it is reckoned here too.
"""
