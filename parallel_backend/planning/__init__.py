"""Which degrees are fastest, from a few constants of a machine rather than from rehearsals.

The constants are seconds of a block, links and memory. The machine may be this one, calibrated in seconds, or one that is
not there.
"""
