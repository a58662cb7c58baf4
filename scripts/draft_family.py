"""A draft of a family from a model's file and the class that computes it. See docs/adding-a-family.md.

    python scripts/draft_family.py FILE --class AuraFlowTransformer2DModel --settings '{"num_mmdit_layers": 4}' \\
        --comfyui PATH --native AuraFlow

FILE: a safetensors or GGUF file in the original layout, of which the header alone is read. --class: one of diffusers, or
MODULE:CLASS. --settings: its constructor's arguments, as JSON. --comfyui and --native: a checkout of ComfyUI, and the
class in its supported_models. With both, the draft names what ComfyUI gives the model. Prints Python to start from, and
then what is still missing.

Modules are matched by the shapes of their tensors and by the words of their names. Where another module would do nearly as
well, a comment says that it is a guess: read the forward of both classes. A name may mislead, too: the norms of HunyuanDiT
have one another's numbers in the two layouts. Whether a draft is right, a Case in testing/cases shows.
"""

import argparse
import importlib
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from parallel_backend.checkpoints.single_file import prefix_of  # noqa: E402
from parallel_backend.checkpoints.tensor_files import read_header  # noqa: E402
from testing.comfyui.host_names import Source  # noqa: E402

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
Module = Mapping[str, Shape]
"""Parameters of one module, by the last part of their names."""

UNSURE = 0.15
"""A module that fits almost as well by its name makes the match a guess."""

WORDS = {
    **dict.fromkeys(("txt", "context", "encoder", "add", "added", "caption", "cap", "c", "y", "cond", "text"), "text"),
    **dict.fromkeys(("img", "x", "image", "hidden", "latent", "patch"), "image"),
    **dict.fromkeys(("mlp", "ff", "feed", "ffn", "feedforward"), "mlp"),
    **dict.fromkeys(("adaln", "ada", "adanorm", "mod", "modulation", "modulated"), "mod"),
    **dict.fromkeys(("attn", "attention"), "attn"),
    **dict.fromkeys(("o", "wo", "out", "output", "proj", "final", "last"), "out"),
    **dict.fromkeys(("t", "time", "timestep", "temb", "timesteps"), "time"),
    **dict.fromkeys(("embedder", "embed", "emb", "embedding", "in", "linear", "lin"), "embed"),
    **dict.fromkeys(("q", "query", "wq"), "q"),
    **dict.fromkeys(("k", "key", "wk"), "k"),
    **dict.fromkeys(("v", "value", "wv"), "v"),
    **dict.fromkeys(("norm", "ln", "rms", "layernorm"), "norm"),
}
"""Words that mean the same in different classes' names."""

SEVERAL = {
    "qkv": ("q", "k", "v"),
    "wqkv": ("q", "k", "v"),
    "kv": ("k", "v"),
    "qnorm": ("q", "norm"),
    "knorm": ("k", "norm"),
    "prenorm": ("norm", "1"),
    "postnorm": ("norm", "2"),
    "attn1": ("attn", "self"),
    "attn2": ("attn", "cross"),
    "first": ("image", "embed"),
    "qknorm": (),
    "to": (),
}
"""Words that are several, or say nothing."""

ADDED = ("bias", "beta", "shift")
"""Names of what a layer or a norm adds, beside what it multiplies with, which may have the same shape."""

ATTENTION = {"q", "k", "v"}
OPPOSED = (ATTENTION, {"text"}, {"mod"}, {"mlp"})
"""What a module is for: a word of them in one name alone speaks against a match."""


@dataclass
class Matched:
    """What one part of the class (a block list's blocks, or what is outside of all lists) has in the file."""

    target: str
    """Block list of the class, "" outside."""

    source: str
    """Block list of the file, "" outside."""

    blocks: tuple[int, ...] = ()
    """Blocks of the list that have these parameters. Others of the list are a part of their own."""

    modules: dict[str, str] = field(default_factory=dict)
    """Module of the class -> the file's."""

    splits: dict[str, list[str]] = field(default_factory=dict)
    """Module of the file -> the class's modules that its rows are of, in order."""

    guessed: set[str] = field(default_factory=set)
    """Modules of the class for which another module would have fitted as well."""

    missing: list[str] = field(default_factory=list)
    """Modules of the class that nothing in the file fits."""

    left: list[str] = field(default_factory=list)
    """Modules of the file that are used nowhere."""

    def names(self) -> Iterator[tuple[str, str]]:
        """Every module of the class in this part with its module in the file, both with their whole names."""
        pairs = [*self.modules.items(), *((part, whole) for whole, parts in self.splits.items() for part in parts)]
        if not self.target:
            yield from pairs
        for block in self.blocks:
            yield from ((f"{self.target}.{block}.{ours}", f"{self.source}.{block}.{theirs}") for ours, theirs in pairs)


