"""Runs a rank's model: each `Step` message is a receive, the forward of the rank's stage, and a send or an output."""

from collections.abc import Callable

import torch

from parallel_backend.core.spans import Span
from parallel_backend.wire.diagnosis import Timeline
from parallel_backend.wire.loading import Load, Residency
from parallel_backend.wire.sampling import OpenRun, Output, PutConditioning, RunStats, Step
from parallel_backend.wire.timeline_kinds import OUTSIDE, WORK, StepLabel

from .comm.mesh import receives_early
from .conditioning_store import ConditioningStore, RankConditioning
from .loaded_stage import LoadedStage
from .micro_step_graphs import CAPTURES, Kind, MicroStepGraphs
from .run_buffers import RunBuffers
from .stage_forward import StageForward
from .words_once import WordsOnce


class Engine:
    """Runs the micro-steps of a loaded stage. Methods wait for other ranks only in transfers of the mesh."""

    def __init__(self, rank: int, load: Load, stage: LoadedStage):
        """`stage`: this rank's part of the model that `load` describes."""
        self.rank, self.stage, device = rank, stage, stage.device
        # A naive patch has the keys of its own tokens alone, and words among them.
        self.conditionings = ConditioningStore(stage.built, device, keeps_words=not stage.attention.context.naive)
        self.runs = RunBuffers()
        self._words = WordsOnce()
        self._traffic, self._link = stage.traffic, stage.link
        self._graphs = None
        if load.setup.cuda_graphs and receives_early(load.setup.degrees) and device.type in CAPTURES:
            self._graphs = MicroStepGraphs(device, stage.blocks_done, stage.heartbeat.unasked, stage.without_graphs)
        self._forward = StageForward(stage, self._graphs)
        self._micro_steps = 0  # since the last report
        self._working_bytes = 0  # of micro-steps of these forms, since it was last asked for
        self._measured: set[tuple[int, Span, Span, bool]] = set()

    @property
    def residency(self) -> Residency:
        """Bytes of weights on the device and on the host."""
        return Residency(self.rank, self.stage.store.device_bytes, self.stage.store.host_bytes)

    @property
    def run_bytes(self) -> int:
        """Bytes on the device of prompts and K/V buffers, between micro-steps."""
        return self.conditionings.nbytes + self.runs.nbytes

    def take_working_bytes(self) -> int:
        """DeviceMemoryReport.working_bytes since the last call. Starts again at zero."""
        taken, self._working_bytes = self._working_bytes, 0
        self._measured.clear()
        return taken

    def set_resident(self, resident: int) -> Residency:
        """Move weights between device and host (loading.SetResident). Returns the bytes on each."""
        self.drop_graphs()
        if resident == 0:
            self.stage.module_cache.forget()
        self.stage.expanded.drop()
        self.stage.store.set_resident(resident)
        return self.residency

    def drop_graphs(self, which: Callable[[Kind], bool] | None = None) -> None:
        """Drop graphs of these kinds, see MicroStepGraphs.drop. To be called before memory that they use is freed or
        moved."""
        if self._graphs is not None:
            self._graphs.drop(which)

    def rest(self) -> None:
        """Wait for all transfers in progress, before micro-steps of another model."""
        self._link.await_sends()
        self.runs.wait_pending()

    def end_transfers(self) -> None:
        """Wait for all transfers in progress, and drop the K/V buffers."""
        self._link.await_sends()
        self.drop_graphs()
        self.runs.clear()

    def close(self) -> None:
        """Wait for all transfers in progress, and end the mesh's groups. Collective over all ranks."""
        self.end_transfers()
        self.stage.close()

    def adapted(self) -> int:
        """To be called when all adapters are in place. Drops CUDA graphs and cached results. Returns the adapters' bytes."""
        self.drop_graphs()
        self.stage.module_cache.forget()
        self._words.forget()
        self.conditionings.forget_words()
        return self.stage.adapters.nbytes

    def put_conditioning(self, message: PutConditioning) -> None:
        self.drop_graphs(lambda kind: kind.conditioning == message.id)
        self._forget_calls(message.id)
        self.conditionings.put(message)

    def drop_conditioning(self, conditioning: int) -> None:
        self.drop_graphs(lambda kind: kind.conditioning == conditioning)
        self.conditionings.drop(conditioning)
        self._forget_calls(conditioning)
        self.stage.module_cache.drop(conditioning)
        self.runs.drop_conditioning(conditioning)

    def _forget_calls(self, conditioning: int) -> None:
        self._words.drop_conditioning(conditioning)
        self.stage.own_link.drop_conditioning(conditioning)

    def open_run(self, run: OpenRun) -> None:
        self.runs.open_run(run)

    def close_run(self, run: int) -> RunStats:
        """Drop the run's K/V buffers. Returns the statistics since the last report."""
        self._link.await_sends()
        self.drop_graphs((lambda kind: kind.run == run) if run == 0 else lambda kind: True)
        buffer_bytes = self.runs.close_run(run)
        self._words.close_run(run)
        self.conditionings.forget_words()
        if run:
            self.stage.module_cache.forget()
        bytes_sent, under_way, waited = self._traffic.report()
        streamed, waited_for_weights = self.stage.store.report()
        micro_steps, self._micro_steps = self._micro_steps, 0
        captured, replayed = (0, 0) if self._graphs is None else self._graphs.report()
        return RunStats(
            rank=self.rank,
            run=run,
            micro_steps=micro_steps,
            compute_seconds=self._traffic.recorder.drain_computing(),
            transfer_seconds=under_way,
            wait_seconds=waited,
            bytes_sent=bytes_sent,
            buffer_bytes=buffer_bytes,
            peak_bytes=self.stage.store.peak_bytes,
            graphs=0 if self.stage.compiler is None else self.stage.compiler.graphs,
            attention=self.stage.attention_report(),
            arithmetic=self.stage.arithmetic,
            streamed_bytes=streamed,
            streaming_wait_seconds=waited_for_weights,
            captured=captured,
            replayed=replayed,
            without_graphs="" if self._graphs is None else self._graphs.refused,
        )

    @torch.inference_mode()
    def step(self, step: Step, upcoming: Step | None) -> Output | None:
        """Run one micro-step. Returns the output on the last stage, None on others. `upcoming`: the next micro-step, if
        known. If the stage receives early, its receive is posted before this one is computed."""
        clock, recorder = self._traffic.clock, self._traffic.recorder
        conditioning, began = self.conditionings[step.conditioning], clock.now()
        recorder.step = label = _label(step, conditioning)
        self._traffic.mark(began)
        decided = self._decided(step)
        self.stage.own_link.begin_step(decided, None if upcoming is None else self._decided(upcoming))
        output = self._compute(step, decided, conditioning)
        self._micro_steps += 1
        ended = clock.now()
        self._traffic.mark(ended, idle=True)
        recorder.add(WORK, label, began, ended)
        recorder.step = OUTSIDE
        last = self.stage.pipe.index == self.stage.pipe.size - 1
        if not last or self.stage.tensor.index > 0:  # tensor ranks have equal outputs
            return None
        return Output(self.rank, step.seq, output)

    def begin_timeline(self) -> None:
        """Begin a run's timeline: drop earlier spans. Waits for sends in progress, whose spans would end in this run."""
        self._link.await_sends()
        self._traffic.recorder.restart()

    def timeline(self) -> Timeline:
        return Timeline(self.rank, *self._traffic.recorder.read())

    def _decided(self, step: Step) -> Step:
        """Return the micro-step, without its text if that need not be computed again."""
        return step if self.conditionings[step.conditioning].words is None else self._words.of(step)

    def _compute(self, step: Step, decided: Step, conditioning: RankConditioning) -> torch.Tensor:
        self.stage.store.begin_step()
        is_new = decided.form not in self._measured  # others take as much: torch's statistics cost some 0.1 ms
        if is_new:
            self.stage.expanded.drop()
            self.stage.copies.begin_measuring()
        elif not self.stage.store.streams:
            self.stage.expanded.begin_step()
        buffer = self.runs.begin_step(step, conditioning) if step.run else None
        output = self._forward.compute(decided, conditioning, buffer)
        if step.run:
            self.runs.end_step(step)
        if is_new:
            self._measured.add(decided.form)
            self._working_bytes = max(self._working_bytes, self.stage.copies.working_bytes)
        return output


def _label(step: Step, conditioning: RankConditioning) -> StepLabel:
    exact = not step.stale and conditioning.is_whole(step)
    return step.seq, step.tokens.start, step.tokens.stop, int(exact)
