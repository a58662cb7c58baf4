"""What a call changes inside the blocks: some are skipped, entries that look at each other stay together."""

import pytest

from parallel_backend.client.call import Conditioning, ModelCall, TokenLayout
from parallel_backend.client.memory_guard import request_of
from parallel_backend.core.block_changes import BlockChanges, NormalizedGuidance
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.spans import Span
from parallel_backend.core.token_order import TokenOrder
from parallel_backend.own_class.built.built_class import built_class
from testing import mini

GUIDANCE = NormalizedGuidance(5.0, 1.5, 0.5, positive=Span(1, 2), negative=Span(0, 1))
GUIDED = BlockChanges(guidance=GUIDANCE)


def test_entries_that_look_at_each_other_are_one_replicas():
    order = TokenOrder(6, 3)
    conditioning = Conditioning(1, TokenLayout((2, 3)), order, 0, 3, {}, first_replica=1, changes=GUIDED)
    assert conditioning.shares(2) == (Span(3, 3), Span(0, 3))
    degrees = Degrees(batch=2, pipe=2)
    request = request_of(conditioning, built_class(mini.proven()))
    assert [request.entries_on(degrees, degrees.coordinate(rank)) for rank in range(4)] == [0, 0, 3, 3]


@pytest.mark.parametrize("degrees", [Degrees(), Degrees(pipe=2)], ids=str)
def test_skipped_blocks_give_out_what_they_are_given(thread_pools, mini_file, degrees):
    model, given, without = thread_pools.mini(mini_file, degrees), mini.inputs(), mini.load(mini_file)
    del without.double_blocks[1], without.single_blocks[4]
    call = ModelCall(*given, changes=BlockChanges(("double_blocks.1", "single_blocks.4")))
    assert mini.relative(model.predict(call, lambda: None), mini.reference(without, *given)) <= 1e-5
