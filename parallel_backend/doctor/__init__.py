"""Which degrees are fastest here: a few blocks are rehearsed on the ranks in every mode, whole runs are worked out from
that."""
