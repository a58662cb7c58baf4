"""Fixtures that several files of this folder have."""

import pytest

from parallel_backend.processes import local as launch
from parallel_backend.processes.pool import Pool
from tests.support import tracing_rank


@pytest.fixture(scope="module")
def tracing_pools():
    """`tracing_pools(n)`: ranks that trace."""
    made: dict[int, Pool] = {}

    def get(world: int) -> Pool:
        if world not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(launch, "rank_entry", lambda: tracing_rank.tracing)
                made[world] = Pool(("cpu",) * world)
        return made[world]

    yield get
    for ranks in made.values():
        ranks.close()
