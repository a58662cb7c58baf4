"""Tries published models and makes their plans. Run by serve.py.

A plan is tried at the model's own widths, with a batch of two. That another batch, degree or depth changes nothing is tried
with a narrower copy, or as it is if there is none.
"""

import dataclasses
import importlib
import json
import logging
import math
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import comfy.nested_tensor
import comfy.supported_models
from boot import BASE, Results, ksampler, nodes, parallel, torch
from native_files import native_shapes, write_hole
from plan_json import lists_of, to_json
from published import PUBLISHED, Published

from parallel_backend.core.own_class import OwnBlock, OwnClass
from parallel_backend.own_class.built.building import build
from parallel_backend.own_class.calls.tried_calls import Call
from parallel_backend.own_class.plans.block_order import block_lists
from parallel_backend.own_class.plans.plan import Plan, key_of, path_of, without
from parallel_backend.own_class.plans.proof import NOT_TRIED, Proof
from parallel_backend.own_class.trials.short_model import narrowed
from parallel_backend.own_class.trials.trial import trial

NODES = nodes.NODE_CLASS_MAPPINGS["ParallelDiTLoader"].__module__.rpartition(".")[0]
own_calls, proofs, prepared_call, class_code = (
    importlib.import_module(f"{NODES}.model.{name}")
    for name in ("call.own_calls", "call.proofs", "call.prepared_call", "loading.class_code")
)
log = logging.getLogger(__name__)

DEPTH = re.compile(r"depth|layers|blocks")
MORE_BLOCKS = 2
ANY_BATCH = {1, 2, 3}
"""If a proof holds for each of them, it holds for a batch of any number of entries."""
Sizes = tuple[int, ...]


class Captured(Exception):
    """Ends a run whose call has come to the class."""


def main(results: Results, name: str) -> None:
    results.case(name, lambda: plans_of(name, PUBLISHED[name]))


def plans_of(name: str, published: Published) -> dict[str, Any]:
    """The file's name and key, and the plans as JSON."""
    model, call, sizes = captured(name, published)
    own, times = model.model.diffusion_model.setup.own_class, own_calls.times_of(model.model.model_sampling)
    making = Making(name, own, call, sizes, times)
    plans = [to_json(plan) for plan in making.plans()]
    return {"file": path_of(own).name, "key": key_of(own, class_code.code_digest(making.code)), "plans": plans}


def captured(name: str, published: Published) -> tuple[Any, Call, Sizes]:
    """A MODEL by the class, the call that a sampler makes of it, and the latent's sizes."""
    path = BASE / "models" / "diffusion_models" / f"{name}.safetensors"
    kind = getattr(comfy.supported_models, published.kind)
    write_hole(path, native_shapes(kind, published.arguments), dict(published.header))
    model = parallel(path.name)
    calls: list[tuple[Call, Sizes]] = []
    assert type(model.model.model_config) is kind, f"{name} is taken for {type(model.model.model_config).__name__}"

    def note(_stub: Any, call: Call, sizes: Sizes) -> None:
        calls.append((call, sizes))
        raise Captured

    latents = [torch.zeros(1, *shape) for shape in published.latents]
    latent = {"samples": latents[0] if len(latents) == 1 else comfy.nested_tensor.NestedTensor(tuple(latents))}
    prompts = [[[torch.randn(1, *published.text), dict(entries(published.more))]] for _ in range(2)]
    try:
        with patch.object(prepared_call, "proven", note):
            ksampler(model, prompts, latent, steps=2, cfg=published.cfg)
    except Captured:
        pass
    finally:
        path.unlink()
    return model, *calls[0]


def entries(more: Any) -> Iterator[tuple[str, Any]]:
    """Entries of a conditioning, see Published."""
    for name, shape in more.items():
        if isinstance(shape, dict):
            value: Any = torch.ones(1, *shape["ones"], dtype=torch.long) if "ones" in shape else shape["is"]
        elif isinstance(shape, list):
            value = [torch.randn(1, *each) for each in shape]
        else:
            value = torch.randn(1, *shape)
        name, _, attribute = name.partition(".")
        yield name, SimpleNamespace(**{attribute: value}) if attribute else value


class Making:
    """Plans of one class for the calls like `call`, of the batch that it has."""

    def __init__(self, name: str, own: OwnClass, call: Call, sizes: Sizes, times: tuple[float, ...]):
        self.name, self.own, self.call, self.sizes, self.times = name, own, call, sizes, times
        self.entries = len(call.x)
        self.code = class_code.class_code(own, helpers=False)

    def plans(self) -> Iterator[Plan]:
        proof = self.tried(True, True, 2)
        whole = {block.name.rpartition(".")[0] for block in proof.blocks}
        if set(block_lists(build(self.own))) - whole:
            lone = self.tried(False, False, 2)
            if len(lone.blocks) > len(proof.blocks):
                yield self.plan(lone, False)
        if not proof.tensor and (proof.sequence or proof.latent is None) and not Like(self, uncut(proof), True, 1).holds():
            yield self.plan(self.tried(True, True, 1), True)  # more is proven without tensor parallelism
        yield self.plan(proof, True)

    def tried(self, sequence: bool, bands: bool, tensor: int) -> Proof:
        return trial(self.own, self.call, self.times, sequence=sequence, bands=bands, tensor=tensor)

    def plan(self, proof: Proof, cut: bool) -> Plan:
        by_tensor = not proof.tensor
        depths = depths_of(self.own)
        like = Like(self, proof, cut, 2 if by_tensor else 1)
        found = like.allowed(entries=3, more=depths, tensor=4) | like.allowed(entries=1)
        batches = {self.entries, *(value for name, value in found if name == "entries")}
        degrees = {1, 2, *(value for name, value in found if name == "tensor")} if by_tensor else {1}
        depths = depths if ("more", depths) in found else ()
        asked = own_calls.asked(self.call, self.sizes, self.times, cut, cut, 1)
        numbers = {name: float(value) for name, value in asked.numbers.items() if name not in proof.numbers}
        return Plan(
            name=self.name,
            kind=self.own.kind,
            arguments=without(class_code.deciding_arguments(self.own, self.code), depths),
            depths=depths,
            form=asked.form,
            options=tuple(sorted(asked.options)),
            times=asked.times,
            entries=() if batches == ANY_BATCH else tuple(sorted(batches)),
            tensor=tuple(sorted(degrees)),
            numbers=tuple(numbers.items()),
            lists=lists_of(proof.blocks),
            proof=dataclasses.replace(proof, blocks=()),
        )


