"""One rank's model at work: turns a `Step` message into receives, the model's forward, and a send or an output."""

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint, open_checkpoint
from parallel_backend.checkpoints.fingerprint import check_fingerprint
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.dtypes import compute_dtype
from parallel_backend.core.sequence import SequenceCut
from parallel_backend.core.spans import Span
from parallel_backend.core.token_order import TokenOrder
from parallel_backend.families.base.step_inputs import GUIDANCE, REFERENCE_POSITIONS, REFERENCES, TEXT_MASK, Rows, StepInputs
from parallel_backend.rank.attention.context import AttentionContext, AttentionStep
from parallel_backend.rank.attention.kernels import choose_kernel
from parallel_backend.rank.attention.kv_buffer import KVBuffer
from parallel_backend.rank.attention.linear_attention import install_linear
from parallel_backend.rank.attention.parallel_attention import install_parallel_attention
from parallel_backend.rank.comm.mesh import close_axes, make_axes
from parallel_backend.rank.comm.stage_link import StageLink
from parallel_backend.rank.comm.transfer_codec import codec_for
from parallel_backend.rank.comm.transfers import Elapsed, Traffic
from parallel_backend.rank.stage.block_slots import StageDone
from parallel_backend.rank.stage.build import build_stage, keep_timestep_exact
from parallel_backend.rank.stage.lora import Adapters
from parallel_backend.rank.stage.module_cache import ModuleCache
from parallel_backend.rank.stage.stand_ins import own_blocks
from parallel_backend.rank.stage.tensor_parallel import TensorPlan
from parallel_backend.wire.diagnosis import FindNotFinite, NotFiniteFound, Timeline
from parallel_backend.wire.heartbeat import Heartbeat
from parallel_backend.wire.loading import Load
from parallel_backend.wire.sampling import OpenRun, Output, PutConditioning, RunStats, Step
from parallel_backend.wire.timeline_kinds import OUTSIDE, WORK, StepLabel

from .block_timer import BlockWatch
from .finite_check import FiniteWatch, bad_adapters, bad_weights
from .stage_ops import Op, stage_ops

if TYPE_CHECKING:
    from parallel_backend.rank.stage.compile import Compiler

KEPT_EXACT = (REFERENCE_POSITIONS, GUIDANCE)
"""Conditioning tensors that no dtype but their own can hold: positions above 256 are not all there in bf16."""


@dataclass(frozen=True)
class Conditioning:
    """What a PutConditioning message left on the rank; `tensors` are on its device, in the compute dtype."""

    grid: tuple[int, ...]
    stream: TokenOrder
    text_tokens: int
    batch: int
    tensors: dict[str, torch.Tensor]
    kept: defaultdict[Span, dict[Any, torch.Tensor]] = field(default_factory=lambda: defaultdict(dict))  # see StepInputs


