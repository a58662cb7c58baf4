"""What runs on the strict transport: every mode and product, and what happens to a run from outside."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.client.call import ModelCall
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands, sample_whole
from parallel_backend.core.degrees import AXES, Degrees
from parallel_backend.wire import messages as m
from testing import mini
from testing.models import Cancelled, nobody, on_ranks
from testing.vaes import OnRanks, made_of, small_vae

CONFIG = mini.CONFIG | {"double_blocks": 1, "single_blocks": 3}
"""A block for each of four stages."""

Load = Callable[..., RemoteTransformer]


@dataclass
class Files:
    """Tiny models in a folder, made when first asked for."""

    folder: Path
    _made: dict[str, Checkpoint] = field(default_factory=dict)

    def mini(self, config: dict[str, Any] = CONFIG) -> Checkpoint:
        def make(path: Path) -> Checkpoint:
            return mini.opened(mini.save(mini.random_model(config), path))

        return self._get(f"mini of {config['double_blocks']} and {config['single_blocks']} blocks", make)

    def _get(self, name: str, make: Callable[[Path], Checkpoint]) -> Checkpoint:
        if name not in self._made:
            self._made[name] = make(self.folder / f"{name}.safetensors")
        return self._made[name]


@dataclass(frozen=True)
class Case:
    """`run(files, load, pool)` gives what is compared. `load(checkpoint, degrees)`: the model on the ranks of `pool`, which
    are as many as `degrees` has. `rare`: it is about loading or ending, and takes far longer than the others."""

    name: str
    run: Callable[[Files, Load, Callable[[int], object]], list[torch.Tensor]]
    rare: bool = False


def name(degrees: Degrees) -> str:
    return "-".join(f"{axis}{size}" for axis, size in zip(AXES, degrees.sizes, strict=True) if size > 1)


PRODUCTS = [
    Degrees(*sizes, patch_mode="displaced")
    for world in (2, 4)
    for sizes in itertools.product((1, 2, 4), repeat=len(AXES))
    if math.prod(sizes) == world and 1 in (sizes[AXES.index("pipe")], sizes[AXES.index("patch")])
]
"""All of axes at 2 and 4 ranks."""


def product(degrees: Degrees, config: dict[str, Any] = CONFIG) -> Case:
    """An exact call of odd size, and a run whose bands or patches use old keys, with receives posted early."""

    def run(files: Files, load: Load, _pool: object) -> list[torch.Tensor]:
        model = load(files.mini(config), degrees)
        given = mini.inputs(config, height=9, width=10, text=5)
        height = 10 * max(1, degrees.world // 4)  # each band has a token for each rank
        return [model.predict(ModelCall(*given), nobody), _sampled(model, height=height, width=8)]

    return Case(f"product {name(degrees)}", run)


def _sampled(model: RemoteTransformer, poll: Callable[[], None] = nobody, **size: int) -> torch.Tensor:
    noise, _, tensors = mini.inputs(CONFIG, batch=1, text=5, **size)
    bands, steps = (1, 4) if model.degrees.displaced else (3, 2)  # a patch's keys arrive a call after they were sent
    return sample_in_bands(model, noise, linear_sigmas(steps), Prompt(tensors, tensors, 1.0), bands, 1, poll)[0]


def naive() -> Case:
    degrees = Degrees(patch=2, patch_mode="naive")

    def run(files: Files, load: Load, _pool: object) -> list[torch.Tensor]:
        noise, _, tensors = mini.inputs(CONFIG, batch=1, height=10, width=8)
        return [sample_whole(load(files.mini(), degrees), noise, linear_sigmas(2), Prompt(tensors, tensors, 1.0))]

    return Case("naive patches", run)


def packed(kind: str) -> Case:
    """Ulysses in one byte a value."""
    degrees = Degrees(ulysses=2)

    def run(files: Files, load: Load, _pool: object) -> list[torch.Tensor]:
        model = load(files.mini(), degrees, transfer_dtype=kind)
        return [model.predict(ModelCall(*mini.inputs(CONFIG, height=9, width=10, text=5)), nobody)]

    return Case(f"transfers in {kind}", run)


def changes() -> Case:
    """Displaced patches that send what changed."""

    def run(files: Files, load: Load, _pool: object) -> list[torch.Tensor]:
        model = load(files.mini(), Degrees(patch=2, patch_mode="displaced"), transfer_dtype="residual")
        return [_sampled(model, height=10, width=8)]

    return Case("transfers of changes", run)


def without_overlap(degrees: Degrees) -> Case:
    def run(files: Files, load: Load, _pool: object) -> list[torch.Tensor]:
        noise, _, tensors = mini.inputs(CONFIG, batch=1, height=10, width=8)
        prompt, bands = Prompt(tensors, tensors, 1.0), 1 if degrees.displaced else 3
        model = load(files.mini(), degrees)
        return [sample_in_bands(model, noise, linear_sigmas(3), prompt, bands, 1, overlap=False)[0]]

    return Case(f"without overlap {name(degrees)}", run)


def vae(ranks: int) -> Case:
    """Bands between the calls of a model whose stages still send; then tiles, and the encoder."""

    def run(files: Files, load: Load, pool: Callable[[int], object]) -> list[torch.Tensor]:
        sizes, generator = ((1, 4, 6, 3), (5, 4, 4, 4), (1, 3, 40, 12)), torch.Generator().manual_seed(1)
        x, tiles, pixels = (torch.randn(size, generator=generator) for size in sizes)
        model, given, found = load(files.mini(), Degrees(pipe=ranks)), mini.inputs(CONFIG), []
        decoder = OnRanks(pool(ranks), "vae", lambda: made_of(small_vae()))
        for _ in range(2):
            found += [model.predict(ModelCall(*given), nobody), decoder.run(x, nobody)]
        found += decoder.remote.run_tiles([tiles, 2 * tiles], nobody)
        encoder = OnRanks(pool(ranks), "encoder", lambda: made_of(small_vae(), "encoder"), "encoder")
        return [*found, encoder.run(pixels, nobody)]

    return Case(f"VAE bands on {ranks}", run)


def cancelled(degrees: Degrees) -> Case:
    """A run that is given up in the middle, then a call, a picture and another model on the same ranks."""

    def run(files: Files, load: Load, pool: Callable[[int], object]) -> list[torch.Tensor]:
        model, polls = load(files.mini(), degrees), itertools.count()

        def cancel() -> None:
            if next(polls) == 1:
                raise Cancelled

        with contextlib.suppress(Cancelled):
            while True:
                _sampled(model, cancel, height=16, width=12)
        given = mini.inputs(CONFIG, height=9, width=10, text=5)
        found = [model.predict(ModelCall(*given), nobody)]
        with contextlib.suppress(Cancelled):
            while True:
                _sampled(model, cancel_at_once, height=16, width=12)
        again = load(files.mini(), Degrees(ulysses=degrees.world))
        return [*found, again.predict(ModelCall(*given), nobody)]

    return Case(f"cancel {name(degrees)}", run)


def cancel_at_once() -> None:
    raise Cancelled


def together(degrees: Degrees) -> Case:
    """A call that is posted before the one before it has ended, as for prompts of different length."""

    def run(files: Files, load: Load, _pool: object) -> list[torch.Tensor]:
        model = load(files.mini(), degrees)
        one, two = (mini.inputs(CONFIG, batch=1, height=9, width=10, text=text, seed=text) for text in (5, 8))
        found: list[torch.Tensor] = []
        second = ModelCall(*two, first_replica=1)
        first = model.predict(ModelCall(*one), nobody, on_posted=lambda: found.append(model.predict(second, nobody)))
        return [first, *found]

    return Case(f"two calls at once {name(degrees)}", run)


def other_degrees(first: Degrees, *others: Degrees) -> Case:
    """Load, unload and load another cut, on the same ranks."""

    def run(files: Files, load: Load, pool: Callable[[int], object]) -> list[torch.Tensor]:
        given, found = mini.inputs(CONFIG, height=9, width=10, text=5), []
        for degrees in (first, *others, first):
            found.append(load(files.mini(), degrees).predict(ModelCall(*given), nobody))
            pool(first.world).ask(m.Unload(), m.Unloaded).result(timeout=60)
        return found

    return Case(f"unload and load {name(first)}", run, rare=True)


def two_models(first: Degrees, second: Degrees) -> Case:
    """Two models on the same ranks: a call of each at once, then runs of both at the same time, then one is unloaded."""

    def run(files: Files, load: Load, pool: Callable[[int], object]) -> list[torch.Tensor]:
        one, found = load(files.mini(), first), []
        two = on_ranks(pool(first.world), files.mini(), second, "fp32", "sdpa", nobody, keep_others=True)
        given = mini.inputs(CONFIG, height=9, width=10, text=5)
        call = ModelCall(*given)
        found.append(one.predict(call, nobody, on_posted=lambda: found.append(two.predict(call, nobody))))
        with ThreadPoolExecutor(2) as threads:
            found += threads.map(lambda model: _sampled(model, height=10, width=8), (one, two))
        two.unload().result(timeout=60)
        return [*found, one.predict(ModelCall(*given), nobody)]

    return Case(f"{name(second)} beside {name(first)}", run)


def links(ranks: int) -> Case:
    """Parallel Doctor's own transfers. Their times are nothing to compare."""

    def run(_files: Files, _load: Load, pool: Callable[[int], object]) -> list[torch.Tensor]:
        found = pool(ranks).ask(m.ProbeLinks((1024, 4096)), m.LinksProbed).result(timeout=60)
        return [torch.tensor([sorted(probed.links) for probed in found[:1]])]

    return Case(f"links of {ranks}", run)


