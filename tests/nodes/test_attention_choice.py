"""Kernels that other nodes put on a MODEL: known by the names of their functions, which are made here as the nodes do."""

import functools
import types
from types import SimpleNamespace

import pytest

from parallel_backend.core.attention_kernels import SAGE_VARIANTS
from parallel_backend.own_class.built.built_class import built_class
from testing import mini

FAMILY = built_class(mini.proven())
BLOCKS = 8


def in_module(function, module, qualname):
    function.__module__, function.__qualname__ = module, qualname
    return function


def by_core(name):
    """As ModelPatcher.set_model_optimized_attention."""

    def optimized_attention(): ...

    optimized_attention.__name__ = name

    def optimized_attention_override(_, *args, **kwargs):
        return optimized_attention(*args, **kwargs)

    where = "ModelPatcher.set_model_optimized_attention.<locals>.optimized_attention_override"
    return in_module(optimized_attention_override, "comfy.model_patcher", where)


def calling(name, *texts):
    """A function whose closure has the package's function of this name, which it calls with these texts."""

    def packages(): ...

    def function():
        return packages

    code = function.__code__.replace(co_freevars=(name,), co_consts=(None, *texts))
    return types.FunctionType(code, {}, closure=function.__closure__)


def by_kj(mode):
    """As Patch Sage Attention of KJNodes: a function of the package behind two closures and two decorators."""
    name, options = SAGE_VARIANTS.get(mode, ("sageattn" if mode == "auto" else mode, {}))
    sage_func = calling(name, *options.values())

    @functools.wraps(sage_func)
    def uncompiled(*args):
        return sage_func(*args)

    def attention_sage(q):
        return uncompiled(q)

    @functools.wraps(attention_sage)
    def new_attention(*args):
        return attention_sage(*args)

    def attention_override_sage(func, *args):
        return new_attention.__wrapped__(*args)

    where = "PathchSageAttentionKJ.patch.<locals>.attention_override_sage"
    return in_module(attention_override_sage, "/custom_nodes/kjnodes.nodes.model_optimization_nodes", where)


def flash_by_kj():
    where = "PatchFlashAttentionKJ.patch.<locals>.attention_override_flash"
    return in_module(lambda func, *args: None, "kjnodes.nodes.model_optimization_nodes", where)


@pytest.mark.parametrize(
    ("name", "over_exact", "over_sage"),
    [
        ("attention_pytorch", "", "sdpa"),
        ("attention_split", "", "sdpa"),
        ("attention_flash", "", "flash"),
        ("attention_sage", "sage", "sage"),
        ("attention_comfy_kitchen_int8", "comfy_kitchen", "comfy_kitchen"),
        ("attention3_sage", None, None),
        ("attention_of_a_newer_comfyui", None, None),
    ],
)
def test_comfyuis_own_kernels(module, name, over_exact, over_sage):
    chosen = module("model.patches.attention_choice").chosen_attention
    assert chosen(by_core(name), "auto") == chosen(by_core(name), "flash") == over_exact
    assert chosen(by_core(name), "auto/sage") == chosen(by_core(name), "sage") == over_sage


@pytest.mark.parametrize("mode", ["auto", *SAGE_VARIANTS])
def test_patch_sage_attention_is_known_by_the_function_that_it_calls(module, mode):
    chosen = module("model.patches.attention_choice").chosen_attention(by_kj(mode), "auto")
    assert chosen == ("sage" if mode == "auto" else f"sage.{mode}")


def test_patch_flash_attention(module):
    chosen = module("model.patches.attention_choice").chosen_attention
    assert (chosen(flash_by_kj(), "auto"), chosen(flash_by_kj(), "auto/sage")) == ("", "flash")


@pytest.mark.parametrize(
    "other", [by_kj("sageattn3_blackwell"), lambda func, *args: func(*args), "text", by_core("attention3_sage")]
)
def test_another_one_is_left_to_be_refused(module, other):
    assert module("model.patches.attention_choice").chosen_attention(other, "auto") is None
    assert module("model.patches.block_patches").kernel_of_call(other, "auto", "") == ("", other)


def test_a_known_one_becomes_the_calls_kernel(module):
    assert module("model.patches.block_patches").kernel_of_call(by_kj("fp8_cuda"), "auto", "") == ("sage.fp8_cuda", None)


@pytest.mark.parametrize(
    ("layers", "loaded", "expected"),
    [
        (BLOCKS, "auto", "comfy_kitchen"),
        (BLOCKS, "auto/sage", "comfy_kitchen"),
        (BLOCKS + 3, "auto", "comfy_kitchen"),  # the text's refiner too
        (BLOCKS - 1, "auto", ""),
        (0, "auto", ""),
        (BLOCKS, "flash", ""),
    ],
)
def test_what_a_file_asks_for_is_taken_where_all_blocks_have_it_and_the_user_has_not_chosen(
    module, layers, loaded, expected
):
    attention = {f"layer {index}": "comfy_kitchen" for index in range(layers)}
    checkpoint = SimpleNamespace(attention=attention, built=FAMILY)
    preferred = module("model.patches.attention_choice").preferred_attention(checkpoint, loaded)
    assert preferred == expected
    kernel_of_call = module("model.patches.block_patches").kernel_of_call
    assert kernel_of_call(None, loaded, preferred) == (expected, None)
    assert kernel_of_call(by_kj("fp8_cuda"), loaded, preferred) == ("sage.fp8_cuda", None)
