"""The product on a transport with NCCL's rules (tests/support/strict), under random delays.

    python -m tests.campaigns.transport --seeds 200

Every case runs once on the mailbox of rank threads and then for every seed on the strict transport: no rule may be broken,
nothing may hang, and the result is the same bit for bit. A seed and a case's name make the same delays again.
"""
