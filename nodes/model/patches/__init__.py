"""Changes that other nodes make to a MODEL's calls and blocks, as data for the ranks.

What cannot reach the ranks is refused here (reach.py).
"""
