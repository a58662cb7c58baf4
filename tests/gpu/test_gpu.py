"""What only a CUDA device can show: its kernels and dtypes, its memory, host copies under Gloo, and NCCL.

Most of it is the self-test's, which users run too (parallel_backend/acceptance); here it runs on every pair of devices.
One device is enough for most of it, since two ranks may share one; what needs two is skipped where there is one.
"""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parallel_backend.acceptance.checks import FAILED, NOT_LOOKED_AT, run
from parallel_backend.acceptance.session import Settings
from parallel_backend.checkpoints.packed_formats import FP8_KINDS, GGUF_BLOCKS, Fp8, GgufBlocks
from parallel_backend.client.call import ModelCall
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands
from parallel_backend.client.step_cache import StepCache
from parallel_backend.client.vae import TooLittleMemory
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.setup import Offload
from parallel_backend.core.sparse_attention import HEAD_SIZE, SparseAttention
from parallel_backend.processes.pool import Pool
from parallel_backend.rank.attention.sparse import SparseStep, refusal
from testing import mini
from testing.models import on_ranks
from testing.vaes import OnRanks, made_of, small_vae
from tests.checkpoints.test_formats import encode
from tests.client.test_step_cache import THRESHOLD, decisions
from tests.rank import test_vae
from tests.rank.test_quantised_ranks import INPUTS, KINDS, files, plain, plain_file  # noqa: F401 (fixtures)
from tests.rank.test_sparse_attention import block_sparse

DEVICE = "cuda:0"
ALONE, SHARED, REVERSED = (DEVICE,), (DEVICE, DEVICE), ("cuda:1", "cuda:0")
TOLERANCE = 1e-5
STEPS, BANDS = 4, 3

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
needs_two = pytest.mark.skipif(
    torch.cuda.device_count() < 2 or not dist.is_nccl_available(), reason="needs two CUDA devices and NCCL"
)

PAIRS = [
    pytest.param(SHARED, id="shared", marks=pytest.mark.full),
    pytest.param(REVERSED, id="distinct", marks=needs_two),  # a rank's number need not be its device's
]

LARGE = mini.CONFIG | {"double_blocks": 6, "width": 512, "axes": (16, 56, 56)}
"""300 MB in fp32: large beside what the allocator rounds and what libraries keep for themselves."""


class Ranks:
    """Pools by their devices, started when first asked for and again if they have failed. Every `load` is a real one."""

    def __init__(self, path: Path):
        self.path = path
        self._pools: dict[tuple[str, ...], Pool] = {}

    def __call__(self, devices: tuple[str, ...]) -> Pool:
        pool = self._pools.get(devices)
        if pool is not None and pool.error is not None:
            self._pools.pop(devices).close()
            pool = None
        if pool is None:
            pool = self._pools[devices] = Pool(devices)
            pool.ready.result(timeout=300)
        return pool

    def load(self, devices: tuple[str, ...], degrees: Degrees) -> RemoteTransformer:
        return on_ranks(self(devices), mini.opened(self.path), degrees, "fp32", "sdpa", lambda: None)

    def close(self) -> None:
        while self._pools:
            self._pools.popitem()[1].close()


@pytest.fixture(scope="module")
def ranks(mini_file) -> Iterator[Ranks]:
    """`ranks.load(devices, Degrees(...))`: the mini model on CUDA ranks.

    No matrix product in TF32, here or in the ranks, which inherit the variable: torch's default, but the user's
    environment may say otherwise.
    """
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("NVIDIA_TF32_OVERRIDE", "0")
        ranks = Ranks(mini_file)
        yield ranks
        ranks.close()


def banded(model: RemoteTransformer, given) -> torch.Tensor:
    """With one warm-up step."""
    x, _, tensors = given
    return sample_in_bands(model, x, linear_sigmas(STEPS), Prompt(tensors, tensors, 1.0), BANDS, 1)[0]


@pytest.mark.full
@pytest.mark.parametrize("devices", PAIRS)
def test_the_self_test_passes(devices):
    """Kernels, half precision, every mode and links."""
    results = run(Settings(devices))
    assert {result.name: result.why for result in results if result.status == FAILED} == {}
    left = {result.name for result in results if result.status == NOT_LOOKED_AT}
    assert left - {"transports"} == {"model file"}  # two ranks on one GPU have no NCCL


def moved_to(device: str, given):
    x, timestep, tensors = given
    return x.to(device), timestep.to(device), {name: tensor.to(device) for name, tensor in tensors.items()}


def test_one_rank_equals_the_class(ranks, mini_model, given, expected):
    """Against the CPU, whose kernels add up in another order, the limit is where test_exactness.py's control begins: the
    smallest change of an input there moves the output by more than 1e-3. Rounding in fp32 is far below it (3e-7 between
    this model in fp32 and in fp64), TF32 in the linear layers just so (4e-4). On the same device kernels are the same.
    """
    output = ranks.load(ALONE, Degrees()).predict(ModelCall(*given), lambda: None)
    same_device = mini.reference(copy.deepcopy(mini_model).to(DEVICE), *moved_to(DEVICE, given)).cpu()
    errors = mini.relative(output, expected), mini.relative(output, same_device)
    assert errors[0] <= 1e-3
    assert errors[1] <= TOLERANCE


