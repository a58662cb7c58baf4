"""Which blocks are streamed: as few as there is no room for, spread evenly, never more on the device than is allowed."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from parallel_backend.core.block_residency import SLOTS, device_bytes, least_bytes, nearest_streamed, streamed_blocks

sizes = st.lists(st.integers(1, 100), min_size=1, max_size=40)


@given(sizes, st.integers(0, 5000))
def test_what_is_on_the_device_fits_and_streamed_blocks_are_spread_evenly(blocks, room):
    found = streamed_blocks(blocks, room)
    if room >= least_bytes(blocks):
        assert device_bytes(blocks, found) <= room
    if not found:
        assert sum(blocks) <= max(room, least_bytes(blocks))
        return
    assert len(found) > SLOTS  # or slots would be in place of as many blocks
    gaps = [two - one for one, two in pairwise((*found, found[0] + len(blocks)))]
    assert max(gaps) - min(gaps) <= 1


def test_of_equal_blocks_all_stay_but_what_the_slots_cost():
    assert streamed_blocks([10] * 10, 100) == ()
    assert streamed_blocks([10] * 10, 90) == (1, 5, 8)  # seven stay, two slots
    assert len(streamed_blocks([10] * 10, 50)) == 7
    assert streamed_blocks([10] * 10, 20) == streamed_blocks([10] * 10, 0) == tuple(range(10))


@given(sizes, st.integers(0, 5000), st.sets(st.integers(0, 39)))
def test_what_is_nearest_to_what_is_streamed_now_fits_too(blocks, room, now):
    found = nearest_streamed(blocks, room, sorted(index for index in now if index < len(blocks)))
    if room >= least_bytes(blocks):
        assert device_bytes(blocks, found) <= room
