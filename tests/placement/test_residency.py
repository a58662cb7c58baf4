"""How much of the weights stays on devices that do not hold them all, and what a micro-step then takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_backend.core.degrees import Degrees
from parallel_backend.core.setup import ALLOWED, Offload
from parallel_backend.placement.balance import cut_blocks
from parallel_backend.placement.model_sizes import RankWeights
from parallel_backend.placement.residency import offload_of, share_out, shared_bytes

SMALL, LARGE = RankWeights(10, (5,) * 10), RankWeights(10, (10,) * 20)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("auto", ALLOWED),
        (" None ", Offload(streams=False)),
        ("4", Offload(leave_free=4 * 10**9)),
        ("1.5 GB", Offload(leave_free=1_500_000_000)),
        ("0", ALLOWED),
    ],
)
def test_the_widgets_words(text, found):
    assert offload_of(text) == found


@pytest.mark.parametrize("text", ["", "some", "-1", "nan", "inf", "1e999", "4,5"])
def test_other_words_name_the_widget(text):
    with pytest.raises(ValueError, match=r"^offload is "):
        offload_of(text)


@given(st.integers(-100, 400))
def test_ranks_share_a_device_in_proportion_and_never_have_less_than_they_need(budget):
    small, large = share_out([SMALL, LARGE], budget)
    assert SMALL.least <= small <= SMALL.total and LARGE.least <= large <= LARGE.total
    assert small + large <= max(budget, SMALL.least + LARGE.least)
    assert (small + large == SMALL.total + LARGE.total) == (budget >= SMALL.total + LARGE.total)


def test_replicas_on_one_machine_have_one_copy():
    sizes = dict.fromkeys(range(4), 100)
    assert shared_bytes(Degrees(ulysses=2, batch=2), sizes) == 100
    assert shared_bytes(Degrees(pipe=2, ulysses=2), sizes) == 200
    assert shared_bytes(Degrees(tensor=4), sizes) == 400


# Seconds.


def test_stages_are_cut_with_their_copies_in_view():
    """Blocks of one speed, of which the first ones are larger. Two alike devices hold half of them."""
    sizes, costs = [30] * 4 + [10] * 8, [1.0] * 12
    capacities = [70, 70]
    assert cut_blocks([costs] * 2, sizes, capacities) is None  # 200 bytes in 140
    fast, slow = ([len(span) for span in cut_blocks([costs] * 2, sizes, capacities, [rate] * 2)] for rate in (0.001, 1.0))
    assert fast == [6, 6]  # copies cost nothing: by speed
    assert slow == [3, 9]  # 20 and 40 bytes are left over: no other cut copies less on the stage that copies most
    assert [len(span) for span in cut_blocks([costs] * 2, sizes, [200, 200], [1.0] * 2)] == [6, 6]  # all fits