class Like:
    """Whether a narrower copy, or else the class itself, has the same proof. `tensor`: the degree that it is for."""

    def __init__(self, making: Making, proof: Proof, cut: bool, tensor: int):
        self.making, self.proof, self.cut, self.tensor = making, proof, cut, tensor

    def allowed(self, **changes: Any) -> set[tuple[str, Any]]:
        """Those of the changes, arguments of `holds`, that change nothing: all at once, or the first of them."""
        if self.tensor == 1:
            changes.pop("tensor", None)
        while changes and not self.holds(**changes):
            changes.popitem()
        return set(changes.items())

    def holds(self, entries: int = 0, more: tuple[str, ...] = (), tensor: int = 0) -> bool:
        """For a batch of so many entries, more blocks by these arguments, and this degree."""
        making, tensor = self.making, tensor or self.tensor
        arguments = json.loads(making.own.arguments)
        arguments |= {name: arguments[name] + MORE_BLOCKS for name in more}
        own = dataclasses.replace(making.own, arguments=json.dumps(arguments))
        call = of_batch(making.call, entries) if entries else making.call
        for narrow, of_narrow, _ in (*narrowed(own, call, tensor), (own, call, 1)):
            try:
                found = trial(narrow, of_narrow, making.times, sequence=self.cut, bands=self.cut, tensor=tensor)
            except Exception as error:  # of any kind: the class's code, which may count on its own widths
                log.info("%s, narrower: %s", making.name, error)
                continue
            return form_of(found, entries) == form_of(self.proof, entries)
        return False


def uncut(proof: Proof) -> Proof:
    """The proof without tensor parallelism."""
    blocks = tuple(dataclasses.replace(block, cuts=(), divided=()) for block in proof.blocks)
    return dataclasses.replace(proof, blocks=blocks, tensor=NOT_TRIED)


def form_of(proof: Proof, entries: int) -> Any:
    """What two proofs have in common if widths and depths alone differ. Of one entry a batch says nothing."""
    lists = [(each.name, tuple(map(without_widths, each.blocks))) for each in lists_of(proof.blocks)]
    others = dataclasses.replace(proof, blocks=(), batch="" if entries == 1 else proof.batch)
    return lists, others


def without_widths(block: OwnBlock) -> OwnBlock:
    attention = tuple(dataclasses.replace(each, heads=1) for each in block.attention)
    cuts = tuple(
        dataclasses.replace(cut, sizes=tuple(size // math.gcd(*cut.sizes) for size in cut.sizes)) for cut in block.cuts
    )
    return dataclasses.replace(block, attention=attention, cuts=cuts)


def of_batch(call: Call, entries: int) -> Call:
    """The call with its first entry so many times."""
    batch = len(call.x)

    def repeated(value: torch.Tensor) -> torch.Tensor:
        own = value.ndim > 0 and len(value) == batch
        return value[:1].expand(entries, *value.shape[1:]) if own else value

    named, options = (
        torch.utils._pytree.tree_map_only(torch.Tensor, repeated, dict(each)) for each in (call.named, call.options)
    )
    return dataclasses.replace(call, x=repeated(call.x), timestep=repeated(call.timestep), named=named, options=options)


def depths_of(own: OwnClass) -> tuple[str, ...]:
    """Arguments of the constructor that change how many blocks its lists have, and no other tensor."""
    arguments = json.loads(own.arguments)
    whole = built_form(own, {})
    found = []
    for name, value in arguments.items():
        if type(value) is int and value > 1 and DEPTH.search(name):
            try:
                changed = built_form(own, {name: value + 1})
            except Exception as error:  # of any kind: the class's code
                log.info("%s: %s", name, error)
                continue
            if changed == whole:
                found.append(name)
    return tuple(found)


def built_form(own: OwnClass, changes: dict[str, int]) -> Any:
    """Shapes of the tensors outside of the lists of blocks, and of those in each list's blocks."""
    model = build(dataclasses.replace(own, arguments=json.dumps(json.loads(own.arguments) | changes)))
    shapes = {name: tuple(each.shape) for name, each in model.state_dict().items()}
    lists = block_lists(model)
    of: Callable[[str], frozenset] = lambda block: frozenset(  # noqa: E731
        (name.removeprefix(f"{block}."), shape) for name, shape in shapes.items() if name.startswith(f"{block}.")
    )
    outside = {name: shape for name, shape in shapes.items() if not name.startswith(tuple(f"{each}." for each in lists))}
    return outside, {name: {of(block) for block in blocks} for name, blocks in lists.items()}
