"""Changes that other nodes make to a MODEL's calls and blocks, as data for the ranks. Changes that cannot reach the ranks
are refused here (reach.py)."""
