"""A pack whose nodes reach into a MODEL in the ways in which other packs do. Each has the name of what it does.

`outside`: a function of the pack that a node uses, as TeaCache and WaveSpeed have them.
"""

from unittest.mock import patch

import torch
from comfy.patcher_extension import WrappersMP


def outside(executor, *arguments, **named):
    return executor(*arguments, **named)


def kernel(*_arguments, **_named):
    return None


def blocks_outside(executor, *arguments, **named):
    for block in executor.class_obj.double_blocks:
        block.forward = torch.nn.Identity()
    return executor(*arguments, **named)


class Node:
    INPUT_TYPES = classmethod(lambda cls: {"required": {"model": ("MODEL",)}})
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "meddle"
    CATEGORY = "tests"

    def meddle(self, model):
        clone = model.clone()
        self.put(clone)
        return (clone,)


class ForwardCache(Node):
    """As TeaCache."""

    def put(self, model):
        stub = model.get_model_object("diffusion_model")
        context = patch.multiple(stub, forward_orig=lambda *_arguments, **_named: None)

        def around(apply_model, call):
            with context:
                return apply_model(call["input"], call["timestep"], **call["c"])

        model.set_model_unet_function_wrapper(around)


class BlockCompile(Node):
    def put(self, model):
        model.add_object_patch("diffusion_model.double_blocks.0", torch.nn.Identity())


class LayerPatch(Node):
    def put(self, model):
        model.model.diffusion_model.img_in.forward = torch.nn.Identity()


class Nothing(Node):
    def put(self, model):
        model.model_options["transformer_options"]["a_note_of_nothing"] = None
        model.model_options["transformer_options"]["regional_conditioning_weight"] = 0.5


class OwnKernel(Node):
    def put(self, model):
        model.model_options["transformer_options"]["optimized_attention_override"] = kernel


class Wrapper(Node):
    def put(self, model):
        model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "meddling", outside)


class BlockWrapper(Node):
    def put(self, model):
        model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "meddling", blocks_outside)


NODES = (ForwardCache, BlockCompile, LayerPatch, Nothing, OwnKernel, Wrapper, BlockWrapper)
NODE_CLASS_MAPPINGS = {f"Meddling{kind.__name__}": kind for kind in NODES}
