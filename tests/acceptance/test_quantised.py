"""The self-test's check of quantised layers passes on a CPU. It sees a wrong product, and a weight expanded wrongly."""

from parallel_backend.acceptance import checks, kernels
from parallel_backend.acceptance.session import SelfTestSession, Settings
from parallel_backend.checkpoints.quantised_formats import Quantised
from parallel_backend.rank.stage.quantised_products import KitchenWeight


def look(monkeypatch, *layers) -> checks.Result:
    monkeypatch.setattr(kernels, "LAYERS", layers or kernels.LAYERS)
    return checks.look("quantised", SelfTestSession(Settings(("cpu", "cpu"))))


def test_every_format_passes_on_a_cpu_and_is_multiplied_where_it_can_be(monkeypatch):
    result = look(monkeypatch)
    assert result.status == checks.PASSED, result.why
    how = {name.partition(" on ")[0]: word for name, word in result.figures.items() if name.endswith("how")}
    multiplied = {name for name, word in how.items() if "multiplied by comfy-kitchen" in word}
    assert multiplied == {name for name in how if name.startswith(("int8", "convrot", "asym", "awq"))}
    assert all("expanded to float32" in how[name] for name in how.keys() - multiplied)


def test_a_wrong_product_is_seen(monkeypatch):
    rotated = next(layer for layer in kernels.LAYERS if layer.rotation and layer.format == "int8_tensorwise")
    multiply = KitchenWeight.linear
    monkeypatch.setattr(KitchenWeight, "linear", lambda weight, x, bias: multiply(weight, x, bias) * 1.05)
    result = look(monkeypatch, rotated)
    assert result.status == checks.FAILED and "its product from the expanded weight's is 0.05" in result.why


def test_a_weight_that_a_device_expands_otherwise_is_seen(monkeypatch):
    expand, seen = Quantised.expand, []

    def once_right(packing, packed, dtype):
        seen.append(packed)
        return expand(packing, packed, dtype) * (1.0 if len(seen) == 1 else 1.001)

    monkeypatch.setattr(Quantised, "expand", once_right)
    result = look(monkeypatch, kernels.LAYERS[0])
    assert result.status == checks.FAILED and "its weight from a CPU's is 0.001" in result.why
