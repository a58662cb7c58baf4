"""Of which packages ranks build classes, and which attention of a class they reach."""

import json
import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch.nn.functional as F

from parallel_backend.acceptance.tiny_model import TINY, call
from parallel_backend.client.proven_class import call_of, proven
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.own_class import OwnClass
from parallel_backend.own_class.built.building import class_of, imported
from parallel_backend.quickstart import mini_flux
from parallel_backend.wire.encoding import Encoding
from tests.support.planted_comfyui import planted, planted_comfyui

COMFYUI = replace(TINY, module="comfy.ldm.flux.model", folder="/nowhere", settings=(("comfy.cli_args", "args.cpu", True),))


@pytest.mark.parametrize(
    "module", ["os", "comfy.model_base", "comfy.ldmx.model", "parallel_backend.client.loading", "quickstart.mini_flux", ""]
)
def test_a_module_of_no_package_is_refused(module):
    with pytest.raises(ValueError, match="ranks do not build the class"):
        replace(TINY, module=module)


@pytest.mark.parametrize(
    "change", [{"settings": (("os", "environ", True),)}, {"imports": ("subprocess",)}, {"imports": ("comfyx.other",)}]
)
@pytest.mark.parametrize("own", [TINY, COMFYUI], ids=["ours", "ComfyUI's"])
def test_what_is_imported_beside_it_is_of_the_package(own, change):
    with pytest.raises(ValueError, match="ranks do not build the class"):
        replace(own, **change)


def test_a_message_cannot_name_another_module():
    encoding = Encoding((OwnClass,))
    text = encoding.encode(TINY)[0].decode()
    assert encoding.decode(text.encode())[0].message == TINY
    with pytest.raises(ValueError, match="ranks do not build the class"):
        encoding.decode(text.replace(json.dumps(TINY.module), '"subprocess"').encode())


@pytest.mark.parametrize("name", ["attention", "F", "Sequence", "nn"])
def test_what_is_no_model_of_the_module_is_not_built(name):
    with pytest.raises(ValueError, match="has no model"):
        class_of(replace(TINY, name=name))


def test_attention_by_another_function_is_not_seen_and_refused(monkeypatch):
    def other(q, k, v, heads, skip_reshape):
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    monkeypatch.setattr(mini_flux, "attention", other)
    x, _, tensors = call()
    with pytest.raises(ValueError, match=r"^Set ulysses_degree to 1: .* its attention cannot be reached"):
        proven(TINY, call_of(x, tensors), Degrees(ulysses=2), "it")


def test_what_a_second_class_names_is_imported_too():
    """The first one has imported ComfyUI."""
    with planted_comfyui(), mock.patch.dict(sys.modules):
        sys.modules.pop(other := "xml.sax.saxutils", None)
        second = planted("Right")
        imported("/nowhere", second.module, second.name, (), (other,))
        assert other in sys.modules
