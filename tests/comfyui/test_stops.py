"""A band's call stops the host nowhere on ComfyUI's device, which rank 0 keeps busy: in ComfyUI's own samplers and model."""

import pytest

pytestmark = pytest.mark.comfyui

SAMPLERS = ("euler", "dpmpp_2m", "dpmpp_2m_sde")


@pytest.fixture(scope="module")
def found(inside):
    return inside.run("stops", samplers=SAMPLERS)[0]


@pytest.fixture(params=SAMPLERS)
def got(found, request):
    assert "error" not in found[request.param], found[request.param]
    return found[request.param]


def test_bands_give_what_they_give_where_all_is_on_the_host(got):
    assert got["difference"] == 0.0


def test_a_bands_call_stops_the_host_nowhere(got):
    assert [stop for stop in got["stops"] if stop.startswith("band ")] == []


def test_the_run_itself_is_seen_to_stop_it(got):
    """The control: latent and conditioning are copied to the host once, and ComfyUI's own code looks at its device."""
    assert any("host_sampling.py" in stop for stop in got["stops"])
