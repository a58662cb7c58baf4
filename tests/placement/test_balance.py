"""Stages, bands and the patch count from measured block costs, or as the user says."""

import pytest
import torch

from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import Prompt, euler, linear_sigmas, sample_in_bands
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.spans import Span
from parallel_backend.placement.balance import ALIKE, check_stage_split, divide
from parallel_backend.placement.expected_request import expected_request
from parallel_backend.placement.memory_model import KV_COPIES, USABLE_MEMORY, bytes_by_block, bytes_outside_blocks, memory_of
from parallel_backend.placement.model_sizes import block_lists, model_sizes
from parallel_backend.processes.pool import Pool
from parallel_backend.wire.diagnosis import Probed
from testing import mini
from testing.models import on_ranks
from testing.slow_rank import start_with

LISTS = ["double"] * 4 + ["single"] * 8
SIZES = [2] * 4 + [1] * 8


def probed(rank: int, seconds: float, single: float = 0.5, ends: float = 0.0, free: int | None = None) -> Probed:
    """A device that takes `seconds` for a double block, and `single` of that for a single one."""
    blocks = {"double": (seconds, 0.3 * seconds), "single": (single * seconds, 0.3 * single * seconds)}
    return Probed(rank, blocks, (ends, ends), free)


def counts(spans: tuple[Span, ...]) -> list[int]:
    return [len(span) for span in spans]


def test_blocks_are_cut_by_cost_not_by_count():
    """4 double blocks at 1 and 8 single ones at 0.5: half the time is the double blocks."""
    found = divide(Degrees(pipe=2), LISTS, SIZES, [probed(0, 1.0), probed(1, 1.0)])
    assert counts(found.stage_blocks) == [4, 8]
    assert [cost.seconds(1.0) for cost in found.stage_costs] == pytest.approx([4.0, 4.0])
    assert [cost.seconds(0.25) for cost in found.stage_costs] == pytest.approx([1.2, 1.2])


def test_a_slow_device_gets_fewer_blocks_whichever_stage_it_is():
    for slow in range(2):
        probes = [probed(rank, 2.0 if rank == slow else 1.0, single=1.0) for rank in range(2)]
        expected = [8, 8]
        expected[slow] = 4
        assert counts(divide(Degrees(pipe=2), LISTS, SIZES, probes).stage_blocks) == expected


def test_a_stage_is_as_slow_as_its_slowest_rank():
    """Ulysses ranks of one stage work in step, and replicas have the same stages."""
    probes = [probed(rank, 2.0 if rank == 3 else 1.0, single=1.0) for rank in range(4)]
    assert counts(divide(Degrees(pipe=2, ulysses=2), LISTS, SIZES, probes).stage_blocks) == [8, 4]
    assert counts(divide(Degrees(batch=2, pipe=2), LISTS, SIZES, probes).stage_blocks) == [8, 4]


def test_noise_does_not_unbalance_equal_devices():
    probes = [probed(0, 1.0, single=1.0), probed(1, 0.99 * ALIKE, single=1.0)]
    assert counts(divide(Degrees(pipe=2), LISTS, SIZES, probes).stage_blocks) == [6, 6]
    patches = Degrees(patch=2, patch_mode="displaced")
    assert divide(patches, LISTS, SIZES, probes).patch_shares == (0.5, 0.5)


def test_memory_limits_what_a_fast_device_gets():
    """The fast device would take 8 of 12 blocks, and has room for 5 of size 2 (85 % of 12, rounded down to 10)."""
    sizes = [2] * 12
    for free, expected in ((None, [8, 4]), (12, [5, 7])):
        probes = [probed(0, 1.0, single=1.0, free=free), probed(1, 2.0, single=1.0, free=free and 100)]
        assert counts(divide(Degrees(pipe=2), LISTS, sizes, probes).stage_blocks) == expected


def test_what_fits_nowhere_is_cut_by_memory(caplog):
    """16 bytes where there are 2 and 5: the cards are filled twice and 2.4 times; by any other cut one is fuller."""
    probes = [probed(rank, 1.0, single=1.0, free=free) for rank, free in enumerate((3, 6))]
    assert counts(divide(Degrees(pipe=2), LISTS, SIZES, probes).stage_blocks) == [2, 10]
    assert "barely fits" in caplog.text


