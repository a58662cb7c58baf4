"""Model files that were made to do harm, or hold what nobody thought of: refused by name, in little time and memory."""

import json
import os
import pickle
import struct
import time
import traceback
import tracemalloc
import zipfile

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_backend.checkpoints.checkpoint import open_own_class
from parallel_backend.checkpoints.single_file import MAX_REFUSAL, MAX_SETTING, MAX_UNSEEN, check_own_arguments, contents_of
from parallel_backend.checkpoints.tensor_files import MAX_HEADER_BYTES, open_file
from parallel_backend.own_class.built.building import build
from testing import mini
from tests.campaigns.fuzz import files
from tests.support.planted_comfyui import planted, planted_comfyui

SHAPES = {"a.weight": [4, 4]}


def sparse(path, content: bytes, length=None, size=1 << 40):
    return files.write_sparse(path, content, len(content) if length is None else length, size)


def header(shapes=SHAPES, dtype="F32", **metadata) -> bytes:
    return json.dumps(files.safetensors_header(shapes, dtype, metadata)).encode()


@pytest.fixture(scope="module")
def mini_shapes(mini_model):
    return {key: list(tensor.shape) for key, tensor in mini_model.state_dict().items()}


def opened(path):
    """As the mini class."""
    return open_own_class(path, mini.proven())