@cache
def words(*names: str) -> Mapping[str, float]:
    """Names of modules in words of one meaning, with weights: the last two parts of a name say most."""
    found: dict[str, float] = {}
    for name in names:
        parts = name.split(".")
        for place, part in enumerate(reversed(parts)):
            for word in split_words(part):
                weight = 0.25 if word.isdigit() else 1.0 if place < 2 else 0.5
                found[word] = max(found.get(word, 0), weight)
    return {word: weight for word, weight in found.items() if word != "out" or not ATTENTION & found.keys()}


def split_words(part: str) -> Iterator[str]:
    for word in re.findall(r"attn[12]|[a-z]+|[0-9]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", part).lower()):
        if word in SEVERAL:
            yield from SEVERAL[word]
        else:
            yield WORDS.get(word, word)


def likeness(targets: Iterable[str], source: str) -> float:
    """How much modules' names say what another's says: 1 for equal names, near 0 for names without a word in common."""
    ours, theirs = words(*targets), words(source)
    shared = sum(min(ours[word], theirs[word]) for word in ours.keys() & theirs.keys())
    spelling = SequenceMatcher(None, min(targets), source).ratio()
    opposed = sum(bool(one & ours.keys()) != bool(one & theirs.keys()) for one in OPPOSED)
    return 2 * shared / (sum(ours.values()) + sum(theirs.values()) or 1) - 0.2 * opposed + 0.02 * spelling


def modules_of(shapes: Shapes) -> dict[str, dict[str, Shape]]:
    """Parameters grouped by their modules, in order."""
    found: dict[str, dict[str, Shape]] = defaultdict(dict)
    for name, shape in shapes.items():
        module, _, parameter = name.rpartition(".")
        found[module or name][parameter if module else ""] = shape
    return dict(found)


def block_lists(shapes: Shapes) -> dict[str, dict[int, dict[str, Shape]]]:
    """Lists of modules whose members are alike: name -> index -> parameters. The outermost of lists in lists."""
    lists: dict[str, dict[int, dict[str, Shape]]] = defaultdict(lambda: defaultdict(dict))
    for name, shape in shapes.items():
        if found := re.match(r"(.*?)\.(\d+)\.(.+)", name):
            lists[found[1]][int(found[2])][found[3]] = shape
    return {
        name: dict(members)
        for name, members in lists.items()
        if len(members) > 1 and all(len(member) > 4 for member in members.values())
    }


def size(shapes: Shapes) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def total(blocks: Mapping[int, Shapes]) -> int:
    return sum(size(block) for block in blocks.values())


def paired_lists(ours: Mapping, theirs: Mapping) -> Iterator[tuple[str, str]]:
    """Block lists of the class and the file that have as many blocks of nearly the same size, the likest first."""
    fits = [
        (abs(total(a) - total(b)) / total(a), -likeness([target], source), target, source)
        for target, a in ours.items()
        for source, b in theirs.items()
        if len(a) == len(b)
    ]
    done: set[tuple[str, str]] = set()
    for distance, _, target, source in sorted(fits):
        if distance < 0.2 and not any(target == pair[0] or source == pair[1] for pair in done):
            done.add((target, source))
            yield target, source


def same_values(target: Module, source: Module) -> bool:
    """Whether the module's tensors fit, whatever they are called. A table may be one vector in the file."""
    if len(target) == len(source) == 1 and len(next(iter(source.values()))) == 1:
        return size(target) == size(source)
    return sorted(target.values()) == sorted(source.values())