def test_patch_shares_follow_speed():
    found = divide(
        Degrees(patch=3, patch_mode="displaced"), LISTS, SIZES, [probed(r, s) for r, s in enumerate((1.0, 2.0, 4.0))]
    )
    assert found.patch_shares == pytest.approx((4 / 7, 2 / 7, 1 / 7))


def test_a_stage_leaves_room_for_what_the_run_keeps(tmp_path):
    """Flux on cards of 24 and 16 GB, equally fast: by weights alone the second one could have half of the blocks."""
    flux = mini.opened(mini.save_header(tmp_path / "flux1-dev.safetensors"), height=128, width=128, text=512)
    degrees, sizes = Degrees(pipe=2), model_sizes(flux, "bf16", "cuda:0")
    expected = expected_request(flux, (1, 16, 128, 128), 1, 512, KV_COPIES, 4)
    blocks = {"double_blocks": (2.0, 0.6), "single_blocks": (1.0, 0.3)}
    probes = [Probed(rank, blocks, (0.1, 0.1), free) for rank, free in enumerate((23 * 10**9, 15 * 10**9))]
    kept, around = bytes_by_block(sizes, degrees, (expected,)), bytes_outside_blocks(sizes, degrees, expected)

    def needs(of_blocks: list[int], other_bytes: int | None = None) -> int:
        found = divide(degrees, block_lists(flux), of_blocks, probes, other_bytes=other_bytes)
        return memory_of(sizes, degrees, found.stage_blocks, 1, (expected,)).total

    assert needs(kept, around) <= USABLE_MEMORY * 15 * 10**9 < needs(list(sizes.block_bytes))


@pytest.mark.parametrize("text", ["auto", "even", " Auto "])
def test_words_leave_the_split_to_us(text):
    assert check_stage_split(text, 2, 8) is None


def test_a_split_by_hand():
    assert check_stage_split("5, 3", 2, 8) == (Span(0, 5), Span(5, 8))


@pytest.mark.parametrize("text", ["", "a,b", "8", "4,5", "0,8", "-1,9", "3,3,2", "4;4"])
def test_a_split_that_makes_no_sense_names_the_widget(text):
    with pytest.raises(ValueError, match=r"stage_split is .*2 numbers of blocks.*8 blocks"):
        check_stage_split(text, 2, 8)


@pytest.fixture(scope="module")
def uneven_pool():
    """Two ranks of which the second takes ten times as long: more than any noise of a busy machine."""
    pool = Pool(("cpu", "cpu"), threads=1, start=start_with((1.0, 10.0)))
    pool.ready.result(timeout=300)
    yield pool
    pool.close()


def sample(model: RemoteTransformer, warm_up: int) -> torch.Tensor:
    x, _, tensors = mini.inputs(height=15, width=12)
    bands = 1 if model.degrees.displaced else 3
    return sample_in_bands(model, x, linear_sigmas(3), Prompt(tensors, {}, 1.0), bands, warm_up)[0]


@pytest.fixture(scope="module")
def exact(mini_model):
    x, _, tensors = mini.inputs(height=15, width=12)
    with torch.inference_mode():
        return euler(lambda *given: mini.reference(mini_model, *given), x, linear_sigmas(3), Prompt(tensors, {}, 1.0))


@pytest.mark.processes
@pytest.mark.parametrize("degrees", [Degrees(pipe=2), Degrees(patch=2, patch_mode="displaced")], ids=str)
def test_measured_on_unequal_ranks_it_is_uneven_and_exact(uneven_pool, mini_file, exact, degrees):
    model = on_ranks(uneven_pool, mini.opened(mini_file), degrees, "fp32", "sdpa", lambda: None, "auto")
    if degrees.pipe > 1:
        assert len(model.balance.stage_blocks[0]) > len(model.balance.stage_blocks[1])
    else:
        assert model.balance.patch_shares[0] > 0.55
    assert mini.relative(sample(model, 3), exact) <= 1e-5
    assert 1e-4 < mini.relative(sample(model, 1), exact) < 0.1
