"""ZImageFunControlnet on the parallel MODEL, against ComfyUI's own model with the same. Run by serve.py.

The control networks are ComfyUI's own class as ModelPatchLoader makes it of the three kinds of files, but for their width,
with random weights.
"""

from block_patches import load_extras
from boot import Results, comfy, difference, ksampler, native_model, node, parallel, sequence, torch, whole_because
from controlnet import FakeVAE, randomise
from small_cases import small
from small_models import small_model

MODEL = "z-image"
PATCHED = ("noise_refiner.0.feed_forward.w2.weight", "layers.0.feed_forward.w2.weight")
"""By a LoRA: a layer that is run in ComfyUI's process too, and one that is not."""
USED = 2
"""Blocks of a network that a model of three blocks gets to."""
REFINING = {"n_control_layers": 15, "additional_in_dim": 17, "refiner_control": True}
KINDS = {  # as files of 1.0, of 2.1, and those of 2.0 whose own refiners are empty
    # Not 6 blocks: ComfyUI's patch then keeps a state from call to call in a model that ends before the last of them.
    "first": {"n_control_layers": 15},
    "refining": REFINING,
    "broken": REFINING | {"broken": True},
}


def network(width: int, heads: int, seed: int, kind: dict, used: int = USED):
    """What ModelPatchLoader gives out."""
    model = comfy.ldm.lumina.controlnet.ZImage_Control(
        dim=width,
        n_heads=heads,
        n_kv_heads=heads,
        multiple_of=1,
        dtype=torch.bfloat16,
        device="meta",
        operations=comfy.ops.manual_cast,
        **kind,
    )
    model.control_layers = model.control_layers[:used]
    cpu = torch.device("cpu")
    model.to_empty(device=cpu)
    return comfy.model_patcher.ModelPatcher(randomise(model, seed).to(torch.bfloat16), load_device=cpu, offload_device=cpu)


def main(results: Results) -> None:
    load_extras("nodes_model_patch")
    generator = torch.Generator().manual_seed(0)
    words = small_model(MODEL)["text"]
    texts = {name: [torch.randn(1, *words, generator=generator) for _ in range(2)] for name in ("inpaint", "two")}
    texts["two"][1] = texts["two"][1][:, :5]  # two calls a step
    picture, behind = (torch.rand(1, 96, 96, 3, generator=generator) for _ in range(2))
    fitting = torch.rand(1, 8 * 18, 8 * 14, 3, generator=generator)
    mask = (torch.rand(1, 96, 96, generator=generator) > 0.5).float()
    latent = torch.zeros(1, 16, 18, 13)
    file = f"{MODEL}.safetensors"
    with small(MODEL):
        native = native_model(file)
        config = native.model.model_config.unet_config
        networks = {
            name: network(config["dim"], config["n_heads"], seed, kind) for seed, (name, kind) in enumerate(KINDS.items())
        }
        keys = [f"diffusion_model.{name}" for name in PATCHED]
        shape = native.model.state_dict()[keys[0]].shape
        change = torch.randn(shape, generator=generator) * 0.05

        def controlled(model, kind: str, strength: float, **pictures):
            return node("ZImageFunControlnet", model, networks[kind], FakeVAE(None), strength=strength, **pictures)

        def inpaint(model):
            clone = model.clone()
            clone.add_patches({key: ("diff", (change,)) for key in keys}, 0.7)
            return controlled(clone, "refining", 0.8, image=picture, inpaint_image=behind, mask=mask)

        def two(model):
            """A picture of the latent's size: a control that encodes another one drops the other control's state, once."""
            return controlled(controlled(model, "first", 0.8, image=fitting), "broken", 0.5, image=fitting)

        def sample(name: str, model) -> torch.Tensor:
            return ksampler(model, [[[each, {}]] for each in texts[name]], latent, steps=2)

        def compare(name: str, change, model) -> dict:
            expected, plain = sample(name, change(native)), sample(name, native)
            found = sample(name, change(model))
            return {
                "difference": difference(expected, found),
                "moved": difference(expected, plain),
                "whole because": whole_because(model),
            }

        piped = node("ApplyPipeFusion", parallel(file, stage_split="even"), 3, 1, True)
        results.case("two, pipe 2", lambda: compare("two", two, piped))
        over_tokens = parallel(file, pipe=1, config=sequence(ulysses=2))
        results.case("inpaint, ulysses 2", lambda: compare("inpaint", inpaint, over_tokens))
