"""Samplers of ComfyUI on a video with its sound: its own model, ranks, and bands. Run by serve.py.

The test process has put the file of the case `name` and its inputs where families.py finds them.
"""

from functools import partial
from unittest.mock import patch

import comfy.weight_adapter
import latent_preview
from boot import BASE, Results, by_own_class, comfy, difference, ksampler, node, parallel, parts_of, sequence, torch
from comfy.ldm.minimax.model import MiniMaxH3Model
from comfy.nested_tensor import NestedTensor
from comfy_extras.nodes_apg import APG
from comfy_extras.nodes_minimax_h3 import MiniMaxH3SigmaShift
from families import read
from samplers import Warnings, logging

STEPS = 4


def main(results: Results, name: str, samplers: list[str]) -> None:
    logging.getLogger().addHandler(told := Warnings())
    positive, negative, masked, _ = read(name)
    prompts, (video, sound) = (positive, negative), masked["samples"].unbind()
    empty, generator = {"samples": masked["samples"]}, torch.Generator().manual_seed(1)
    picture = NestedTensor([torch.randn(part.shape, generator=generator) for part in (video, sound)])
    odd = NestedTensor((video[..., :-1, :-1], sound))
    two = NestedTensor([torch.cat((part, part)) for part in (video, sound)])
    path = BASE / "models" / "diffusion_models" / f"{name}.safetensors"
    native = comfy.sd.load_diffusion_model(str(path), model_options={"dtype": torch.float32})
    plain = parallel(path.name)
    banded, warm = node("ApplyPipeFusion", plain, 3, 1, True), node("ApplyPipeFusion", plain, 3, 1000, True)

    def run(model, latent=empty, steps=STEPS, **settings):
        return ksampler(model, prompts, latent, steps=steps, cfg=1.0, **settings)

    def in_every_way(by_native: bool = True, put=lambda model: model, **settings) -> dict:
        """`put`: puts a node on the MODEL."""
        exact = run(put(plain), **settings)
        told.texts.clear()
        stale = run(put(banded), **settings)
        found = {"warnings": list(told.texts), "stale": difference(exact, stale)}
        found["warm"] = difference(exact, run(put(warm), **settings))
        if by_native:
            found["native"] = difference(exact, run(put(native), **settings))
        return found | {"finite": all(bool(part.isfinite().all()) for part in (*parts_of(exact), *parts_of(stale)))}

    results.case("all samplers", lambda: comfy.samplers.SAMPLER_NAMES)
    for sampler in samplers:
        results.case(f"sampler {sampler}", partial(in_every_way, sampler=sampler))
    with_masks = partial(in_every_way, latent={"samples": picture, "noise_mask": masked["noise_mask"]})
    results.case("masks", with_masks)
    with patch.object(MiniMaxH3Model, "forward", multiplied(MiniMaxH3Model.forward)):
        results.case("masks that multiply outputs", with_masks)
    results.case("denoise 0.5", partial(in_every_way, latent={"samples": picture}, denoise=0.5))
    results.case("odd size", partial(in_every_way, latent={"samples": odd}))
    guidance = partial(in_every_way, put=lambda model: APG.execute(model, 0.5, 4.0, -0.5).result[0])
    results.case("guidance of the whole latent", guidance)
    results.case("batch 2", partial(in_every_way, False, latent={"samples": two}))  # which the native model refuses
    own = {kind: shifted(model) for kind, model in {"native": native, "plain": plain, "warm": warm}.items()}
    results.case("shifts", lambda: {kind: difference(run(own["native"]), run(model)) for kind, model in own.items()})
    results.case("no shifts", lambda: {"native": difference(run(own["native"]), run(native))})
    own = by_own_class(parallel, path.name)
    results.case(
        "batch 2 by own class", lambda: {"difference": difference(run(plain, {"samples": two}), run(own, {"samples": two}))}
    )
    results.case("output heads", lambda: output_heads(run, plain, own))
    models = {"plain": plain, "bands": banded}
    results.case("step cache", lambda: {kind: forecast(run, model) for kind, model in models.items()})
    models["native"] = native
    results.case("previews", lambda: {kind: previews(run, model) for kind, model in models.items()})
    results.case("cancelled", partial(cancelled, run, banded))
    results.case("after the cancellation", in_every_way)
    results.case("one latent", partial(run, plain, picture.unbind()[0]))
    displaced, naive = (
        parallel(path.name, 1, config=sequence(1, 1, *patches)) for patches in (("displaced", 2, 1000), ("naive", 2))
    )
    exact = run(plain)
    results.case("displaced, all steps warm-up", lambda: {"difference": difference(exact, run(displaced))})
    results.case(
        "naive", lambda: {"difference": difference(exact, run(naive)), "repeat": difference(run(naive), run(naive))}
    )