def is_rows_of(parts: list[Module], whole: Module) -> bool:
    """Whether the modules behind one another are the rows of another."""
    return all(part.keys() == whole.keys() for part in parts) and all(
        len({part[name][1:] for part in parts} | {whole[name][1:]}) == 1
        and sum(part[name][0] for part in parts) == whole[name][0]
        for name in whole
    )


def match(ours: Shapes, theirs: Shapes, result: Matched) -> Matched:
    """Which of the file's modules each of the class's modules is: those whose names say most of the same come first."""
    free, unmatched = modules_of(theirs), modules_of(ours)
    fits = sorted(candidates(unmatched, free), key=lambda fit: (-fit.likeness, fit.distance))
    for fit in fits:
        if fit.source not in free or not all(part in unmatched for part in fit.targets):
            continue
        rivals = [other for other in fits if other.targets == fit.targets and other.source != fit.source]
        if any(other.likeness > fit.likeness - UNSURE for other in rivals):
            result.guessed.update(fit.targets)
        if len(fit.targets) == 1:
            result.modules[fit.targets[0]] = fit.source
        else:
            result.splits[fit.source] = list(fit.targets)
        del free[fit.source]
        for part in fit.targets:
            del unmatched[part]
    result.missing, result.left = list(unmatched), list(free)
    return result


@dataclass(frozen=True)
class Fit:
    """Modules of the class, one behind the other, that a module of the file may hold."""

    targets: tuple[str, ...]
    source: str
    likeness: float
    distance: float
    """How far apart the two stand in their parts, 0 to 1."""


def candidates(ours: Mapping[str, Module], theirs: Mapping[str, Module]) -> Iterator[Fit]:
    places = {name: place / len(ours) for place, name in enumerate(ours)}
    for other_place, (source, whole) in enumerate(theirs.items()):
        for targets in [*((name,) for name in ours if same_values(ours[name], whole)), *runs(ours, whole)]:
            distance = abs(places[targets[0]] - other_place / len(theirs))
            yield Fit(targets, source, likeness(targets, source), distance)


def runs(modules: Mapping[str, Module], whole: Module) -> Iterator[tuple[str, ...]]:
    """Two to four modules that are the rows of `whole`, one behind the other: queries, keys and values, with the
    feed-forward's first layer behind them where one layer makes all of it."""
    names = [name for name, parameters in modules.items() if parameters.keys() == whole.keys()]
    for length in (2, 3, 4):
        for start in range(len(names) - length + 1):
            run = names[start : start + length]
            wider = [[*run, name] for name in names if length == 3 and name not in run and "mlp" in words(name)]
            for parts in (run, *wider):
                if is_rows_of([modules[name] for name in parts], whole):
                    yield tuple(parts)


def draft(ours: Shapes, theirs: Shapes) -> list[Matched]:
    """Every part of the class with what the file has of it. ours: the class's parameters; theirs: the file's tensors."""
    lists, others = block_lists(ours), block_lists(theirs)
    pairs = list(paired_lists(lists, others))
    outside = [
        {name: shape for name, shape in shapes.items() if not is_inside(name, [pair[side] for pair in pairs])}
        for side, shapes in enumerate((ours, theirs))
    ]
    found = [match(*outside, Matched("", ""))]
    for target, source in pairs:
        for blocks in alike(lists[target], others[source]):
            first = lists[target][blocks[0]], others[source][blocks[0]]
            found.append(match(*first, Matched(target, source, blocks)))
    return found


def alike(ours: Mapping[int, Shapes], theirs: Mapping[int, Shapes]) -> list[tuple[int, ...]]:
    """Indices of blocks with the same parameters in both layouts, the largest group first."""
    groups: dict[str, list[int]] = defaultdict(list)
    for index in sorted(ours.keys() & theirs.keys()):
        groups[repr((sorted(ours[index].items()), sorted(theirs[index].items())))].append(index)
    return sorted(map(tuple, groups.values()), key=len, reverse=True)


def is_inside(name: str, lists: list[str]) -> bool:
    return any(re.match(rf"{re.escape(one)}\.\d+\.", name) for one in lists)


