"""Controls that add to all tokens, on the parallel MODEL, against ComfyUI's own model with the same. Run by serve.py.

"two": two of them, the second one ends after the first step. "patched": one, with a LoRA of a layer that runs in ComfyUI's
process too. A branch that starts from a later block's input depends on blocks, which ranks have: it is refused, and so is
a ControlNet beside a branch.
"""

from functools import partial

from block_patches import load_extras
from boot import Results, difference, native_model, node, parallel, sequence, torch
from control_branch.nodes_minimax_h3 import Branch, controlled, copies
from small_cases import sample, small

NAME, LAYER = "minimax-h3-pruned", "diffusion_model.video_patch_proj.weight"
ALWAYS, FIRST_STEP = (0.0, 1e9), (0.99, 1e9)


def main(results: Results) -> None:
    load_extras("nodes_minimax_h3")
    results.case(NAME, partial(compare, NAME))


def compare(name: str) -> dict:
    file = f"{name}.safetensors"
    with small(name):
        native = native_model(file)
        last = len(native.model.diffusion_model.blocks) - 1
        branches = {seed: copies(native, at, seed) for seed, at in ((1, (0, last)), (2, (0, 1)), (3, (1,)))}
        change = torch.randn(native.model.state_dict()[LAYER].shape, generator=torch.Generator().manual_seed(3)) * 0.05

        def two(model):
            first = controlled(model, Branch(branches[1], 0.3, ALWAYS, seed=1))
            return controlled(first, Branch(branches[2], 0.3, FIRST_STEP, seed=2))

        def patched(model):
            clone = model.clone()
            clone.add_patches({LAYER: ("diff", (change,))}, 0.7)
            return controlled(clone, Branch(branches[1], 0.3, ALWAYS, seed=1))

        apply = {"two": two, "patched": patched}
        expected = {case: sample(with_it(native), name) for case, with_it in apply.items()}
        found = {"moved": {case: difference(each, sample(native, name)) for case, each in expected.items()}}
        modes = {
            "one rank": parallel(file, pipe=1, devices="cpu"),
            "pipe 2": parallel(file, stage_split="even"),
            "ulysses 2": parallel(file, pipe=1, config=sequence(ulysses=2)),
            "pipefusion": node("ApplyPipeFusion", parallel(file, stage_split="even"), 3, 1, True),
        }
        for mode, model in modes.items():
            found[mode] = {case: difference(each, sample(apply[case](model), name)) for case, each in expected.items()}
            if "pipefusion" not in mode:  # which cuts a run without a control into bands
                found[mode]["again without"] = difference(sample(native, name), sample(model, name))
        try:
            sample(controlled(modes["one rank"], Branch(branches[3], 0.3, ALWAYS, seed=3)), name)
        except ValueError as error:
            found["later"] = str(error)
        beside = controlled(modes["one rank"], Branch(branches[1], 0.3, ALWAYS, seed=1))
        beside.set_model_unet_function_wrapper(with_controlnet)
        try:
            sample(beside, name)
        except ValueError as error:
            found["controlnet"] = str(error)
    return found


def with_controlnet(apply, call: dict) -> torch.Tensor:
    """A model call as with a ControlNet, which these models have none of."""
    return apply(call["input"], call["timestep"], **call["c"], control={"input": [torch.zeros(1, 1, 1)]})
