"""Bytes of transferred values that are packed in a few bits each, for the ranks and for the memory model."""

GROUP = 32
"""Maximum number of values with a common scale. The scale adds a sixteenth to the bytes of one-byte values."""
SCALE_BYTES = 2

CHANGE_BITS = 4
"""Bits of a changed value (transfer_dtype residual). With 4 bits displaced patches are as close to one rank as with full
transfers: 63.6 dB after 20 steps. 2 bits lose 5.5 dB."""


def group_size(size: int) -> int:
    """Return the number of values with a common scale, in heads of `size`."""
    return next(count for count in range(GROUP, 0, -1) if size % count == 0)


def change_bits(transfer_dtype: str) -> int:
    """Return the bits of a changed value if transfer_dtype is 'residual'; 0 for others, which send whole values."""
    return CHANGE_BITS if transfer_dtype == "residual" else 0


def ulysses_bytes(transfer_dtype: str, size: int, itemsize: int) -> float:
    """Return the bytes that Ulysses sends for a value of heads of `size`: `itemsize` for 'full', otherwise a byte and a
    share of a scale."""
    return itemsize if transfer_dtype == "full" else 1 + SCALE_BYTES / group_size(size)


def change_bytes(values: int, size: int, bits: int) -> int:
    """Return the bytes of `values` packed changes, for heads of `size` channels, including the scales of their groups."""
    return values // group_size(size) * SCALE_BYTES + -(-values * bits // 8)
