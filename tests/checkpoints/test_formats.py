"""Every format that weights come in gives what its expanded float32 form gives, and stays as small on the ranks as on disk.

Expected values are computed here by other code: torch's own conversion of fp8, and the numpy functions of the gguf package.
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_backend.checkpoints.checkpoint import Checkpoint, open_own_class
from parallel_backend.checkpoints.packed_formats import CHUNK_VALUES, GGUF_BLOCKS, HALF_KINDS, Fp8, GgufBlocks, Half
from parallel_backend.checkpoints.reader import reading
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.spans import Shard, Span
from parallel_backend.rank.stage.linear import PackedLinear, RankLinear
from testing import mini
from testing.gguf_files import TYPES, write_gguf
from tests.support.one_rank import OneRank

# Widths in whole blocks of 256; half of the heads are not.
pytestmark = pytest.mark.threads

CONFIG = mini.IN_COMFYUI | {
    "axes": (8, 28, 28),
    "single_blocks": 2,
    "context_width": 256,
    "pooled_width": 256,
    "guidance": True,
}
CPU = torch.device("cpu")
PREFIX = "model.diffusion_model."
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LIMIT = 1e-6
Tensors = dict[str, torch.Tensor]


def is_matrix(key: str, value: torch.Tensor) -> bool:
    return key.endswith(".weight") and value.ndim == 2


def plain(kind: torch.dtype):
    def make(whole: Tensors) -> tuple[Tensors, Tensors]:
        stored = {key: value.to(kind if value.ndim == 2 else torch.bfloat16) for key, value in whole.items()}
        return stored, {key: value.float() for key, value in stored.items()}

    return make


def scaled(whole: Tensors, kind: torch.dtype, suffix: str, by_row: bool) -> tuple[Tensors, Tensors, list[str]]:
    """What the file holds, the values, and the scaled layers. One layer is left in bf16, as converters leave some."""
    stored, expanded, layers = {}, {}, []
    for key, value in whole.items():
        if not is_matrix(key, value) or key == "img_in.weight":
            stored[key] = value.bfloat16()
            expanded[key] = stored[key].float()
            continue
        layers.append(key.removesuffix(".weight"))
        scale = (value.abs().amax(dim=1, keepdim=True) if by_row else value.abs().max()) / torch.finfo(kind).max
        stored[key], stored[layers[-1] + suffix] = (value / scale).to(kind), scale
        expanded[key] = stored[key].float() * scale
    return stored, expanded, layers


def scaled_old(kind: torch.dtype, by_row: bool = False):
    """As ComfyUI's scaled files were in 2025."""

    def make(whole: Tensors) -> tuple[Tensors, Tensors]:
        stored, expanded, layers = scaled(whole, kind, ".scale_weight", by_row)
        inputs = {f"{layer}.scale_input": torch.tensor(3.0) for layer in layers}
        return stored | inputs | {"scaled_fp8": torch.zeros(2, dtype=kind)}, expanded

    return make


def scaled_new(kind: torch.dtype, by_row: bool = False):
    """Each layer's format as a tensor of JSON."""

    def make(whole: Tensors) -> tuple[Tensors, Tensors]:
        stored, expanded, layers = scaled(whole, kind, ".weight_scale", by_row)
        said = json.dumps({"format": str(kind).removeprefix("torch."), "full_precision_matrix_mult": True}).encode()
        marks = {f"{layer}.comfy_quant": torch.tensor(list(said), dtype=torch.uint8) for layer in layers}
        inputs = {f"{layer}.input_scale": torch.tensor(3.0) for layer in layers}
        return stored | marks | inputs, expanded

    return make