def cuts(block: Shapes) -> dict[str, str]:
    """How tensor parallelism cuts a block's layers: layer -> the name in base/tensor_plan.py, "?" where nothing tells."""
    weights = {name: own["weight"] for name, own in modules_of(block).items() if "weight" in own}
    queries = {
        name.rpartition(".")[0]: shape[0]
        for name, shape in weights.items()
        if len(shape) == 2 and words(name).keys() & ATTENTION == {"q"}
    }
    found = {}
    for name, shape in weights.items():
        said = words(name).keys()
        if len(shape) == 1 and "norm" in said and said & ATTENTION and shape[0] in queries.values():
            found[name] = "NORM_BY_HEADS"
        elif len(shape) == 2:
            found[name] = cut(said, shape, queries.get(name.rpartition(".")[0], 0))
    return found


def cut(said: Iterable[str], shape: Shape, width: int) -> str:
    """How a linear layer is cut, by the words of its name and its weight's shape. width: features of all query heads."""
    said, (rows, columns) = set(said), shape
    if len(said & ATTENTION) == 1:
        return "COLUMN_BY_KEY_HEADS" if rows < width and "q" not in said else "COLUMN_BY_HEADS"
    if "mod" in said or ("norm" in said and rows >= 2 * columns):
        return "GATHER"
    if "attn" in said and "out" in said:
        return "ROW_BY_HEADS"
    if "mlp" in said:
        return "COLUMN" if rows >= columns else "ROW"
    return "?"


def given(checkout: Path, native: str) -> tuple[list[str], list[str]]:
    """What ComfyUI's model gives its class beside the latent and the time, and what it reads of a conditioning and a run.

    ValueError if the checkout has no such model.
    """
    source = Source(checkout)
    if (model := source.models().get(native)) is None:
        raise ValueError(f"--native: {native} is no class of this ComfyUI's supported_models with a model of its own.")
    return source.conditioning(model), source.conditioning(model, "kwargs")


def text_of(parts: list[Matched], ours: Shapes, theirs: Shapes, gives: list[str]) -> Iterator[str]:
    """The draft as lines of Python."""
    lists = {part.target: part for part in reversed(parts) if part.target}
    yield "blocks=Blocks("
    yield "    lists=("
    for name in lists:
        yield f'        BlockList("{name}", attention={{...}}),  # which streams, in which order: the block\'s forward'
    yield "    ),"
    counts = ", ".join(f'"{name}": {len(block_lists(ours)[name])}' for name in lists)
    yield f"    counts=lambda config: {{{counts}}},  # by the argument that says it"
    yield "    # outside of the lists: " + ", ".join(outermost(parts[0]))
    yield "    prologue=(...), epilogue=(...),"
    yield "),"
    yield "tensor_plan={"
    for name, part in lists.items():
        yield f'    "{name}": {{'
        yield from (f'        "{layer}": {how},' for layer, how in cuts(block_lists(ours)[name][part.blocks[0]]).items())
        yield "    },"
    yield "},"
    yield f"inputs=Inputs(accepts=({', '.join(json.dumps(name) for name in gives)}), ...),  # what ComfyUI's model gives"
    yield ""
    yield "def _key_map(config):"
    yield "    keys = KeyMap()"
    for part in parts:
        where = "keys" if not part.target else "block"
        if part.target:
            count = len(block_lists(ours)[part.target])
            yield f'    for block in keys.each("{part.target}", "{part.source}", {count}):  # blocks {spans(part.blocks)}'
        yield from (("        " if part.target else "    ") + line for line in key_lines(where, part, ours, theirs))
    yield "    return keys.sources"


def outermost(part: Matched) -> list[str]:
    return list(dict.fromkeys(name.partition(".")[0] for name in [*part.modules, *part.missing]))


def spans(blocks: tuple[int, ...]) -> str:
    """Indices as text: 0-18, 20."""
    runs_of: list[list[int]] = []
    for block in blocks:
        if runs_of and block == runs_of[-1][-1] + 1:
            runs_of[-1].append(block)
        else:
            runs_of.append([block])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs_of)


