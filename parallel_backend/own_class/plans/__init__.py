"""Proofs of trials: the record, and those of published models, which ship with the pack."""
