"""Random and damaged input: messages, streams, bytes from a rank, and model files.

    python -m tests.campaigns.fuzz --count 10000

A case is made from a number and nothing else, so that one that fails can be made again. Of a file comes a named error on the
client, or a right image; no file ends a rank.
"""
