"""Small changes to the product, one at a time, that its tests must notice: `python -m tests.campaigns.mutants`."""
