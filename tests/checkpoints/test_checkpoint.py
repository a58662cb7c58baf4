"""Checkpoints: every layout gives diffusers' weights exactly, a rank gets its own part only, and errors name the widget."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_backend.checkpoints.checkpoint import open_checkpoint, to_original
from parallel_backend.client.call import ModelCall
from parallel_backend.core.spans import Span, split
from parallel_backend.families import FAMILIES
from parallel_backend.rank.stage.build import build_stage
from parallel_backend.rank.stage.linear import PackedLinear
from testing import tiny

CPU = torch.device("cpu")
BLOCKS = tiny.FLUX["num_layers"] + tiny.FLUX["num_single_layers"]
PREFIX = "model.diffusion_model."
OTHER_PREFIXES = ("model.model.", "net.", "model.")
LEFTOVERS = {  # of training, of older versions and of other parts: nothing in ComfyUI's class has such a name
    "position_ids": torch.arange(77)[None],
    "pulid.weight": torch.zeros(2),
    "txt_in.weight_scale_2": torch.ones(1),
    "double_blocks.0.x.scale_weight": torch.ones(1),
    "first_stage_model.encoder.conv_in.weight": torch.zeros(2, 2),
    "model_ema.decay": torch.zeros(()),
}


@pytest.fixture(scope="module")
def original(flux_file) -> dict[str, torch.Tensor]:
    return load_file(flux_file)


@pytest.fixture(scope="module")
def files(flux_model, original, tmp_path_factory):
    """Layout -> path; all hold the weights of `flux_model`."""
    folder = tmp_path_factory.mktemp("layouts")

    def save(name: str, tensors: dict[str, torch.Tensor]):
        save_file(tensors, folder / name)
        return folder / name

    def prefixed_by(prefix: str) -> dict[str, torch.Tensor]:
        return {prefix + key: value for key, value in original.items()}

    prefixed = prefixed_by(PREFIX)
    surplus = {"vae.decoder.conv_in.weight": torch.zeros(3), "text_encoders.t5.scaled_fp8": torch.zeros(1)}
    renamed = {
        key.removesuffix("_norm.scale") + "_norm.weight" if key.endswith("_norm.scale") else key: value
        for key, value in original.items()
    }
    flux_model.save_pretrained(folder / "diffusers")
    flux_model.save_pretrained(folder / "sharded", max_shard_size=sum(v.nbytes for v in original.values()) * 2 // 3)
    assert len(list((folder / "sharded").glob("*.safetensors"))) == 2
    assert renamed.keys() != original.keys()
    return {
        "original": save("original.safetensors", original),
        "prefixed": save("prefixed.safetensors", prefixed),
        "full checkpoint": save("full.safetensors", prefixed | surplus),
        **{f"prefix {each}": save(f"{each}safetensors", prefixed_by(each)) for each in OTHER_PREFIXES},
        "leftovers": save("leftovers.safetensors", original | LEFTOVERS),
        ".weight norms": save("renamed.safetensors", renamed),
        "prefixed .weight norms": save("both.safetensors", {PREFIX + key: value for key, value in renamed.items()}),
        "diffusers": folder / "diffusers",
        "diffusers, sharded": folder / "sharded",
    }


LAYOUTS = [
    "original",
    "prefixed",
    "full checkpoint",
    *(f"prefix {each}" for each in OTHER_PREFIXES),
    "leftovers",
    ".weight norms",
    "prefixed .weight norms",
    "diffusers",
    "diffusers, sharded",
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_weights_and_configuration(files, flux_model, layout):
    checkpoint = open_checkpoint(files[layout])
    assert checkpoint.family.name == "flux"
    assert checkpoint.dtype == "fp32"
    assert {name: tuple(v) if isinstance(v, (list, tuple)) else v for name, v in checkpoint.config.items()} == (
        tiny.FLUX | {"out_channels": checkpoint.config["out_channels"]}
    )
    state = tiny.whole_model(files[layout]).state_dict()
    expected = flux_model.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_original_shapes_are_those_of_the_original_file(files, original, layout):
    """ComfyUI detects the model by these, whatever the file looks like."""
    assert open_checkpoint(files[layout]).original_shapes == {key: tuple(v.shape) for key, v in original.items()}


def test_what_no_parameter_uses_is_dropped_by_name(files):
    assert open_checkpoint(files["leftovers"]).unused.keys() == LEFTOVERS.keys()
    assert not open_checkpoint(files["full checkpoint"]).unused


def test_to_original_round_trip(flux_model, tmp_path):
    family = FAMILIES["flux"]
    path = tmp_path / "again.safetensors"
    save_file(to_original(family, tiny.FLUX, flux_model.state_dict()), path)
    first = load_file(path)
    again = to_original(family, tiny.FLUX, tiny.whole_model(path).state_dict())
    assert again.keys() == first.keys()
    assert all(torch.equal(again[key], first[key]) for key in first)


def test_the_original_layout_is_another_one(flux_model, original):
    """The control: packed rows and the exchanged halves are really there to be undone."""
    state = flux_model.state_dict()
    qkv = original["double_blocks.0.img_attn.qkv.weight"]
    assert torch.equal(qkv.chunk(3)[1], state["transformer_blocks.0.attn.to_k.weight"])
    head = original["final_layer.adaLN_modulation.1.weight"]
    assert torch.equal(torch.cat(head.chunk(2)[::-1]), state["norm_out.linear.weight"])
    assert not torch.equal(head, state["norm_out.linear.weight"])


def change(tmp_path, name="changed.safetensors"):
    def save(tensors):
        save_file(tensors, tmp_path / name)
        return tmp_path / name

    return save


def without(tensors, *endings):
    return {key: value for key, value in tensors.items() if not key.endswith(endings)}


BROKEN_TENSORS = {
    "a missing block tensor": (lambda t: without(t, "double_blocks.1.img_mlp.2.weight"), "lacks double_blocks.1"),
    "several missing": (lambda t: without(t, "txt_mlp.0.bias"), "and 2 more"),
    "a missing width": (lambda t: without(t, "img_in.weight"), "looks like flux, but lacks 'img_in.weight'"),
    "bytes": (lambda t: t | {"txt_in.weight": torch.zeros(128, 24, dtype=torch.uint8)}, "holds txt_in.weight as U8"),
    "a scale of 8-bit values that nobody knows": (
        lambda t: t | {"txt_in.weight": t["txt_in.weight"].to(torch.float8_e4m3fn), "txt_in.weight_scale_2": torch.ones(1)},
        "holds txt_in.weight_scale_2, for which",
    ),
    "no transformer": (
        lambda t: {"lora_up.weight": torch.zeros(2)},
        "no diffusion transformer .*It is a LoRA.* .*lora_up.weight",
    ),
    "another family": (lambda t: without(t, "img_mod.lin.weight", "img_mod.lin.bias"), "no diffusion transformer"),
    "no tensors": (lambda t: {}, "Its first keys: none"),
    "too few rows": (
        lambda t: t | {"single_blocks.1.linear1.weight": t["single_blocks.1.linear1.weight"][:-1].clone()},
        "single_blocks.1.linear1.weight has 895 rows, too few",
    ),
}


@pytest.mark.parametrize(
    ("prefix", "case"),
    [(prefix, case) for prefix in ("", PREFIX) for case in BROKEN_TENSORS if not prefix or case != "no tensors"],
)
def test_files_that_cannot_be_run_are_refused_by_name(original, tmp_path, case, prefix):
    edit, message = BROKEN_TENSORS[case]
    path = tmp_path / "broken.safetensors"
    save_file({prefix + key: value for key, value in edit(original).items()}, path)
    with pytest.raises(ValueError, match=f"^model_name: broken.safetensors.*{message}"):
        open_checkpoint(path)


def truncate(path, flux_file):
    path.write_bytes(flux_file.read_bytes()[:-1000])


BROKEN_FILES = {
    "missing.safetensors": (None, "does not exist"),
    "cut.safetensors": (truncate, "damaged or incomplete"),
    "empty.safetensors": (lambda path, _: path.write_bytes(b""), "damaged or incomplete"),
    "text.safetensors": (lambda path, _: path.write_text("<html>not found</html>"), "damaged or incomplete"),
    "pickle.ckpt": (lambda path, _: torch.save({"a": torch.zeros(1)}, path), "pickled checkpoints are never opened"),
    "renamed.pt": (lambda path, file: path.write_bytes(file.read_bytes()), "not a .safetensors, .sft or .gguf file"),
}


@pytest.mark.parametrize("name", BROKEN_FILES)
def test_damaged_and_foreign_files_are_refused_by_name(flux_file, tmp_path, name):
    make, message = BROKEN_FILES[name]
    path = tmp_path / name
    if make is not None:
        make(path, flux_file)
    with pytest.raises(ValueError, match=f"^model_name: {name} .*{message}"):
        open_checkpoint(path)


BROKEN_FOLDERS = {
    "no config": (None, "no readable config.json"),
    "no JSON": ("{", "no readable config.json"),
    "another class": (json.dumps({"_class_name": "UNet2DConditionModel"}), "UNet2DConditionModel"),
    "a pipeline": (json.dumps({"transformer": ["diffusers", "FluxTransformer2DModel"]}), "which is not read"),
    "no weights": (json.dumps({"_class_name": "FluxTransformer2DModel", **tiny.FLUX}), "lacks"),
}


@pytest.mark.parametrize("case", BROKEN_FOLDERS)
def test_folders_that_cannot_be_run_are_refused_by_name(tmp_path, case):
    config, message = BROKEN_FOLDERS[case]
    folder = tmp_path / "folder"
    folder.mkdir()
    if config is not None:
        (folder / "config.json").write_text(config)
    with pytest.raises(ValueError, match=f"^model_name: .*folder .*{message}"):
        open_checkpoint(folder)


def test_a_folder_with_a_damaged_part_is_refused(files, tmp_path):
    folder = tmp_path / "half"
    folder.mkdir()
    for index, file in enumerate(sorted(files["diffusers, sharded"].iterdir())):
        data = file.read_bytes()
        damaged = file.suffix == ".safetensors" and index == 2
        (folder / file.name).write_bytes(data[:-100] if damaged else data)
    with pytest.raises(ValueError, match=r"^model_name: .*damaged or incomplete"):
        open_checkpoint(folder)


def own_names(expected: set[str], span: Span, first: bool, last: bool) -> set[str]:
    """Which of diffusers' parameter names belong to a stage, worked out from the names alone."""
    doubles = tiny.FLUX["num_layers"]

    def belongs(name: str) -> bool:
        top, _, rest = name.partition(".")
        if top in ("transformer_blocks", "single_transformer_blocks"):
            index = int(rest.split(".")[0]) + (doubles if top == "single_transformer_blocks" else 0)
            return span.start <= index < span.stop
        if top in ("x_embedder", "context_embedder"):
            return first
        if top in ("norm_out", "proj_out"):
            return last
        return True  # the time embedding, which every block needs

    return {name for name in expected if belongs(name)}


