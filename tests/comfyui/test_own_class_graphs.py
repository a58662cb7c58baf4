"""What nodes do to a model does the same where ComfyUI's own class computes it on ranks, or is refused by name."""

import pytest
from safetensors.torch import load_file, save_file

from testing.quantised import quantise_blocks
from tests.checkpoints.test_formats import make_gguf
from tests.comfyui.test_families import CASES, save_case

pytestmark = [pytest.mark.comfyui, pytest.mark.full]

LIMIT = 5e-6
"""Of a difference to ComfyUI's own MODEL, as a share of the latents' largest value."""
ROUNDED = 0.02
"""The same where inputs are rounded, and a difference of rounding becomes one of whole steps."""
MODELS = "flux-dev", "wan-2.1-t2v", "qwen-image", "aura"
FORMATS = {"scaled fp8": "fp8", "int8": "int8, rotated", "nvfp4": "nvfp4"}
GGUF = "GGUF Q8_0"
FILES = *FORMATS, GGUF
FORMATS_OF = {"aura": ("scaled fp8",), "wan-2.1-t2v": tuple(FORMATS)}
"""Those in which a model has a file, if not in all: a tensor of five axes would need another entry in a GGUF header."""
EQUAL = (
    *("LoRA", "LoRA in bypass mode", "LoRA hooks", "LoRA hooks with keyframes", "mask of a prompt", "area of a prompt"),
    *("rotary options", "EasyCache", "step cache, threshold 0"),
    *("Skip Layer Guidance", "NAG"),
)
REFUSED = {
    "attention override": "model: an attention kernel set on the MODEL",
    "ControlNet": "control_net: ",
}
TOO_SMALL = "wan-2.1-t2v, area of a prompt, ulysses"
"""The small video's area has too few tokens for a trial of three sequence ranks."""
READ_NO_CONTROL = "aura, ControlNet, stages", "aura, ControlNet, ulysses"
"""Its class does not read residuals, and gives what it gives without a ControlNet, as natively."""


def cases(features, modes=("stages", "ulysses")):
    for model in MODELS:
        has = [feature for feature in features if feature not in FILES or feature in FORMATS_OF.get(model, FILES)]
        for case in (f"{feature}, {mode}" for feature in has for mode in modes):
            if f"{model}, {case}" not in (TOO_SMALL, *READ_NO_CONTROL):
                yield pytest.param(model, case, id=f"{model}, {case}")


@pytest.fixture(scope="module")
def found(request, inside, base):
    """Results by "model, case", of one run of ComfyUI for what was selected."""
    calls = [item.callspec.params for item in request.session.items if item.path == request.path]
    wanted = {model: [call["case"] for call in calls if call["model"] == model] for model in MODELS}
    wanted = {model: of_model for model, of_model in wanted.items() if of_model}
    folder, files = base / "models/diffusion_models", {model: {} for model in wanted}
    cases = {case.name: case for case in CASES}
    for name in (name for name in wanted if name != "aura"):
        if name in cases:
            save_case(cases[name], base)
        else:
            inside.run("small_files", names=[name])
        plain = load_file(folder / f"{name}.safetensors")
        for kind, form in FORMATS.items():
            file = f"{name}-{form[:4]}.safetensors"
            files[name][kind] = [file, file]
            save_file(quantise_blocks(plain, form)[0], folder / file)
        if GGUF in FORMATS_OF.get(name, FILES):
            files[name][GGUF] = [f"{name}.gguf", f"{name}-gguf.safetensors"]
            save_file(make_gguf(folder / f"{name}.gguf", "Q8_0", plain), folder / f"{name}-gguf.safetensors")
    if "aura" in wanted:
        files["aura"] = {"scaled fp8": ["fp8-aura.safetensors"] * 2}
    return inside.run("own_class_graphs", wanted=wanted, quantised=files)[0]


@pytest.mark.parametrize(("model", "case"), cases(EQUAL))
def test_a_graph_does_what_it_does_natively(found, model, case):
    assert found[f"{model}, {case}"].get("share", 1.0) <= LIMIT, found[f"{model}, {case}"]


@pytest.mark.parametrize(("model", "case"), cases(FILES, ("stages", "ulysses", "tensor")))
def test_a_quantised_file_gives_what_it_gives_natively(found, model, case):
    limit = ROUNDED if case.startswith("int8") else LIMIT
    assert found[f"{model}, {case}"].get("share", 1.0) <= limit, found[f"{model}, {case}"]


@pytest.mark.parametrize(("model", "case"), cases(REFUSED))
def test_what_does_not_reach_the_class_is_refused_by_name(found, model, case):
    error = found[f"{model}, {case}"]["error"]
    begins = REFUSED[case.rpartition(", ")[0]]
    assert error.startswith(f"ValueError: {begins}"), error
