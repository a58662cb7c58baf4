"""What a model gives that is alone on its ranks, with nothing before it: the reference of every output."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from parallel_backend.client.call import ModelCall, PostedCall, TokenLayout
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import sample_in_bands
from parallel_backend.core.spans import Span
from parallel_backend.processes.pool import Pool
from testing.models import nobody, on_ranks

from .subjects import BANDS, SIGMAS, TIMES, Added, Given, Subject

Tensors = tuple[torch.Tensor, ...]


def exact(model: RemoteTransformer, subject: Subject, given: Given, time: float) -> Tensors:
    return (model.predict(subject.call(given, time), nobody),)


def banded(model: RemoteTransformer, subject: Subject, given: Given) -> Tensors:
    """A sampling run in bands."""
    return (sample_in_bands(model, subject.latent(), SIGMAS, subject.prompt(given), BANDS, 1, nobody)[0],)


def in_run(model: RemoteTransformer, subject: Subject, given: Given, run: int, number: int) -> Tensors:
    """The run's call of this number: the first one of the whole latent, then in two bands with the run's keys."""
    call: ModelCall = subject.call(given, TIMES[number])
    latent, patching = subject.latent(), model.built.patching
    conditioning = model.conditioning(call, TokenLayout(patching.grid(tuple(latent.shape))))
    rows = latent.shape[patching.band_dim] // patching.band_size
    cuts = [Span(0, rows)] if number == 0 else [Span(0, rows // 2), Span(rows // 2, rows)]
    posted = []
    for cut in cuts:
        span = Span(cut.start * patching.band_size, cut.stop * patching.band_size)
        tokens, part = conditioning.token_order.of_rows(cut), patching.pack(patching.rows(latent, span))
        posted.append(PostedCall(part, call.timestep, conditioning, tokens, with_text=not cut.start, run=run))
        model.post(posted[-1])
    return tuple(each.future.result(timeout=60) for each in posted)


@dataclass
class Alone:
    """`pool`: ranks that hold one model at a time, each loaded for one reference."""

    pool: Pool
    _known: dict[Any, Any] = field(default_factory=dict)

    def exact(self, subject: Subject, added: Added, given: Given, time: float) -> Tensors:
        def all_times(model: RemoteTransformer) -> dict[float, Tensors]:
            return {time: exact(model, subject, given, time) for time in TIMES}

        return self._of("exact", subject, added, given, all_times)[time]

    def banded(self, subject: Subject, added: Added, given: Given) -> Tensors:
        return self._of("banded", subject, added, given, lambda model: banded(model, subject, given))

    def in_run(self, subject: Subject, added: Added, given: Given, number: int) -> Tensors:
        def whole_run(model: RemoteTransformer) -> list[Tensors]:
            run = model.open_run()
            return [in_run(model, subject, given, run, number) for number in range(len(TIMES))]

        return self._of("in a run", subject, added, given, whole_run)[number]

    def _of(self, what: str, subject: Subject, added: Added, given: Given, make: Callable[[RemoteTransformer], Any]) -> Any:
        key = what, subject, added, given
        if key not in self._known:
            model = on_ranks(self.pool, subject.opened(), subject.degrees, "fp32", "sdpa", nobody)
            model.adapt(added.name, subject.deltas(added), nobody, added.strengths)
            self._known[key] = make(model)
        return self._known[key]
