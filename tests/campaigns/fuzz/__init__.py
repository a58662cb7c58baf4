"""Random and damaged input for what comes over a connection: messages, streams, and bytes from a rank.

    python -m tests.campaigns.fuzz --count 10000

A case is made from a number and nothing else, so that one that fails can be made again.
"""