def all_of_them() -> Iterator[Case]:
    yield from map(product, PRODUCTS)
    yield naive()
    for degrees in (Degrees(ring=3), Degrees(ulysses=3), Degrees(tensor=3)):
        yield product(degrees)
    yield from map(packed, ("int8", "fp8"))
    yield changes()
    yield from map(without_overlap, (Degrees(pipe=2), Degrees(patch=2, patch_mode="displaced"), Degrees(pipe=2, ulysses=2)))
    yield from map(vae, (2, 4))
    displaced = Degrees(patch=2, patch_mode="displaced")
    yield from map(cancelled, (Degrees(pipe=2), displaced, Degrees(pipe=4), Degrees(pipe=2, ulysses=2)))
    yield from map(together, (Degrees(pipe=2), Degrees(batch=2, pipe=2), Degrees(ulysses=2, tensor=2)))
    yield other_degrees(Degrees(pipe=2), Degrees(ulysses=2), Degrees(patch=2, patch_mode="displaced"))
    yield other_degrees(Degrees(pipe=4), Degrees(pipe=2, tensor=2), Degrees(ring=2, ulysses=2), Degrees(batch=4))
    yield two_models(Degrees(pipe=2), Degrees(pipe=2))
    yield two_models(Degrees(patch=2, ulysses=2, patch_mode="displaced"), Degrees(pipe=2, tensor=2))
    yield two_models(Degrees(batch=2, pipe=2), Degrees(ring=2, ulysses=2))
    yield from map(links, (2, 4))
