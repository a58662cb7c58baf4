"""A guider with a MODEL for each side gives what it gives with ComfyUI's own, whichever of them are on ranks."""

import pytest

pytestmark = [pytest.mark.comfyui, pytest.mark.full]


def test_dual_model_guider_equals_native_models(inside):
    found = inside.run("dual_model")[0]
    assert found.pop("one for both sides") > 1e-2  # the control
    assert found == {way: pytest.approx(0, abs=5e-5) for way in ("one of them on ranks", "both on ranks")}
