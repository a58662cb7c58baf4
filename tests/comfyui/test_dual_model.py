"""A guider with a MODEL for each side gives what it gives with ComfyUI's own, whichever of them are on ranks."""

import pytest

from testing.cases import ideogram4
from tests.comfyui.test_families import save_case

pytestmark = [pytest.mark.comfyui, pytest.mark.full]


def test_dual_model_guider_equals_native_models(inside, base):
    case = ideogram4.CASES[0]
    save_case(case, base)
    other = case.model(case.native.config)
    for parameter in other.parameters():
        parameter.data *= 1.1
    case.save(other, base / "models/diffusion_models/without-text.safetensors", case.native.config)
    found = inside.run("dual_model", name=case.name, other="without-text")[0]
    assert found.pop("one for both sides") > 1e-2  # the control
    assert found == {way: pytest.approx(0, abs=case.native.limit) for way in ("one of them on ranks", "both on ranks")}
