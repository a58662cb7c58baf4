"""A module goes to ranks as data, and is the same there; classes of other packages do not."""

import json

import pytest
import torch
from torch import nn

from parallel_backend.own_class.built.module_tree import Importing, built, described, set_constants
from testing import vae_class
from testing.vaes import small_vae

HERE = Importing("", ())


def attention(*_arguments: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError


def sent(module: nn.Module, **tensors: torch.Tensor) -> nn.Module:
    return built(json.loads(json.dumps(described(module))), HERE, module.state_dict() | tensors, attention)


def test_a_module_is_the_same_with_its_tensors():
    vae = small_vae()
    tree = json.loads(json.dumps(described(vae, without=("encoder",))))
    found = built(tree, HERE, vae.state_dict(), vae_class.one_head)
    x = torch.randn(1, 4, 3, 2)
    assert torch.equal(found.decode(x), vae.decode(x))
    assert not hasattr(found, "encoder")


def test_values_keep_their_types_and_functions_are_replaced():
    module = nn.Conv2d(1, 1, 3)
    module.kept = {"a": [1, (2.5, None)], 3: range(4)}
    module.dtype, module.attend, module.left_out = torch.float16, vae_class.one_head, object()
    module.register_buffer("unsaved", torch.ones(1), persistent=False)
    found = sent(module, unsaved=torch.ones(1))
    assert (found.kernel_size, found.kept, found.dtype) == ((3, 3), module.kept, torch.float16)
    assert found.attend is attention
    assert not hasattr(found, "left_out")
    assert found.get_buffer("unsaved") == 1


def test_classes_of_other_packages_are_refused():
    class Foreign(nn.Module):
        pass

    with pytest.raises(ValueError, match="ranks do not build the class"):
        described(nn.Sequential(Foreign()))
    tree = {"class": ["subprocess", "Popen"], "values": {}, "children": {}, "parameters": [], "buffers": []}
    for module, name in (("subprocess", "Popen"), ("testing.vae_class", "one_head")):
        with pytest.raises(ValueError, match=r"ranks do not build the class|has no model"):
            built(tree | {"class": [module, name]}, HERE, {}, attention)
    with pytest.raises(ValueError, match="ranks set nothing in os"):
        set_constants([("os", "environ", {})])