def test_inputs_and_outputs_on_the_device(ranks, given):
    """ComfyUI's latents and conditioning are on its own device, and its sampler goes on there with what comes back. A step
    cache decides the same by them, and a latent is decoded from there."""
    alone = ranks.load(ALONE, Degrees())
    call, bands = alone.predict(ModelCall(*given), lambda: None), banded(alone, given)
    model = ranks.load(SHARED, Degrees(pipe=2))
    there = moved_to(DEVICE, given)
    output, sample = model.predict(ModelCall(*there), lambda: None), banded(model, there)
    assert output.device == sample.device == there[0].device
    assert mini.relative(output.cpu(), call) <= TOLERANCE
    assert mini.relative(sample.cpu(), bands) <= TOLERANCE
    logs = []
    for x, _, tensors in (given, there):
        cache = StepCache(2 * THRESHOLD, BANDS)
        logs.append(decisions(cache))
        sample_in_bands(model, x, linear_sigmas(10).to(x.device), Prompt(tensors, tensors, 1.0), BANDS, 1, cache=cache)
    assert logs[0] == logs[1] and {".", "#"} <= {*logs[0]}
    vae, x = small_vae(), test_vae.latent(1, 4, 6, 3)
    decoded = OnRanks(ranks(SHARED), "vae", lambda: made_of(vae)).run(x.to(DEVICE), lambda: None)
    assert test_vae.largest(decoded, test_vae.whole(vae, x)) <= TOLERANCE


def test_streamed_weights_give_what_weights_on_the_device_give(ranks, tmp_path):
    """Also after all of them have given way and come back."""
    path = mini.save(mini.random_model(LARGE), tmp_path / "large.safetensors")
    given, load = mini.inputs(LARGE), (Degrees(), "bf16", "sdpa", lambda: None)
    expected = on_ranks(ranks(ALONE), mini.opened(path), *load).predict(ModelCall(*given), lambda: None)
    model = on_ranks(ranks(ALONE), mini.opened(path), *load, offload=Offload(leave_free=1 << 50))
    assert sum(model.weight_bytes) < sum(model.resident.host_bytes)
    for _ in range(2):
        assert all(torch.equal(model.predict(ModelCall(*given), lambda: None), expected) for _ in range(2))
        model.give_way(ALONE[0], 1 << 50, lambda: None)
        assert sum(model.weight_bytes) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_packed_values_expand_as_on_a_cpu(dtype):
    value, scale = torch.randn(8, 512, generator=torch.Generator().manual_seed(0)), torch.linspace(0.5, 2.0, 8)[:, None]
    for kind in GGUF_BLOCKS:
        packed = torch.from_numpy(encode(value, kind))
        expected = GgufBlocks(kind).expand(packed, dtype)
        assert torch.equal(GgufBlocks(kind).expand(packed.to(DEVICE), dtype).cpu(), expected), kind
    for kind in FP8_KINDS:
        packed = value.to(FP8_KINDS[kind]).view(torch.uint8)
        expected = Fp8(kind, scale).expand(packed, dtype)
        assert torch.equal(Fp8(kind, scale.to(DEVICE)).expand(packed.to(DEVICE), dtype).cpu(), expected), kind


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_file_is_near_the_plain_model(ranks, plain, files, kind):  # noqa: F811
    """By comfy-kitchen's products, or expanded where the GPU does not multiply in the format."""
    model = on_ranks(ranks(ALONE), mini.opened(files(kind)[0]), Degrees(), "bf16", "sdpa", lambda: None)
    assert mini.relative(model.predict(ModelCall(*INPUTS), lambda: None).float().cpu(), plain) < 0.5


@pytest.mark.parametrize("devices", PAIRS)
def test_a_vae_in_bands_equals_the_whole_on_a_cpu(ranks, devices):
    vae, x = small_vae(), test_vae.latent(1, 4, 13, 9)
    decoder = OnRanks(ranks(devices), "vae", lambda: made_of(vae))
    assert test_vae.largest(decoder.run(x, lambda: None), test_vae.whole(vae, x)) <= TOLERANCE
    with pytest.raises(TooLittleMemory):
        decoder.run(x, lambda: None, bytes_needed=torch.cuda.get_device_properties(0).total_memory + 1)
    half = copy.deepcopy(vae).bfloat16()
    found = OnRanks(ranks(devices), "bf16", lambda: made_of(half), dtype=torch.bfloat16).run(x, lambda: None)
    assert found.dtype == torch.bfloat16
    assert test_vae.largest(found, test_vae.whole(vae, x)) <= 0.05


@pytest.mark.parametrize(
    "settings", [SparseAttention(tau=0.5), SparseAttention(kept=0.3, extra_tokens=64)], ids=["sol", "sla"]
)
def test_block_sparse_attention_is_near_its_formula(request, settings):
    """comfy-kitchen's kernel, on rows that lie in another order. It computes in int8."""
    lacks = refusal(torch.device(DEVICE), torch.bfloat16, HEAD_SIZE, cubes=False)
    if lacks or request.config.getoption("emulated_gpus"):
        pytest.skip(f"it needs {lacks or 'a GPU'}")
    order = torch.cat((torch.arange(260, 300), torch.arange(260)))
    step = SparseStep(settings, torch.device(DEVICE))
    layout = step.of_class((), lambda: torch.argsort(order), 300)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 300, 2, HEAD_SIZE, generator=generator).bfloat16() for _ in range(3))
    found = step.attend(layout, q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), None, None).cpu().float()
    sinks = (0, 0), (0, 0)
    expected = block_sparse(*(x[:, order].float() for x in (q, k, v)), settings.tau, None, *sinks, settings.kept, 0)
    assert torch.cosine_similarity(found[:, order].flatten(), expected.flatten(), dim=0) >= 0.99
