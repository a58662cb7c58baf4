"""What moves between ranks, counted at the collectives, equals the formulas: A = tokens x hidden x bytes per value.

Per layer a ring moves 2 A, of which each rank has its own N-th; tensor parallel adds up A twice (once in a block of one
stream), each time 2 A as the ring algorithm does it, less the own N-th.

Behind the last block every sequence rank gets all tokens, for the class's own epilogue: A, less the own N-th. In a band
without words each rank has one token in their place. Stages, Ulysses and displaced patches are held to the planner's
formulas (tests/planning/test_doctor.py), and stages to the byte too (tests/benchmarks/test_real_sizes.py).
"""

import time

import pytest
import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands
from parallel_backend.core.degrees import Degrees
from parallel_backend.rank.engine import Engine
from parallel_backend.rank.worker import Worker
from parallel_backend.wire.sampling import RunStats
from testing import mini

pytestmark = pytest.mark.threads

HIDDEN = mini.CONFIG["width"]
LAYERS = mini.CONFIG["double_blocks"] + mini.CONFIG["single_blocks"]
STEPS = 4


TEXT, IMAGE, BATCH = 8, 48, 2  # both divisible by 4 ranks and 4 bands, so that the formulas are exact
WIDTH = {"fp32": 4, "bf16": 2}


def run(model, bands: int, warm_up: int, batch: int = BATCH) -> list[RunStats]:
    model.close_run(model.open_run(), lambda: None)  # what earlier tests moved is counted until the first report
    x, _, tensors = mini.inputs(batch=batch, height=16, width=12, text=TEXT)
    return sample_in_bands(model, x, linear_sigmas(STEPS), Prompt(tensors, tensors, 1.0), bands, warm_up)[1]


def moved(stats: list[RunStats], axis: str) -> list[int]:
    return [rank.bytes_sent.get(axis, 0) for rank in stats]


@pytest.mark.parametrize(
    ("ranks", "bands", "warm_up", "dtype"), [(2, 1, STEPS, "fp32"), (4, 1, STEPS, "bf16"), (4, 4, 1, "fp32")]
)
def test_ring_moves_keys_and_values_once_around_per_layer(remote, ranks, bands, warm_up, dtype):
    """In bands as in one piece: the band's keys go around, not the buffer. Ranks have equal parts of the whole, and perhaps
    not of bands."""
    stats = run(remote(Degrees(ring=ranks), dtype=dtype), bands, warm_up)
    token = BATCH * HIDDEN * WIDTH[dtype]
    tokens = STEPS * (TEXT + IMAGE) + (STEPS - warm_up) * (bands - 1) * ranks
    assert sum(moved(stats, "ring")) == token * tokens * (2 * LAYERS + 1) * (ranks - 1)
    assert bands > 1 or len(set(moved(stats, "ring"))) == 1


@pytest.mark.parametrize(("ranks", "dtype"), [(2, "bf16"), (4, "fp32")])
@pytest.mark.slow
def test_tensor_parallel_adds_up_activations_twice_per_layer(remote, ranks, dtype):
    stats = run(remote(Degrees(tensor=ranks), dtype=dtype), 1, STEPS)
    activations = BATCH * (TEXT + IMAGE) * HIDDEN * WIDTH[dtype]
    sums = 2 * mini.CONFIG["double_blocks"] + mini.CONFIG["single_blocks"]
    vectors = 12 * mini.CONFIG["double_blocks"] + 3 * mini.CONFIG["single_blocks"]  # modulation, in units of hidden
    expected = 2 * activations * sums + BATCH * vectors * HIDDEN * WIDTH[dtype]
    assert moved(stats, "tensor") == [STEPS * expected * (ranks - 1) // ranks] * ranks


@pytest.mark.parametrize(
    "degrees", [Degrees(pipe=2), Degrees(ring=2), Degrees(patch=2, patch_mode="displaced"), Degrees(pipe=2, ring=2)], ids=str
)
def test_overlap_off_gives_the_same_sample(remote, degrees):
    """Transfers beside compute or one after the other: what is computed is the same."""
    model = remote(degrees)
    x, _, tensors = mini.inputs()
    sigmas, prompt = linear_sigmas(3), Prompt(tensors, {}, 1.0)
    bands = 1 if degrees.displaced else 3
    samples = [sample_in_bands(model, x, sigmas, prompt, bands, 1, overlap=overlap)[0] for overlap in (False, True)]
    assert torch.equal(*samples)
    whole = [model.predict(ModelCall(x, torch.full((2,), 0.7), tensors), lambda: None, overlap) for overlap in (False, True)]
    assert torch.equal(*whole)


@pytest.mark.parametrize(("degrees", "early"), [(Degrees(pipe=2), True), (Degrees(pipe=2, ulysses=2), False)], ids=str)
def test_a_stage_with_collectives_receives_for_no_micro_step_but_its_own(remote, monkeypatch, degrees, early):
    """Otherwise the ranks of a stage would use their groups in an order that depends on when messages arrive."""
    model = remote(degrees)
    posted: dict[int, int] = {}

    def compute(engine, *steps, of_product=Engine._compute):
        posted[engine.rank] = max(posted.get(engine.rank, 0), len(engine._link._posted))
        return of_product(engine, *steps)

    def upcoming(worker, of_product=Worker._upcoming):
        time.sleep(0.02)  # the next micro-step is there, if it is going to come at all
        return of_product(worker)

    monkeypatch.setattr(Engine, "_compute", compute)
    monkeypatch.setattr(Worker, "_upcoming", upcoming)
    run(model, 3, 1)
    assert [posted[rank] for rank in range(degrees.world)] == [0] * degrees.sequence + [early] * degrees.sequence