def multiplied(forward):
    """H3's `forward` as from ComfyUI 0.34 on: it multiplies each output by its mask before it scales the sound."""

    def newer(self, x, timestep, context, transformer_options={}, denoise_mask=None, audio_denoise_mask=None, **named):  # noqa: B006
        masks = {"denoise_mask": denoise_mask, "audio_denoise_mask": audio_denoise_mask}

        def inside(run, *arguments, **given):
            found = run(*arguments, **given)
            return [out if mask is None else out * mask for out, mask in zip(found, masks.values(), strict=True)]

        kinds = transformer_options.get("wrappers", {})
        ours = {comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL: {"masks": [inside]}}
        return forward(self, x, timestep, context, transformer_options | {"wrappers": kinds | ours}, **masks, **named)

    return newer


def shifted(model):
    """With other schedules for the video and its sound."""
    return MiniMaxH3SigmaShift.execute(model, 5.0, 2.0).result[0]


def output_heads(run, model, own) -> dict:
    """A PDD acceleration LoRA, whose heads ComfyUI 0.33 does not know: by the family, and by ComfyUI's own class."""
    patches, g = {}, torch.Generator().manual_seed(4)
    for key, value in model.model.diffusion_model.state_dict().items():
        if key.startswith("final_layer.") and "_out" in key:
            rows, columns = 4 * len(value), value[0].numel()
            up, down = torch.randn(rows, 3, generator=g), torch.randn(3, columns, generator=g) / columns
            larger = [rows, *value.shape[1:]]
            adapter = comfy.weight_adapter.LoRAAdapter(set(), (up, down, None, None, None, larger))
            patches[f"diffusion_model.{key}"] = adapter
    found = []
    for each in (model, own):
        clone = each.clone()
        clone.add_patches(patches, 0.3)
        found.append(run(clone))
    return {"moved": difference(run(model), found[0]), "own class": difference(*found)}


def forecast(run, model) -> float:
    """How far a step cache moves the samples."""
    return difference(run(model, steps=8), run(node("ParallelStepCache", model, 0.9, 0.0, 1.0), steps=8))


def previews(run, model) -> list[list[int]]:
    """Shapes of what the previewer is given in a run."""
    seen = []

    class Previewer:
        def decode_latent_to_preview_image(self, _format, x0):
            seen.append(list(x0.shape))

    with patch.object(latent_preview, "get_previewer", lambda *_: Previewer()):
        run(model)
    return seen


def cancelled(run, model) -> dict:
    """Cancelled in its second step, by ComfyUI's own button."""
    steps = []

    class Previewer:
        def decode_latent_to_preview_image(self, _format, _x0):
            steps.append(len(steps))
            if len(steps) == 2:
                comfy.model_management.interrupt_current_processing()

    with patch.object(latent_preview, "get_previewer", lambda *_: Previewer()):
        try:
            run(model)
        except comfy.model_management.InterruptProcessingException:
            return {"steps": len(steps)}
        finally:
            comfy.model_management.interrupt_current_processing(False)
    return {"steps": -1}