def header_of(stored: Tensors, prefix: str = "") -> dict[str, str]:
    """Each layer's format in the file's header."""
    layers = [key.removesuffix(".weight_scale") for key in stored if key.endswith(".weight_scale")]
    said = {prefix + layer: {"format": "float8_e4m3fn"} for layer in layers}
    return {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": said})}


SCALE_FIELDS = {  # bytes of a block that are fp16 numbers: the others may be anything
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}


def to_blocks(value: np.ndarray, kind: str) -> np.ndarray:
    """[rows, bytes]: the value quantised; random blocks of about its size for types that the package only expands."""
    if kind not in SCALE_FIELDS:
        return gguf.quants.quantize(value, TYPES[kind])
    values, size = GGUF_BLOCKS[kind]
    blocks = np.random.default_rng(value.size).integers(0, 256, (value.size // values, size), dtype=np.uint8)

    def fill(number: float) -> np.ndarray:
        for at in SCALE_FIELDS[kind]:
            blocks[:, at : at + 2] = np.frombuffer(np.float16(number).tobytes(), dtype=np.uint8)
        return gguf.quants.dequantize(blocks, TYPES[kind])

    fill(value.std() / fill(1.0).std())
    return blocks.reshape(value.shape[0], -1)


def encode(value: torch.Tensor, kind: str) -> np.ndarray:
    return to_blocks(value.numpy(), kind) if kind in GGUF_BLOCKS else gguf.quants.quantize(value.numpy(), TYPES[kind])


def decode(data: np.ndarray, kind: str) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(data, TYPES[kind]).astype(np.float32))


def gguf_types(kind: str, whole: Tensors) -> dict[str, str]:
    """As converters choose: matrices in blocks where their rows are whole ones, the last layer and biases in full."""
    types = {}
    for key, value in whole.items():
        if value.ndim < 2 or key.startswith("final_layer.linear"):
            types[key] = "F32"
        elif kind in GGUF_BLOCKS and value.shape[1] % GGUF_BLOCKS[kind][0]:
            types[key] = "F16"
        else:
            types[key] = "BF16" if kind == "mixed" and "attn" in key else "F16" if kind == "mixed" else kind
    return types


def make_gguf(path, kind: str, whole: Tensors) -> Tensors:
    """Writes the file; the values that it holds."""
    types = gguf_types(kind, whole)
    tensors = {key: (encode(value, types[key]), types[key]) for key, value in whole.items()}
    write_gguf(path, tensors)
    return {key: decode(*tensors[key]).view(value.shape) for key, value in whole.items()}


SAFETENSORS = {
    "fp8 e4m3": plain(E4M3),
    "fp8 e5m2": plain(E5M2),
    "bf16": plain(torch.bfloat16),
    "fp16": plain(torch.float16),
    "scaled, old": scaled_old(E4M3),
    "scaled, old, by row": scaled_old(E4M3, by_row=True),
    "scaled, new": scaled_new(E4M3),
    "scaled, new, e5m2": scaled_new(E5M2),
    "scaled, new, by row": scaled_new(E4M3, by_row=True),
}
VARIANTS = ("scaled, old, prefixed", "scaled, in the header", "scaled, in the header, prefixed")
GGUF = tuple(f"GGUF {kind}" for kind in (*GGUF_BLOCKS, "mixed"))
FORMATS = (*SAFETENSORS, *VARIANTS, *GGUF)


def dtype_of(what: str) -> str:
    """The weight_dtype that keeps the format: plain fp8 has to be asked for on CPU ranks, halves as on GPUs without them."""
    if what in HALF_KINDS:
        return f"{what}/fp32"
    return "fp8_e4m3fn" if what.startswith("fp8") else "fp32"


def opened(path: Path) -> Checkpoint:
    return open_own_class(path, mini.proven(CONFIG))


def loaded(path: Path, dtype: str = "fp32") -> torch.nn.Module:
    return OneRank(path, dtype).stage.model


def output_of(rank: OneRank) -> torch.Tensor:
    return rank.predict(*mini.inputs(CONFIG))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Tensors:
    return load_file(mini.save(mini.random_model(CONFIG), tmp_path_factory.mktemp("whole") / "whole.safetensors"))


@pytest.fixture(scope="module")
def files(whole, tmp_path_factory):
    """`files(format)`: (the file or folder, a safetensors file of the values that it holds, in float32)."""
    folder, made = tmp_path_factory.mktemp("formats"), {}

    def save(name: str, tensors: Tensors, metadata: dict[str, str] | None = None):
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / name, metadata)
        return folder / name

    def make(what: str):
        name = f"{len(made)}.safetensors"
        if what.startswith("GGUF"):
            path = folder / f"{len(made)}.gguf"
            expanded = make_gguf(path, what.split()[1], whole)
        elif what in SAFETENSORS:
            stored, expanded = SAFETENSORS[what](whole)
            path = save(name, stored)
        else:
            prefix = PREFIX if what.endswith("prefixed") else ""
            old = what.startswith("scaled, old")
            stored, expanded = (scaled_old if old else scaled_new)(E4M3)(whole)
            stored = {key: value for key, value in stored.items() if not key.endswith(".comfy_quant")}
            path = save(
                name, {prefix + key: value for key, value in stored.items()}, None if old else header_of(stored, prefix)
            )
        return path, save(f"expanded-{len(made)}.safetensors", expanded)

    def make_pair(what: str):
        if what not in made:
            made[what] = make(what)
        return made[what]

    return make_pair


@pytest.fixture(scope="module")
def expected(files):
    """`expected(format)`: the model of the expanded values, and its output: [B, tokens, C]."""
    made = {}

    def make(what: str):
        path = files(what)[1]
        if path not in made:
            rank = OneRank(path)
            made[path] = rank.stage.model, output_of(rank)
        return made[path]

    return make


@pytest.mark.parametrize("what", FORMATS)
def test_the_weights_are_those_of_the_expanded_form_and_stay_packed(files, expected, what):
    path, other = files(what)
    reference, output = expected(what)
    rank = OneRank(path, dtype_of(what))
    model = rank.stage.model
    values = {name: module.weight for name, module in reference.named_modules() if isinstance(module, RankLinear)}
    for name, layer in model.named_modules():
        if isinstance(layer, RankLinear):
            assert layer.weight.dtype == torch.float32
            assert torch.equal(layer.weight, values[name]), name
    assert mini.relative(output_of(rank), output) < LIMIT
    if what != "GGUF mixed":
        assert sum(p.nbytes for p in model.parameters()) < 1.1 * path.stat().st_size
    assert sum(p.nbytes for p in reference.parameters()) > 0.95 * other.stat().st_size


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("what", ["bf16", "scaled, new, by row", "GGUF Q8_0", "GGUF Q4_K"])
def test_shards_are_cuts_of_the_expanded_weights(pools, files, expected, what, ranks):
    path, _ = files(what)
    checkpoint, whole_model = opened(path), expected(what)[0]
    model, unpacked = pools.mini(path, Degrees(tensor=ranks), dtype_of(what)), 0
    stages = [engine.stage for worker in model.pool.ranks.workers.values() for engine in worker.engines.values()]
    for stage in stages:
        for name, layer in stage.model.named_modules():
            if not isinstance(layer, RankLinear):
                continue
            value = whole_model.get_submodule(name).weight
            shard = stage.adapters._plan.shard(f"{name}.weight", tuple(value.shape))
            if shard is not None:
                value = torch.cat([value.narrow(shard.dim, span.start, len(span)) for span in shard.spans], shard.dim)
            assert torch.equal(layer.weight, value), name
            assert layer.weight_shape == tuple(value.shape)
            stored = checkpoint.storage(f"{name}.weight", dtype_of(what))
            unpacked += stored is not None and not isinstance(layer, PackedLinear)
    assert bool(unpacked) == (what == "GGUF Q4_K")


def test_shards_of_any_spans(files):
    """Columns inside a block too, and rows out of order."""
    target = "double_blocks.1.img_attn.proj.weight"
    for what in ("scaled, new, by row", "GGUF Q8_0"):
        with reading(opened(files(what)[0])) as reader, reading(opened(files(what)[1])) as other:
            for dim in (0, 1):
                for spans in ((Span(3, 40), Span(64, 65)), (Span(32, 64), Span(0, 32)), (Span(0, 256),)):
                    shard = Shard(dim, spans)
                    value = reader.values(target, torch.float32, shard, CPU)
                    assert torch.equal(value, other.values(target, torch.float32, shard, CPU))
                    assert value.shape[dim] == sum(map(len, spans))


def test_plain_fp8_is_expanded_on_ranks_that_are_to_compute_in_float32(files, expected):
    model = loaded(files("fp8 e4m3")[0], "fp32")
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    for name, value in expected("fp8 e4m3")[0].state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp8_e4m3fn"])
def test_weights_of_quantised_files_are_kept_as_they_are_under_every_weight_dtype(files, dtype):
    """A file's own choice of what stays in full is kept too."""
    for what in ("scaled, new", "GGUF Q8_0"):
        model = loaded(files(what)[0], dtype)
        packed = {name: module.packing for name, module in model.named_modules() if isinstance(module, PackedLinear)}
        assert isinstance(packed["double_blocks.0.img_mlp.2"], GgufBlocks if what.startswith("GGUF") else Fp8)
        full = "final_layer.linear" if what.startswith("GGUF") else "img_in"
        halves = dtype == "fp32" and what == "scaled, new"  # of 16 bits in the file; in the GGUF file it has 32
        assert packed.get(full) == (Half("bf16") if halves else None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_expanding_to_half_precision_rounds_once(dtype):
    bits = torch.randint(0, 120, (64, 256), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for packing in (
        Fp8("fp8_e4m3fn"),
        Fp8("fp8_e4m3fn", torch.tensor([[0.0123]])),
        Fp8("fp8_e5m2", torch.rand(64, 1) / 512),
    ):
        assert torch.equal(packing.expand(bits, dtype), packing.expand(bits, torch.float32).to(dtype))
    blocks = torch.from_numpy(to_blocks(np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32), "Q5_K"))
    assert torch.equal(GgufBlocks("Q5_K").expand(blocks, dtype), GgufBlocks("Q5_K").expand(blocks, torch.float32).to(dtype))


@pytest.mark.parametrize("kind", GGUF_BLOCKS)
def test_large_weights_are_expanded_piece_by_piece(monkeypatch, kind):
    blocks = torch.from_numpy(to_blocks(np.random.default_rng(0).normal(size=(24, 512)).astype(np.float32), kind))
    assert CHUNK_VALUES > 24 * 512
    at_once = GgufBlocks(kind).expand(blocks, torch.float32)
    monkeypatch.setattr("parallel_backend.checkpoints.packed_formats.CHUNK_VALUES", 5 * 256)
    assert torch.equal(GgufBlocks(kind).expand(blocks, torch.float32), at_once)
    assert gguf.GGML_QUANT_SIZES[TYPES[kind]] == GGUF_BLOCKS[kind]


def test_a_gguf_tensor_of_another_shape_than_its_own(files, whole, tmp_path):
    """Converters store tensors whose rows are not whole blocks as rows of 256; their shape is in the metadata."""
    types, key = gguf_types("Q8_0", whole), "img_in.weight"
    tensors = {name: (encode(value, types[name]), types[name]) for name, value in whole.items()}
    tensors[key] = encode(whole[key].view(64, 256), "Q4_K"), "Q4_K"
    path = write_gguf(tmp_path / "reshaped.gguf", tensors, {key: (256, 64)})
    assert torch.equal(loaded(path).img_in.weight, decode(*tensors[key]).view(256, 64))
    with pytest.raises(ValueError, match=r"^model_name: other.gguf has img_in.weight in the shape .* class MiniFlux has "):
        loaded(write_gguf(tmp_path / "other.gguf", tensors))


def drop(*keys: str):
    return lambda stored: {key: value for key, value in stored.items() if key not in keys}


def put(key: str, value: torch.Tensor):
    return lambda stored: stored | {key: value}


def says(text: bytes) -> torch.Tensor:
    return torch.tensor(list(text), dtype=torch.uint8)


OLD, NEW = scaled_old(E4M3), scaled_new(E4M3)
BROKEN = {
    "old, a scale missing": (OLD, drop("txt_in.scale_weight"), "lacks the scale of txt_in.weight"),
    "a marker and no scales": (plain(E4M3), put("scaled_fp8", torch.zeros(1, dtype=E4M3)), "lacks the scale of"),
    "new, a scale missing": (NEW, drop("txt_in.weight_scale"), "lacks the scale of txt_in.weight"),
    "a scaled weight missing": (OLD, drop("single_blocks.0.linear2.weight"), "lacks single_blocks.0.linear2.weight"),
    "a scale by column": (OLD, put("txt_in.scale_weight", torch.ones(256)), r"txt_in.scale_weight as fp32 of shape \[256\]"),
    "a second scale": (NEW, put("txt_in.weight_scale_2", torch.ones(1)), "has txt_in.weight_scale_2"),
    "another format": (NEW, put("txt_in.comfy_quant", says(b'{"format": "awq"}')), "txt_in.weight in the format awq"),
    "no JSON": (NEW, put("txt_in.comfy_quant", says(b"???")), "damaged"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_scaled_files_that_would_give_garbage_are_refused_by_name(whole, tmp_path, case):
    make, edit, message = BROKEN[case]
    stored = edit(make(whole)[0])
    save_file({PREFIX + key: value for key, value in stored.items()}, tmp_path / "broken.safetensors")
    with pytest.raises(ValueError, match=f"^model_name: broken.safetensors .*{message}"):
        opened(tmp_path / "broken.safetensors")


def foreign_type(path, files):
    tensors = {key: (value.numpy(), "F32") for key, value in load_file(files("GGUF Q8_0")[1]).items()}
    values = np.zeros((4, 256), dtype=np.float32)
    write_gguf(path, tensors | {"txt_in.weight": (gguf.quants.quantize(values, TYPES["TQ1_0"]), "TQ1_0")})


def test_a_gguf_file_of_an_unknown_type_is_refused_by_name(files, tmp_path):
    foreign_type(tmp_path / "broken.gguf", files)
    with pytest.raises(ValueError, match=r"^model_name: broken.gguf .*has txt_in.weight as TQ1_0, .* cannot read. .*Q4_K"):
        opened(tmp_path / "broken.gguf")


def test_without_the_gguf_package_its_name_is_given(files, monkeypatch):
    path, other = files("GGUF Q8_0")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"^model_name: .*\.gguf is a GGUF file\. .* pip install gguf"):
        opened(path)
    opened(other)