def key_lines(where: str, part: Matched, ours: Shapes, theirs: Shapes) -> Iterator[str]:
    """Calls of KeyMap, in the order of the class's modules."""
    own, other = modules_of(inside_block(part.target, part, ours)), modules_of(inside_block(part.source, part, theirs))
    first = {targets[0]: source for source, targets in part.splits.items()}
    for target in own:
        doubt = "  # a guess: another fits nearly as well" if target in part.guessed else ""
        if target in first:
            source = first[target]
            rows = ", ".join(f'"{name}": {next(iter(own[name].values()))[0]}' for name in part.splits[source])
            yield f'{where}.split("{source}", {{{rows}}}{parameters(own[target], other[source])}){doubt}'
        elif target in part.modules:
            source = part.modules[target]
            if "" in own[target] or "" in other[source]:
                names = [whole_name(target, own[target]), whole_name(source, other[source])]
                flat = "" if list(own[target].values()) == list(other[source].values()) else ", flat=True"
                yield f'{where}.tensor("{names[0]}", "{names[1]}"{flat}){doubt}'
            else:
                yield f'{where}.copy({{"{target}": "{source}"}}{parameters(own[target], other[source])}){doubt}'


def inside_block(name: str, part: Matched, shapes: Shapes) -> Shapes:
    """What a part's first block has of a list's parameters; outside of lists, all that is."""
    if not part.blocks:
        return shapes
    prefix = f"{name}.{part.blocks[0]}."
    return {key.removeprefix(prefix): shape for key, shape in shapes.items() if key.startswith(prefix)}


def whole_name(module: str, own: Module) -> str:
    return ".".join(part for part in (module, next(iter(own))) if part)


def parameters(own: Module, other: Module) -> str:
    """KeyMap's argument for the parameters of a module, nothing for weight and bias."""
    if set(own) == set(other):
        return "" if set(own) == {"weight", "bias"} else f", {json.dumps([*own])}"
    ours, theirs = (sorted(names, key=lambda name: (names[name], name in ADDED)) for names in (own, other))
    return f", {json.dumps(dict(zip(ours, theirs, strict=True)))}"


def gaps(parts: list[Matched], ours: Shapes, theirs: Shapes) -> Iterator[str]:
    """What the draft lacks: parameters without values, tensors without use, guesses, layers whose cut nothing tells."""
    for part in parts:
        place = f"{part.target} {spans(part.blocks)}: " if part.target else ""
        yield from (f"{place}{name}: nothing in the file fits" for name in part.missing)
        yield from (f"{place or 'outside: '}the file's {name} is used nowhere" for name in part.left)
        yield from (f"{place}{name}: its source is a guess" for name in sorted(part.guessed))
    for name, blocks in block_lists(ours).items():
        if name not in {part.target for part in parts}:
            yield f"{name}: the file has no list of {len(blocks)} blocks of about this size"
        else:
            yield from (f"{name}: {layer}: how is it cut?" for layer, how in cuts(blocks[min(blocks)]).items() if how == "?")
    for name in block_lists(theirs).keys() - {part.source for part in parts}:
        yield f"the file's list {name} is used nowhere"
    yield "by hand: detect and configure, conditioning, Forward.arguments, attention of each list, a Case in testing/cases"


def class_shapes(name: str, settings: dict) -> dict[str, Shape]:
    """Parameters of a class, built without memory. name: one of diffusers, or MODULE:CLASS."""
    module, _, cls = name.rpartition(":")
    with torch.device("meta"):
        model = getattr(importlib.import_module(module or "diffusers"), cls)(**settings)
    return {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}


def file_shapes(path: Path) -> dict[str, Shape]:
    """Tensors of the file's transformer, without the prefix that an all-in-one file has. ValueError for a damaged file."""
    entries = read_header(path)[0]
    prefix = prefix_of(entries)
    return {key.removeprefix(prefix): entry.shape for key, entry in entries.items() if key.startswith(prefix)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--class", dest="cls", required=True)
    parser.add_argument("--settings", type=json.loads, default={})
    parser.add_argument("--comfyui", type=Path)
    parser.add_argument("--native")
    options = parser.parse_args()
    ours, theirs = class_shapes(options.cls, options.settings), file_shapes(options.file)
    parts = draft(ours, theirs)
    gives, reads = given(options.comfyui, options.native) if options.comfyui and options.native else ([], [])
    print("\n".join(text_of(parts, ours, theirs, gives)))
    if reads:
        print(f"\n# entries of a conditioning that it reads: {', '.join(reads)}")
    print("\n# missing:")
    print("\n".join(f"#   {line}" for line in gaps(parts, ours, theirs)))


if __name__ == "__main__":
    main()