class Engine:
    """A loaded stage. All methods are collective only where the mesh says so; none waits for another rank's choice."""

    def __init__(
        self,
        rank: int,
        device: torch.device,
        load: Load,
        slowdown: float,
        progress: Callable[[float], None],
        heartbeat: Heartbeat | None = None,
    ):
        """Loads the rank's own part of the checkpoint. Collective over all ranks (it builds the mesh's groups).

        `slowdown`: see RankSettings. `progress`: see fill_weights. `heartbeat` is told of every block and wait.
        """
        self.rank, self.device, self.slowdown = rank, device, slowdown
        self.heartbeat = heartbeat = heartbeat or Heartbeat()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        checkpoint = open_checkpoint(load.path)
        if load.fingerprint:
            check_fingerprint(checkpoint, load.fingerprint)
        family, config = checkpoint.family, checkpoint.config
        self.family, self.hidden = family, family.sizes.hidden(config)
        self.dtype = compute_dtype(load.dtype, device)
        degrees = Degrees(*load.degrees, load.patch_mode)
        with heartbeat.blocked():
            self.axes = axes = make_axes(degrees, rank)
        self.pipe, self.tensor = axes["pipe"], axes["tensor"]
        self.cut = SequenceCut(load.patch_shares, degrees.ring * degrees.ulysses, degrees.naive)
        self.place = degrees.sequence_index(degrees.coordinate(rank))
        self.ops = stage_ops(self.pipe.index, self.pipe.size)

        self.traffic = Traffic(device, heartbeat)
        self.link = StageLink(self.pipe, device, self.traffic)
        plan = TensorPlan(
            family.tensor_plan,
            family.sizes.heads(config),
            family.sizes.head_size(config),
            self.tensor,
            family.sizes.key_heads(config),
        )
        span = load.stage_blocks[self.pipe.index]
        stage = build_stage(checkpoint, span, device, load.dtype, plan, progress, load.only)
        self.model, self.flow = stage.model, stage.flow
        plan.apply(self.model, self.traffic)
        self.adapters = Adapters(self.model, checkpoint, plan, device, self.dtype)
        kernel = choose_kernel(load.attention, device, load.dtype)
        codec = codec_for(load.transfer_dtype)
        self.context = AttentionContext(degrees, axes, kernel, self.traffic, family.forward.drops_mask, codec)
        install_parallel_attention(stage.attention, self.context)
        install_linear(stage.attention, self.context)
        self.once = ModuleCache(self.model, family.forward.cached_modules)
        self.compiler = self._compiler(checkpoint, degrees.world) if load.compile else None
        self.watch = BlockWatch(self.model, load.only, self.traffic, slowdown)
        for block in own_blocks(self.model, family.blocks.lists).values():
            block.register_forward_hook(lambda *_: heartbeat.done())
        self.timestep: torch.Tensor | None = None
        self.guidance: torch.Tensor | None = None
        # Of the last grid and number of reference tokens: the stream's places in the model's own order (Rows.image).
        self._orders: dict[tuple[tuple[int, ...], int], torch.Tensor | None] = {}
        keep_timestep_exact(self.model, self.family, lambda: (self.timestep, self.guidance), self.dtype)

        self.conditionings: dict[int, Conditioning] = {}
        self.buffers: dict[tuple[int, int], KVBuffer] = {}  # (run, conditioning)
        self.runs: dict[int, OpenRun] = {}
        self.buffer_bytes = 0
        self.finite = FiniteWatch()
        self.micro_steps, self.working = 0, Elapsed(self.traffic.clock)  # since the last report

    @property
    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.model.parameters())

    def find_not_finite(self, asked: FindNotFinite) -> NotFiniteFound:
        """Where values that are not finite began on this rank."""
        seq = self.finite.first(asked.run, asked.since)
        return NotFiniteFound(self.rank, seq, bad_weights(self.model), bad_adapters(self.model))

    def close(self) -> None:
        """Let the transfers under way end, then the mesh's groups. Collective over all ranks."""
        self.link.await_sends()
        self._drop_buffers(lambda key: True)
        if self.compiler is not None:
            self.compiler.close()
        with self.heartbeat.blocked():
            close_axes(self.axes)

    def put_conditioning(self, message: PutConditioning) -> None:
        exact = (*KEPT_EXACT, *self.family.inputs.exact)
        tensors = {
            name: tensor.to(self.device, self.dtype if tensor.is_floating_point() and name not in exact else None)
            for name, tensor in message.tensors.items()
        }
        stream = self.family.stream(message.grid, message.references)
        self.conditionings[message.id] = Conditioning(message.grid, stream, message.text_tokens, message.batch, tensors)

    def adapted(self) -> int:
        """The adapters are all in place: bytes that they take."""
        self.once.forget()
        return self.adapters.nbytes

    def drop_conditioning(self, conditioning: int) -> None:
        self.conditionings.pop(conditioning, None)
        self.once.drop(conditioning)
        self._drop_buffers(lambda key: key[1] == conditioning)

    @torch.inference_mode()
    def step(self, step: Step, upcoming: Step | None) -> Output | None:
        """Run one micro-step; the output on the last stage, None elsewhere.

        `upcoming`: the next micro-step if it is known already, whose receive is posted before this one is computed.
        """
        began, waited = self.traffic.clock.now(), self.traffic.waited.seconds() if self.slowdown > 1 else 0.0
        self.traffic.recorder.step = label = self._label(step)
        received = output = None
        for op in self.ops:
            if op is Op.RECEIVE:
                if not self.link.posted:
                    self._post_receive(step)
                received = self.link.receive()
                if upcoming is not None and step.overlap:
                    self._post_receive(upcoming)
            elif op is Op.COMPUTE:
                output = self._compute(step, received)
                self.finite.note(step.seq, step.run, output)
                if self.slowdown > 1:
                    self._slow_down(began, waited)
            else:
                self.link.send(output, step.overlap)
        self.micro_steps += 1
        ended = self.traffic.clock.now()
        self.working.add(began, ended)
        self.traffic.recorder.add(WORK, label, began, ended)
        self.traffic.recorder.step = OUTSIDE
        return Output(self.rank, step.seq, output) if Op.SEND not in self.ops and self.tensor.index == 0 else None

    def open_run(self, run: OpenRun) -> None:
        self.runs[run.run] = run

    def close_run(self, run: int) -> RunStats:
        """Drop the run's K/V buffers and report what was done since the last report."""
        self.link.await_sends()
        buffer_bytes, self.buffer_bytes = self.buffer_bytes, 0
        self.runs.pop(run, None)
        self._drop_buffers(lambda key: key[0] == run)
        if run:
            self.once.forget()
        bytes_sent, under_way, waited = self.traffic.report()
        micro_steps, self.micro_steps = self.micro_steps, 0
        busy = self.working.take() - waited
        peak, blocks = self._peak_bytes(), self.watch.take()
        graphs = 0 if self.compiler is None else self.compiler.graphs
        return RunStats(self.rank, run, micro_steps, busy, under_way, waited, bytes_sent, buffer_bytes, peak, blocks, graphs)

    def _compiler(self, checkpoint: Checkpoint, ranks: int) -> "Compiler":
        from parallel_backend.rank.stage.compile import Compiler  # takes a second

        blocks = own_blocks(self.model, self.family.blocks.lists)
        return Compiler(blocks, lambda layer: checkpoint.shape(f"{layer}.weight")[0], self.device, ranks)

    def begin_timeline(self) -> None:
        """What is recorded from now on is the last run's. Sends of the one before are over, or would count from then."""
        self.link.await_sends()
        self.traffic.recorder.restart()

    def timeline(self) -> Timeline:
        return Timeline(self.rank, *self.traffic.recorder.read())

    def _label(self, step: Step) -> StepLabel:
        exact = not step.stale and step.tokens == self.conditionings[step.conditioning].stream.span
        return step.seq, step.tokens.start, step.tokens.stop, int(exact)

    def _slow_down(self, began, waited: float) -> None:
        """Sleep as long as the slower device that this rank stands in for would still compute."""
        whole = Elapsed(self.traffic.clock)
        whole.add(began, self.traffic.clock.now())
        time.sleep((self.slowdown - 1) * max(0.0, whole.seconds() - (self.traffic.waited.seconds() - waited)))

    def _drop_buffers(self, which: Callable[[tuple[int, int]], bool]) -> None:
        for key in [key for key in self.buffers if which(key)]:
            self.buffers.pop(key).wait_pending()

    def _shards(self, step: Step) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
        """The micro-step's text and image tokens by sequence rank."""
        text = self.conditionings[step.conditioning].text_tokens if step.with_text else 0
        return self.cut.text(text), self.cut.image(step.tokens)

    def _post_receive(self, step: Step) -> None:
        text, image = (shards[self.place] for shards in self._shards(step))
        tensors = 1 + len(self.flow.arriving)  # see Flow.outgoing
        self.link.post_receive((tensors * len(step.entries), len(text) + len(image), self.hidden), self.dtype)

    def _compute(self, step: Step, received: torch.Tensor | None) -> torch.Tensor:
        """[b, n, channels] on the last stage; elsewhere what is sent on (Flow.outgoing)."""
        conditioning = self.conditionings[step.conditioning]
        buffer = self._buffer(step, conditioning)
        if buffer is not None and step.with_text:
            buffer.begin_call(float(step.timestep.max()))
        text, image = self._shards(step)
        own_text, own_image = text[self.place], image[self.place]
        text_mask = conditioning.tensors.get(TEXT_MASK)
        self.context.step = AttentionStep(
            conditioning.text_tokens,
            text,
            image,
            step.entries,
            buffer,
            step.stale,
            step.overlap,
            self.family.blocks.text_first,
            None if text_mask is None else text_mask[step.entries.slice],
            self.family.image_padding(conditioning.grid),
            conditioning.stream.row,
        )
        self.timestep = step.timestep.to(self.device)
        rows = self._rows(conditioning, own_image, own_text)
        self.flow.begin(received, len(own_text), rows, self._residuals(step, conditioning.stream, own_image))
        tensors = self._tensors(step, conditioning)
        self.guidance = tensors.get(GUIDANCE)
        inputs = StepInputs(
            None if step.x is None else self._with_references(step.x, tensors, conditioning.stream, own_image),
            self.timestep,
            tensors,
            conditioning.grid,
            conditioning.stream,
            own_image,
            own_text,
            conditioning.text_tokens,
            self.dtype,
            conditioning.kept[own_image],
        )
        self.once.begin(step, whole=step.tokens == conditioning.stream.span)
        try:
            output = self.family.run(self.model, inputs)
        except StageDone as done:
            output = self.flow.outgoing(done)
        finally:
            self.context.step = None
            self.once.end()
        if buffer is not None:
            buffer.filled = max(buffer.filled, step.tokens.stop)
            self.buffer_bytes = max(self.buffer_bytes, sum(b.nbytes for b in self.buffers.values()))
        return output

    def _with_references(
        self, x: torch.Tensor, tensors: dict[str, torch.Tensor], stream: TokenOrder, image: Span
    ) -> torch.Tensor:
        """[b, m, C] of the picture's tokens -> [b, n, C] of `image`; as it is where the model is given whole tensors."""
        x = x.to(self.device, self.dtype)
        if self.family.forward.whole_latent or not stream.references:
            return x
        places = stream.places(image).to(self.device)
        own = places < stream.image
        out = x.new_empty(len(x), len(image), x.shape[-1])
        out[:, own] = x
        out[:, ~own] = tensors[REFERENCES][:, places[~own] - stream.image]
        return out

    def _residuals(self, step: Step, stream: TokenOrder, image: Span) -> dict[str, torch.Tensor]:
        """Block -> [b, n, hidden]; what is added to reference tokens is zero."""
        if not step.residuals:
            return {}
        added = [tensor.to(self.device, self.dtype) for tensor in step.added]
        if stream.references:
            own = (stream.places(image) < stream.image).to(self.device)
            for index, tensor in enumerate(added):
                added[index] = tensor.new_zeros(len(tensor), len(image), tensor.shape[-1])
                added[index][:, own] = tensor
        return {block: added[index] for block, index in step.residuals.items()}

    def _rows(self, conditioning: Conditioning, image: Span, text: Span) -> Rows | None:
        """What slots cut whole tensors down to."""
        if not self.family.forward.whole_latent:
            return None
        stream, key = conditioning.stream, (conditioning.grid, conditioning.stream.references)
        if key not in self._orders:
            order = self.family.patching.order(conditioning.grid)
            if stream.references:
                places = stream.places(stream.span)
                own = places if order is None else order[places.clamp(max=stream.image - 1)]
                order = torch.where(places < stream.image, own, places)
            self._orders = {key: None if order is None else order.to(self.device)}
        order = self._orders[key]
        index = image.slice if order is None else order[image.slice]
        return Rows(index, stream.tokens, text, self.family.blocks.text_first)

    def _tensors(self, step: Step, conditioning: Conditioning) -> dict[str, torch.Tensor]:
        """The conditioning of this micro-step's entries; its text is empty where the text does not run along.

        In families of `whole_latent` it is whole all the same: the blocks' slots leave it out.
        """
        tensors = {name: tensor[step.entries.slice] for name, tensor in conditioning.tensors.items()}
        if not step.with_text and not self.family.forward.whole_latent:
            for name in self.family.inputs.token_tensors:
                if name in tensors:
                    tensors[name] = tensors[name][:, :0]
        return tensors

    def _buffer(self, step: Step, conditioning: Conditioning) -> KVBuffer | None:
        if step.run == 0:
            return None
        key = (step.run, step.conditioning)
        if key not in self.buffers:
            self.buffers[key] = KVBuffer(conditioning.stream.tokens, conditioning.batch, self.runs[step.run].extrapolate)
        return self.buffers[key]

    def _peak_bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        try:
            import resource  # POSIX only
        except ImportError:
            return 0
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
