"""A stand-in for torch.distributed with NCCL's rules, for rank threads (thread_ranks.py) and tensors of the CPU.

`rules.py` has the rules as settings, `operation.py` one call, `fabric.py` when it runs and against what it is held,
`distributed.py` the calls themselves.
"""