def refused(path, words: str, megabytes: float = 60, seconds: float = 20) -> None:
    started = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=f"^model_name: .*{words}"):
            opened(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < megabytes * 1e6
    assert time.process_time() - started < seconds


def test_headers_that_promise_more_than_there_is(tmp_path):
    path = tmp_path / "a.safetensors"
    for length in (2**24, 2**27, 2**40, 2**63, 2**64 - 1):
        refused(sparse(path, b"{}", length), "damaged")
    endless = {"a": {"dtype": "F32", "shape": [2**62], "data_offsets": [0, 2**64 - 1]}}
    refused(sparse(path, json.dumps(endless).encode()), "damaged")


def test_a_header_larger_than_any_models_is_not_parsed(tmp_path):
    """The safetensors library parses 100 MB: 95 MB took 6 s and 1.6 GB, and made an error of 95 million letters."""
    path = sparse(tmp_path / "a.safetensors", header(), MAX_HEADER_BYTES + 1)
    refused(path, "its header is said to have 33,554,433 bytes, and no model's has more than", megabytes=1, seconds=1)
    with pytest.raises(ValueError, match=r"^model_name: a.safetensors .* no model's has more than"):
        open_file(path)
    refused(sparse(path, header(), MAX_HEADER_BYTES), "damaged or incomplete .Error while")


SIGNS = {
    "a terminal's": "\x1b[2J\x1b[31m",
    "a forged line": "a\nERROR: all is lost\r\n",
    "backwards": "\u202egnp.elif",
    "invisible": "\u200b\u2066\ufeff",
    "long": "x" * 300_000,
}


def plain(path, words: str = ""):
    """The refusal is one short line that names the file as far as it can be read, and so is all that a log shows of it."""
    with pytest.raises(ValueError, match=f"^model_name: .*{words}") as caught:
        opened(path)
    shown = "".join(traceback.format_exception(caught.value))
    assert len(str(caught.value)) <= MAX_REFUSAL + 20 and len(shown) < 10_000
    assert all(line.isprintable() for line in shown.splitlines())
    assert shown.count("ERROR: all") <= 1


@pytest.mark.parametrize("said", SIGNS.values(), ids=SIGNS)
def test_names_from_a_file_are_clipped_and_escaped(tmp_path, mini_file, mini_shapes, said):
    whole = load_file(mini_file)
    path, zero = tmp_path / "a.safetensors", torch.zeros(1)
    save_file({said: zero}, path)
    assert str(contents_of(path).refusal()).isprintable()
    save_file(
        whole
        | {
            "img_in.weight": whole["img_in.weight"].to(torch.float8_e4m3fn),
            f"img_in.{said.replace('.', '')}scale": zero,
        },
        path,
    )
    plain(path, "does not use")
    save_file(whole | {f"img_in{said}.weight": zero, f"img_in{said}.comfy_quant": torch.tensor([1, 2])}, path)
    plain(path)
    save_file(whole, path, {"_quantization_metadata": json.dumps({"layers": {"img_in": {"format": said}}})})
    plain(path, "in the format")
    shapes = json.dumps({said: {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}).encode()
    plain(sparse(path, shapes, size=4), "damaged")


@pytest.mark.parametrize("said", SIGNS.values(), ids=SIGNS)
def test_names_from_a_gguf_file_are_clipped_and_escaped(tmp_path, said):
    name = said[:4000].encode()
    tensor = struct.pack("<Q", len(name)) + name + struct.pack("<I1QIQ", 1, 8, 999, 0)
    plain(gguf(tmp_path / "a.gguf", gguf_with(tensors=1) + tensor, 4096))
    plain(gguf(tmp_path / "a.gguf", gguf_with(field(name, 4, bytes(4)), field(name, 4, bytes(4))), 100), "comes twice")


def test_the_name_of_a_file_is_escaped_too(tmp_path):
    for said in ("\x1b[31m", "a\nERROR: all is lost", "\u202e"):
        path = tmp_path / f"{said}.safetensors"
        path.write_bytes(b"{}")
        plain(path)
        plain(tmp_path / f"{said} none.safetensors", "does not exist")


def test_tensors_without_values_are_refused(tmp_path, mini_shapes):
    """In a file of no size they could have any shape, and the model any width."""
    shapes = mini_shapes | {"img_in.weight": [2**40, 0]}
    path = tmp_path / "a.safetensors"
    content = header(shapes)
    refused(sparse(path, content, size=sum(4 * torch.Size(shape).numel() for shape in shapes.values())), "has no values")


DEEP = "[" * 100_000
SAID = {
    "a list": "[]",
    "no JSON": "{",
    "deep": DEEP,
    "layers that are a list": '{"layers": []}',
    "a layer that is a text": '{"layers": {"txt_in": "float8_e4m3fn"}}',
}


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
def test_metadata_of_another_form_is_refused(tmp_path, said):
    save_file({"txt_in.weight": torch.zeros(2, 2)}, tmp_path / "a.safetensors", {"_quantization_metadata": said})
    refused(tmp_path / "a.safetensors", "damaged")


@pytest.mark.parametrize("size", [1 << 20, 1 << 34])
def test_a_layers_format_is_a_few_bytes(tmp_path, size):
    """It is read as a list of numbers, of which each takes ten times its size."""
    shapes = {"txt_in.weight": [2, 2], "txt_in.comfy_quant": [size]}
    content = files.safetensors_header(shapes, "U8", {})
    path = sparse(tmp_path / "a.safetensors", json.dumps(content).encode(), size=size + 4)
    refused(path, "its entry for txt_in")


@pytest.mark.parametrize("name", ["a.ckpt", "a.bin", "a", "a.SAFETENSORS.pt"])
def test_pickles_are_refused_by_their_name(tmp_path, name):
    torch.save({"a": torch.zeros(1)}, tmp_path / name)
    refused(tmp_path / name, "Pickled checkpoints are never opened")


class Trap:
    """Unpickling it makes a folder."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize("ending", [".safetensors", ".sft", ".gguf"])
@pytest.mark.parametrize("kind", ["zip", 2, 5])
def test_pickles_under_another_name_are_refused_and_not_opened(tmp_path, ending, kind):
    path, trap = tmp_path / f"a{ending}", str(tmp_path / "sprung")
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(Trap(trap)))
    else:
        path.write_bytes(pickle.dumps(Trap(trap), protocol=kind))
    refused(path, "is a pickle file under another name")
    assert not os.path.exists(trap)
    if kind != "zip":
        pickle.loads(path.read_bytes())  # the control: it would have sprung
        assert os.path.exists(trap)


def gguf(path, content: bytes, size: int = 0):
    with path.open("wb") as file:
        file.write(content)
        file.truncate(len(content) + size)
    return path


def field(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


def gguf_with(*fields: bytes, tensors: int = 0, count: int | None = None) -> bytes:
    return struct.pack("<IIQQ", 0x46554747, 3, tensors, len(fields) if count is None else count) + b"".join(fields)


GGUF = {
    "a list of bytes that fills the file": (gguf_with(field(b"a", 9, struct.pack("<IQ", 0, 2**33))), 2**34, "damaged"),
    "a list of texts that fills the file": (gguf_with(field(b"a", 9, struct.pack("<IQ", 8, 2**30))), 2**34, "damaged"),
    "lists in lists": (gguf_with(field(b"a", 9, struct.pack("<IQ", 9, 1) * 10_000)), 100, "damaged"),
    "as many tensors as can be": (gguf_with(tensors=2**64 - 1), 2**34, "more than any model"),
    "as many fields as can be": (gguf_with(count=2**64 - 1), 2**34, "more than any model"),
    "a name without end": (gguf_with(field(b"a", 8, b""), count=2)[:-17] + struct.pack("<Q", 2**64 - 1), 2**34, "damaged"),
    "no alignment": (gguf_with(field(b"general.alignment", 4, struct.pack("<I", 0))), 100, "alignment is 0"),
    "a field twice": (gguf_with(*[field(b"a", 4, bytes(4))] * 2), 100, "comes twice"),
    "an unknown type": (gguf_with(field(b"a", 77, bytes(4))), 100, "damaged"),
    "the other byte order": (struct.pack(">IIQQ", 0x47475546, 3, 0, 0), 100, "byte order"),
    "nothing at all": (b"", 0, "damaged"),
}


@pytest.mark.parametrize("case", GGUF)
def test_gguf_headers_are_believed_within_bounds(tmp_path, case):
    content, size, words = GGUF[case]
    refused(gguf(tmp_path / "a.gguf", content, size), words)


TENSOR = struct.pack("<Q", 1) + b"a"
GGUF_TENSORS = {
    "sides whose product is beyond all": TENSOR + struct.pack("<I4QIQ", 4, *[2**62] * 4, 0, 0),
    "beyond the end": TENSOR + struct.pack("<I1QIQ", 1, 8, 0, 2**62),
    "many axes": TENSOR + struct.pack("<I", 2**32 - 1),
    "no values": TENSOR + struct.pack("<I2QIQ", 2, 0, 2**60, 0, 0),
    "an unknown kind": TENSOR + struct.pack("<I1QIQ", 1, 8, 999, 0),
    "part of a block": TENSOR + struct.pack("<I1QIQ", 1, 8, 8, 0),
}


@pytest.mark.parametrize("case", GGUF_TENSORS)
def test_gguf_tensors_have_to_be_there(tmp_path, case):
    refused(gguf(tmp_path / "a.gguf", gguf_with(tensors=1) + GGUF_TENSORS[case], 4096), "damaged")


def test_a_shape_of_its_own_has_room_for_the_values(tmp_path):
    stated = field(b"comfy.gguf.orig_shape.a", 9, struct.pack("<IQ2i", 5, 2, 3, 3))
    content = gguf_with(stated, tensors=1) + TENSOR + struct.pack("<I1QIQ", 1, 8, 0, 0)
    refused(gguf(tmp_path / "a.gguf", content, 4096), "in a shape that does not match its number of values")


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("num_layers", 11),
        ("audio_inject_layers", [0, 11]),
        ("depth", 1000),
        ("dim", MAX_UNSEEN + 1),
        ("patch_size", [1, MAX_SETTING, 2]),
        ("rope_theta", MAX_SETTING + 1),
        ("eps", float("inf")),
        ("model_type", "x" * 2000),
        ("extra", {"a": {"b": 1}}),
    ],
)
def test_a_class_builds_no_more_than_its_file_has_tensors_for(argument, value):
    """ComfyUI takes them from the header as they are: 1,000 layers took 90 s to build."""
    shapes = [(64, 16)] * 10
    sound = {"num_layers": 10, "dim": 64, "text_len": 512, "rope_theta": 1e6, "window_size": [-1, -1], "bias": True}
    check_own_arguments("a", sound, shapes)
    check_own_arguments("a", {"dim": 5120}, [(5120, 64)])
    with pytest.raises(ValueError, match=f"^model_name: a says in its header that its {argument} is "):
        check_own_arguments("a", sound | {argument: value}, shapes)


@pytest.mark.parametrize("shape", [(4,), (4, 33), (33, 4), (32, 2, 2), (128,), (4, 32, 1)])
def test_a_tensor_of_another_shape_than_the_own_classes_is_refused(tmp_path, shape):
    """On the client: a rank that reads it would end all ranks."""
    path = tmp_path / "own.safetensors"
    with planted_comfyui():
        tensors = build(planted("Right")).to_empty(device="cpu").state_dict()
        save_file(tensors, path)
        assert open_own_class(path, planted("Right")).shape("inp.weight") == (32, 4)
        save_file(tensors | {"inp.weight": torch.zeros(shape)}, path)
        with pytest.raises(ValueError, match=r"^model_name: own\.safetensors has inp\.weight in the shape .* \[32, 4\]"):
            open_own_class(path, planted("Right"))


def test_pipes_are_no_files(tmp_path):
    """Whoever opens one waits until somebody writes to it."""
    os.mkfifo(tmp_path / "a.safetensors")
    refused(tmp_path / "a.safetensors", "does not exist")
