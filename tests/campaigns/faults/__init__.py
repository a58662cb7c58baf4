"""Faults injected into ranks on purpose, and what must come of each: `python -m tests.campaigns.faults`.

table.py says which faults there are, rank.py is the entry of ranks that break on command, session.py has what a prompt does
in each phase, trial.py runs one fault and judges it.
"""
