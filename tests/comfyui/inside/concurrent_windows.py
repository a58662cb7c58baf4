"""Context windows on two ranks, several at a time and one by one, beside ComfyUI's own model. Run by serve.py."""

from collections.abc import Callable
from contextlib import contextmanager
from functools import partial

from boot import Results, comfy, difference, ksampler, native_model, parallel, torch
from comfy.context_windows import IndexListCallbacks, IndexListContextHandler
from comfy_extras.nodes_context_windows import WanContextWindowsManualNode
from concurrent_conds import counted, shortened
from small_cases import small
from small_models import prompts as prompts_of

from parallel_backend.client.registry import registry

T2V, I2V, STEPS, FRAMES, SIZE = "wan-2.1-t2v", "wan-2.1-i2v", 2, 9, (8, 6)
SAMPLE = comfy.patcher_extension.WrappersMP.SAMPLER_SAMPLE


def in_windows(model, **settings):
    """The MODEL with 4 windows of 3 of the 9 latent frames."""
    settings = {"context_schedule": "standard_static", "fuse_method": "pyramid", "freenoise": True} | settings
    return WanContextWindowsManualNode.execute(model, 9, 4, context_stride=1, closed_loop=False, **settings).args[0]


def handler_of(model) -> IndexListContextHandler:
    return model.model_options["context_handler"]


def one_by_one(model):
    plain = model.clone()
    plain.remove_wrappers_with_key(SAMPLE, "parallel_dit_concurrent_conds")
    return plain


@contextmanager
def open_calls():
    """For each model call: the number of calls without a result at its beginning, and a number for its latent and text."""
    remote, found, is_open = registry().present(), [], []
    predict = remote.predict

    def noted(call, *arguments):
        is_open.append(call)
        found.append((len(is_open), float(call.x.sum()) + call.tensors["context"].shape[1]))
        try:
            return predict(call, *arguments)
        finally:
            is_open.pop()

    remote.predict = noted
    try:
        yield found
    finally:
        del remote.predict


def prompts_for_all_frames(name: str) -> list:
    """The small model's prompts, of which an image has a value for each frame."""
    g, found = torch.Generator().manual_seed(7), prompts_of(name)
    for ((_, extras),) in found:
        for entry, channels in (("concat_latent_image", 16), ("concat_mask", 1)):
            if entry in extras:
                extras[entry] = torch.rand(1, channels, FRAMES, *SIZE, generator=g)
    return found


def sampled(model, prompts, cfg: float = 3.0) -> torch.Tensor:
    return ksampler(model, prompts, torch.zeros(1, 16, FRAMES, *SIZE), steps=STEPS, cfg=cfg)


def counted_calls(model, *arguments) -> dict:
    """Side by side and one by one."""
    with open_calls() as found_apart:
        apart = sampled(one_by_one(model), *arguments)
    with open_calls() as found:
        together, counts = counted(lambda: sampled(model, *arguments))
    in_order = [call for _, call in found] == [call for _, call in found_apart]
    open_at_once = {"open": [count for count, _ in found], "open apart": max(count for count, _ in found_apart)}
    return counts | open_at_once | {"in order": in_order, "same": difference(together, apart), "result": together}


def beside_native(name: str, prompts: list, cfg: float, degrees: dict, settings: dict) -> dict:
    file = f"{name}.safetensors"
    expected = sampled(in_windows(native_model(file), **settings), prompts, cfg)
    model = in_windows(parallel(file, **degrees), **settings)
    sampled(model, prompts, cfg)  # loads the ranks
    found = counted_calls(model, prompts, cfg)
    return found | {"native": difference(found.pop("result"), expected), "largest": float(expected.abs().max())}


def main(results: Results) -> None:
    replicas, stages = {"pipe": 1, "batch": 2}, {"pipe": 2, "batch": 1}
    with small(T2V):
        prompts = prompts_for_all_frames(T2V)
        unequal = (prompts[0], shortened(prompts[1], 6))
        for name, degrees in (("replicas", replicas), ("stages", stages)):
            results.case(f"{name}, cfg 1", partial(beside_native, T2V, prompts, 1.0, degrees, {}))
            results.case(f"{name}, cfg 3", partial(beside_native, T2V, prompts, 3.0, degrees, {}))
        changed = {"fuse_method": "relative", "context_schedule": "looped_uniform"}
        results.case("replicas, unequal prompts", partial(beside_native, T2V, unequal, 3.0, replicas, changed))
        of_other_nodes(results, parallel(f"{T2V}.safetensors", **replicas), prompts)
    with small(I2V):
        changed = {"retain_first_frame": True, "fuse_method": "overlap-linear"}
        results.case("stages, image", partial(beside_native, I2V, prompts_for_all_frames(I2V), 1.0, stages, changed))


def of_other_nodes(results: Results, plain, prompts: list) -> None:
    """What another pack's handler may do, and what ends a step early."""

    class Resizing(IndexListContextHandler):
        fails = False

        def get_resized_cond(self, conds, x_in, window, *arguments):
            if self.fails and window.index_list[0] > 3:
                raise ValueError("another pack's mistake")
            return super().get_resized_cond(conds, x_in, window, *arguments)

    class Ordered(IndexListContextHandler):
        def execute(self, *arguments):
            return super().execute(*arguments)

    def with_class(kind: type):
        model = in_windows(plain)
        handler_of(model).__class__ = kind
        return model

    def case(name: str, model) -> None:
        results.case(name, lambda: {**counted_calls(model, prompts, 1.0), "result": None})

    resizing, notified = with_class(Resizing), in_windows(plain)
    kind, calls = IndexListCallbacks.EVALUATE_CONTEXT_WINDOWS, []
    comfy.patcher_extension.add_callback(kind, lambda *_: calls.append(None), handler_of(notified).callbacks)
    stateful = in_windows(plain)
    stateful.set_model_unet_function_wrapper(lambda apply, given: apply(given["input"], given["timestep"], **given["c"]))
    case("another pack's conditioning", resizing)
    case("another pack's order", with_class(Ordered))
    case("another pack is notified", notified)
    case("another pack's model function", stateful)

    def ended(end: Callable) -> dict:
        """A run that ends in the middle of a step, and the next one."""
        expected = sampled(resizing, prompts, 1.0)
        attributes, raised = set(vars(handler_of(resizing))), None
        with open_calls() as found:
            try:
                end()
                sampled(resizing, prompts, 1.0)
            except (ValueError, comfy.model_management.InterruptProcessingException) as error:
                raised = type(error).__name__
        handler_of(resizing).fails = False
        left = sorted(set(vars(handler_of(resizing))) - attributes - {"fails"})
        again = difference(sampled(resizing, prompts, 1.0), expected)
        return {"raised": raised, "open": [count for count, _ in found], "left": left, "again": again}

    results.case("error", lambda: ended(lambda: setattr(handler_of(resizing), "fails", True)))
    results.case("cancelled", lambda: ended(_cancel_at_the_third_call))


def _cancel_at_the_third_call() -> None:
    remote, posted = registry().present(), []
    post = remote.post

    def counted_post(call) -> None:
        posted.append(call)
        if len(posted) == 3:
            del remote.post
            comfy.model_management.interrupt_current_processing(True)
        post(call)

    remote.post = counted_post
