"""Skip Layer Guidance on ComfyUI's own class on ranks, against ComfyUI's own MODEL. Run by serve.py."""

from functools import partial

from block_patches import ALL, SOME, extra, load_extras
from boot import BASE, Results, comfy, difference, ksampler, sharing_small_lists, torch
from families import detecting
from own_classes import MODES
from small_models import detected, latent, prompts, write


def main(results: Results, name: str, modes: dict[str, list[str]]) -> None:
    """`modes`: by node."""
    load_extras("nodes_slg")
    change = {
        "every step": partial(extra, "SkipLayerGuidanceDiT", double_layers="1", single_layers="0, 9", scale=3.0, **ALL),
        "simple": partial(extra, "SkipLayerGuidanceDiTSimple", double_layers="0", single_layers="1", **SOME),
    }
    with detecting(detected(name)), sharing_small_lists():
        write(name)
        file = f"{name}.safetensors"
        native = comfy.sd.load_diffusion_model(
            str(BASE / "models" / "diffusion_models" / file), model_options={"dtype": torch.float32}
        )

        def sampled(model) -> torch.Tensor:
            return ksampler(model, prompts(name), latent(name), steps=2)

        plain = sampled(native)

        def compare(node: str, make) -> dict:
            wanted, model = sampled(change[node](native)), make(file)
            found = sampled(change[node](model))
            wrappers = model.get_all_wrappers(comfy.patcher_extension.WrappersMP.SAMPLER_SAMPLE)
            largest = float(wanted.abs().max())
            return {
                "share": difference(wanted, found) / largest,
                "effect": difference(wanted, plain) / largest,
                "whole because": [wrapper.last.reason for wrapper in wrappers],
            }

        for node, of_node in modes.items():
            for mode in of_node:
                results.case(f"{node}, {mode}", partial(compare, node, MODES[mode]))
