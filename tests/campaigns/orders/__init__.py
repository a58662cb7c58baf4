"""The order in which ranks post collectives, sends and receives, for all products of up to 8 ranks.

    python -m tests.campaigns.orders [--only NAME] [--renew] [--out FILE.json]

Each product runs on the strict transport (tests/support/strict), one operation at a time and many at a time under delays.
Its ranks' operations must have one common order: then they cannot wait in a circle, whatever the timing. `orders.json` has
the digest of each rank's operations on each communicator. `--renew` writes it anew.
"""
