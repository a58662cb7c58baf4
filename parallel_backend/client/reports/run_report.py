"""The report of a run as text, an output of PipeFusion Sampler."""

import math
from dataclasses import dataclass

from parallel_backend.core.degrees import Degrees
from parallel_backend.wire.sampling import RunStats


@dataclass(frozen=True)
class RunReport:
    """The statistics of a run. `str` gives the text."""

    degrees: Degrees
    bands: int
    steps: int
    seconds: float
    exact_calls: int | None
    """Number of exact model calls of a run in bands. None: the run was not in bands, and all calls were exact."""
    reason: str | None
    """Why the run was not in bands."""
    ranks: tuple[RunStats, ...]
    cache: str | None = None
    """StepCache.summary. None: the run had no step cache."""
    notes: tuple[str, ...] = ()
    """Pool.notes."""
    gained: str = ""
    """Speed relative to one GPU, as "1.7 x one GPU". Empty: unknown."""
    transfer_dtype: str = "full"
    """Setup.transfer_dtype."""
    expected_db: float | None = None
    """Expected closeness of the latent to one GPU's. None: none was asked for, or none could be expected."""

    @property
    def bytes_sent(self) -> dict[str, int]:
        """Payload bytes sent by all ranks, by mesh axis."""
        total: dict[str, int] = {}
        for rank in self.ranks:
            for axis, count in rank.bytes_sent.items():
                total[axis] = total.get(axis, 0) + count
        return total

    @property
    def closeness(self) -> str:
        """The expected closeness in words. Empty: unknown."""
        if self.expected_db is None:
            return ""
        return (
            f"at least {self.expected_db:.0f} dB expected" if math.isfinite(self.expected_db) else "exact to the last step"
        )

    @property
    def shown(self) -> tuple[str, ...]:
        """Lines for the sampler's node: duration, exactness, and other facts that the user should know. The node shows two
        lines of about 38 characters, with "Parallel DiT: " before the first. A larger node shows the others."""
        if self.degrees.naive:
            how = "naive patches, for comparison"
        elif self.exact_calls is None:
            close = ["step cache"] * (self.cache is not None) + ["packed transfers"] * (self.transfer_dtype != "full")
            ranks = f"exact, on {self.degrees.world} {'rank' if self.degrees.world == 1 else 'ranks'}"
            how = f"close to exact: {', '.join(close)}" if close else ranks
        else:
            patches = "patches" if self.degrees.displaced else f"{self.bands} patches"
            how = ", ".join(filter(None, (f"close to exact: {patches}, warm-up {self.exact_calls}", self.closeness)))
        lines = (f"{self.seconds:.1f} s, {self.gained or f'{self.seconds / max(1, self.steps):.2f} s a step'}", how)
        why = f"not in patches: {self.reason}" if self.exact_calls is None and self.reason else None
        return (*lines, *filter(None, (why, self.cache)), *self.notes)

    def __str__(self) -> str:
        busy, waited, under_way = (
            sum(getattr(rank, name) for rank in self.ranks)
            for name in ("compute_seconds", "wait_seconds", "transfer_seconds")
        )
        moved = ", ".join(f"{axis} {count / 1e6:.1f} MB" for axis, count in self.bytes_sent.items()) or "nothing"
        lines = [
            str(self.degrees),
            *self.shown,
            f"moved between ranks: {moved} ({sum(self.bytes_sent.values()) / max(1, self.steps) / 1e6:.2f} MB per step)",
        ]
        if under_way:
            blocked = waited / max(1e-9, waited + busy)
            lines.append(
                f"blocked in transfers: {100 * blocked:.0f} % of the ranks' working time; "
                f"{100 * (1 - waited / under_way):.0f} % of the transfers' time was hidden behind computing"
            )
        if streamed := sum(rank.streamed_bytes for rank in self.ranks):
            waited = sum(rank.streaming_wait_seconds for rank in self.ranks)
            share = 100 * waited / max(1e-9, waited + busy)
            each = streamed / max(1, self.steps)
            lines.append(
                f"weights streamed from host memory: {streamed / 1e9:.2f} GB ({each / 1e9:.2f} GB per step), "
                f"waited for {waited:.2f} s, {share:.0f} % of the ranks' time but for transfers"
            )
        if graphs := max((rank.graphs for rank in self.ranks), default=0):
            lines.append(
                f"compiled: {graphs} graphs on a rank since the model was loaded; new ones are part of this run's time"
            )
        if replayed := sum(rank.replayed for rank in self.ranks):
            steps = sum(rank.micro_steps for rank in self.ranks)
            lines.append(f"CUDA graphs: {replayed} of {steps} micro-steps on all ranks were replays")
        lines += [f"CUDA graphs: none, because {why}" for why in sorted({rank.without_graphs for rank in self.ranks} - {""})]
        if attention := sorted({rank.attention for rank in self.ranks if rank.attention}):
            lines.append(f"attention: {'; '.join(attention)}")
        lines += [f"weights: {arithmetic}" for arithmetic in sorted({rank.arithmetic for rank in self.ranks} - {""})]
        lines += [
            f"rank {rank.rank}: {rank.micro_steps} micro-steps, computing {rank.compute_seconds:.2f} s, "
            f"K/V buffers {rank.buffer_bytes / 1e6:.1f} MB, peak memory {rank.peak_bytes / 1e9:.2f} GB"
            for rank in self.ranks
        ]
        return "\n".join(lines)
