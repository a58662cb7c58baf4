"""How many bytes values take that travel in a few bits each: for the ranks that send them, and for the memory model."""

GROUP = 32
"""Values with a common scale, at most: so many that their scale adds a sixteenth to the bytes of values in one byte each."""
SCALE_BYTES = 2

CHANGE_BITS = 4
"""Of what changed since the last call (transfer_dtype residual). With these, patches that see each other a step late are
about as far from one rank as with full transfers; with 2 they are further (docs/fidelity.md)."""


def group_size(size: int) -> int:
    """Values with a common scale, in heads of `size`."""
    return next(count for count in range(GROUP, 0, -1) if size % count == 0)


def change_bits(transfer_dtype: str) -> int:
    """Bits of a value where only changes are sent; 0 for all but 'residual'."""
    return CHANGE_BITS if transfer_dtype == "residual" else 0


def ulysses_bytes(transfer_dtype: str, size: int, itemsize: int) -> float:
    """Bytes of a value of heads of `size` that Ulysses sends; `itemsize`: as they are. In one byte but for 'full'."""
    return itemsize if transfer_dtype == "full" else 1 + SCALE_BYTES / group_size(size)


def change_bytes(values: int, size: int, bits: int) -> int:
    """Of the changes of so many values of heads of `size`, with the steps of their groups."""
    return values // group_size(size) * SCALE_BYTES + -(-values * bits // 8)
