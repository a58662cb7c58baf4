"""A rank's part of a model, loaded and ready to compute: its stage, its position on the mesh, and its transfers."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from parallel_backend.checkpoints.checkpoint import open_setup
from parallel_backend.core.attention_kernels import AUTO
from parallel_backend.core.dtypes import compute_dtype
from parallel_backend.core.sequence import SequenceCut
from parallel_backend.core.spans import Span
from parallel_backend.core.sparse_attention import SparseAttention
from parallel_backend.own_class.adapters.adapters import adapter_of
from parallel_backend.rank.attention.context import AttentionContext
from parallel_backend.rank.attention.kernel_choice import RankKernel, choose_kernel
from parallel_backend.rank.comm.mesh import receives_early
from parallel_backend.rank.comm.peers import Peers
from parallel_backend.rank.comm.stage_link import StageLink
from parallel_backend.rank.comm.transfers import Traffic
from parallel_backend.rank.host_memory.host_store import HostStore
from parallel_backend.rank.stage.build_stage import OwnLink, attend_over_ranks, build_own_stage
from parallel_backend.rank.stage.expanded_weights import ExpandedWeights
from parallel_backend.rank.stage.linear import PackedLinear, multiply_plain_fp8
from parallel_backend.rank.stage.lora import Adapters
from parallel_backend.rank.stage.module_cache import ModuleCache
from parallel_backend.rank.stage.store.device_copies import DeviceCopies, copies_of
from parallel_backend.rank.stage.store.weight_store import WeightStore
from parallel_backend.rank.stage.tensor_parallel import TensorPlan
from parallel_backend.rank.stage.weights import StageWeights
from parallel_backend.wire.heartbeat import Heartbeat
from parallel_backend.wire.loading import Load

if TYPE_CHECKING:
    from parallel_backend.rank.stage.compile import Compiler


class LoadedStage:
    """The result of a Load message."""

    def __init__(
        self,
        rank: int,
        device: torch.device,
        load: Load,
        progress: Callable[[float], None],
        peers: Peers,
        heartbeat: Heartbeat,
        copies: DeviceCopies | None = None,
    ):
        """Load the rank's part of the checkpoint. Collective over all ranks, which first create and test the mesh's groups.

        `rank`: the rank's number among the ranks that have the model. `peers`: those ranks. `progress`: see StageWeights.
        `heartbeat`: gets every block and every wait. `copies`: to and from the rank's device, shared by all its models;
        None: only for this model.
        """
        self.rank, self.device, self._peers = rank, device, peers
        self.copies = copies or copies_of(device)
        self.copies.restart_peak()
        setup = load.setup
        checkpoint = open_setup(setup)
        if load.fingerprint:
            checkpoint.check_fingerprint(load.fingerprint)
        checkpoint.check_unchanged(load.file_state)
        built, own = checkpoint.built, checkpoint.built.own
        self.built = built
        self.dtype = compute_dtype(setup.dtype, device)
        self._degrees = degrees = setup.degrees
        self.mesh = peers.enter_mesh(degrees)
        self.axes = axes = self.mesh.axes
        self.pipe, self.tensor = axes["pipe"], axes["tensor"]
        self.cut = SequenceCut(load.patch_shares, degrees.ring * degrees.ulysses, degrees.naive)
        self.place = degrees.sequence_index(degrees.coordinate(rank))
        """The rank's number among the sequence ranks of its stage."""

        self.heartbeat, self.traffic = heartbeat, Traffic(device, heartbeat)
        self.link = StageLink(self.mesh.link(sends=False), self.mesh.link(sends=True), device, self.traffic)
        self.own_link = OwnLink(self.link, receives_early(degrees))
        span = load.stage_blocks[self.pipe.index]
        host = HostStore(rank, device, degrees, checkpoint, peers)
        resident = load.resident[rank] if load.resident else None
        self.store = store = WeightStore(self.copies, host, self.traffic, resident)

        def read(weights: StageWeights, blocks: Sequence[str]) -> None:
            if setup.fp8_products:
                multiply_plain_fp8(weights.model)
            store.load(weights, blocks, progress)

        plan = TensorPlan(built.tensor_plan, self.tensor)
        stage = build_own_stage(checkpoint, span, device, setup.dtype, plan, read, self.own_link)
        self.model, self.blocks, plan = stage.model, stage.blocks, stage.plan
        plan.apply(self.model, self.traffic)
        self.adapters = Adapters(self.model, checkpoint, plan, device, self.dtype, store)
        self._choose = functools.partial(
            choose_kernel, device=device, dtype=setup.dtype, head_size=own.head_size, ring=degrees.ring > 1
        )
        self._kernels = {"": self._choose(setup.attention)}
        is_cut = degrees.sequence > 1 or own.latent is not None
        gate = "" if setup.compile else adapter_of(own.kind).gate
        context = AttentionContext.of(degrees, axes, self.traffic, setup.transfer_dtype)
        self.attention = attend_over_ranks(stage, context, self.cut if is_cut else None, gate)
        shared = () if own.latent is None else own.latent.shared
        self.module_cache = ModuleCache(self.model, shared, adapter_of(own.kind).of_prompt, setup.cuda_graphs)
        self.compiler = self._compile(stage.modules, degrees.world) if setup.compile else None
        # A CUDA graph repeats what was expanded as it was captured, and a compiled block is traced again for a kept weight.
        packed = () if setup.compile or setup.cuda_graphs else self.packed_layers
        self.expanded = ExpandedWeights(packed, device)
        store.watch(stage.modules)
        for block in stage.modules.values():
            block.register_forward_hook(lambda *_: heartbeat.done())
        self._blocks_here = len(stage.modules)

    def image(self, tokens: Span) -> Span:
        """Return this rank's part of a micro-step's image tokens."""
        return self.cut.image(tokens)[self.place]

    def kernel_of(self, attention: str) -> RankKernel:
        """The attention kernel of a call. `attention`: see BlockChanges. The first call with another kernel tries it."""
        if attention not in self._kernels:
            self._kernels[attention] = self._choose(f"{AUTO}/{attention}")
        return self._kernels[attention]

    def lacks_for_sparse(self, settings: SparseAttention) -> str:
        """Return what this model's ranks lack for block-sparse attention, as text for the report. Empty: nothing."""
        degrees = self._degrees
        if degrees.ring > 1 or degrees.patch > 1:
            return "whole sequences: a ring_degree and a patch_degree of 1"
        if settings.cubes and self.compiler is not None:
            return "blocks that are not compiled"
        return ""

    def attention_report(self) -> str:
        """Return the kernels that ran since the last report, as text for the user."""
        used = [kernel for kernel in self._kernels.values() if kernel.used] or [self._kernels[""]]
        return "; ".join(filter(None, (*(kernel.report() for kernel in used), self.attention.sparse_calls.report())))

    @property
    def without_graphs(self) -> str:
        """Why micro-steps cannot be captured in CUDA graphs, as a clause for the user. Empty: they can."""
        if not (kernel := self._kernels[""].kernel).graphs:
            return f"{kernel.title} cannot be captured"
        if torch.version.hip and self._degrees.world > 1:
            # torch's watchdog of NCCL asks its events on a thread of its own, in older versions during captures too.
            return "on ROCm a capture cannot be kept apart from the transfers of several ranks"
        return ""

    def blocks_done(self) -> None:
        """Count every block as done in the heartbeat. A replayed CUDA graph does not run the hooks that count blocks."""
        for _ in range(self._blocks_here):
            self.heartbeat.done()

    @property
    def arithmetic(self) -> str:
        """The arithmetic with packed weights, as text for the user. Empty: nothing to report."""
        return "; ".join(sorted({layer.arithmetic.word for layer in self.packed_layers} - {""}))

    @property
    def packed_layers(self) -> list[PackedLinear]:
        return [module for module in self.model.modules() if isinstance(module, PackedLinear)]

    def close(self) -> None:
        """Wait for sends in progress, and end the mesh's groups. Collective over all ranks."""
        self.link.await_sends()
        if self.compiler is not None:
            self.compiler.close()
        self.blocks.close()
        self.store.close()
        self._peers.leave_mesh(self._degrees)

    def _compile(self, blocks: Mapping[str, nn.Module], ranks: int) -> "Compiler":
        from parallel_backend.rank.stage.compile import Compiler  # takes a second

        return Compiler(blocks, ranks, self.heartbeat, self.blocks.wrap)
