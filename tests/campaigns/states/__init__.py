"""Models, runs, LoRA, giving way, Cancel, kills and unloading in random order, on ranks in threads: a state machine.

    python -m tests.campaigns.states --examples 2000

After every rule each output equals that of a model alone, bit for bit, client and ranks count the same bytes, and nothing
is left of what has ended.
"""
