"""Which degrees are fastest, from a few constants of a machine rather than from rehearsals: seconds of a block, links, memory.

The machine may be this one, calibrated in seconds, or one that is not there.
"""