@pytest.mark.parametrize("layout", ["original", "diffusers, sharded"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_a_stage_holds_exactly_its_own_parameters(files, flux_model, stages, layout):
    checkpoint = open_checkpoint(files[layout])
    expected = flux_model.state_dict()
    shared = sum(v.nbytes for name, v in expected.items() if name.startswith("time_text_embed"))
    total = 0
    for number, span in enumerate(split(Span(0, BLOCKS), stages)):
        first, last = number == 0, number == stages - 1
        stage = build_stage(checkpoint, span, CPU, "fp32")
        own = dict(stage.model.named_parameters())
        assert own.keys() == own_names(set(expected), span, first, last)
        for name, value in own.items():
            assert value.device == CPU
            assert torch.equal(value, expected[name]), name
        assert len(stage.attention) == len(span)
        assert not [name for name, buffer in stage.model.named_buffers() if buffer.is_meta]
        total += sum(value.nbytes for value in own.values())
    assert total == sum(value.nbytes for value in expected.values()) + (stages - 1) * shared


def test_a_file_that_was_cut_short_after_it_was_looked_at_is_named_by_the_rank(flux_file, tmp_path):
    path = tmp_path / "later.safetensors"
    path.write_bytes(flux_file.read_bytes())
    checkpoint = open_checkpoint(path)
    truncate(path, flux_file)
    with pytest.raises(ValueError, match=r"^model_name: later.safetensors has changed on disk"):
        build_stage(checkpoint, Span(0, BLOCKS), CPU, "fp32")


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_another_dtype_is_the_rounded_weights(files, flux_model, dtype, torch_dtype):
    model = tiny.whole_model(files["original"], dtype)
    for name, value in model.state_dict().items():
        assert torch.equal(value, flux_model.state_dict()[name].to(torch_dtype)), name


def test_fp8_is_a_quarter_in_memory(files, flux_model):
    model = tiny.whole_model(files["original"], "fp8_e4m3fn")
    whole = sum(p.nbytes for p in flux_model.parameters())
    assert sum(p.nbytes for p in model.parameters()) < 0.3 * whole
    expected = flux_model.state_dict()
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            assert isinstance(layer, PackedLinear), name
            assert torch.equal(layer.weight, expected[f"{name}.weight"].to(torch.float8_e4m3fn).float()), name


def test_fp8_output_is_close_to_fp32(files, flux_model):
    model = tiny.whole_model(files["original"], "fp8_e4m3fn")
    given = tiny.inputs(tiny.FLUX)
    error = tiny.relative(tiny.reference(model, *given), tiny.reference(flux_model, *given))
    assert 1e-4 < error < 0.1


@pytest.mark.parametrize("stages", [1, 2])
def test_fp8_on_ranks(pools, files, flux_model, stages):
    from parallel_backend.core.degrees import Degrees

    model = pools.load(files["original"], Degrees(pipe=stages), dtype="fp8_e4m3fn")
    whole = sum(p.nbytes for p in flux_model.parameters())
    assert sum(model.weight_bytes) < 0.35 * whole
    given = tiny.inputs(tiny.FLUX)
    error = tiny.relative(model.predict(ModelCall(*given), lambda: None), tiny.reference(flux_model, *given))
    assert 1e-4 < error < 0.1
