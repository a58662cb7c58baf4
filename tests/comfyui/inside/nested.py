"""Samplers of ComfyUI on a video with its sound: its own model, ranks, and bands. Run by serve.py."""

from functools import partial
from unittest.mock import patch

import latent_preview
from boot import Results, Told, comfy, difference, ksampler, native_model, node, parallel, parts_of, torch
from comfy.nested_tensor import NestedTensor
from comfy_extras.nodes_apg import APG
from small_models import latent, prompts, write

NAME, STEPS = "minimax-h3", 4


def main(results: Results) -> None:
    told = Told()
    write(NAME)
    texts, empty = prompts(NAME), latent(NAME)
    video, sound = empty.unbind()
    generator = torch.Generator().manual_seed(1)
    picture = NestedTensor([torch.randn(part.shape, generator=generator) for part in (video, sound)])
    masks = [(torch.rand(1, *part.shape[2:], generator=generator) * 4).round() / 4 for part in (video, sound)]
    two = NestedTensor([torch.cat((part, part)) for part in (video, sound)])
    file = f"{NAME}.safetensors"
    native, plain = native_model(file), parallel(file)
    banded, warm = node("ApplyPipeFusion", plain, 3, 1, True), node("ApplyPipeFusion", plain, 3, 1000, True)

    def run(model, latent=empty, steps=STEPS, **settings):
        return ksampler(model, texts, latent, steps=steps, cfg=1.0, **settings)

    def in_every_way(put=lambda model: model, by=native, **settings) -> dict:
        """Differences as shares of the largest value. `put`: puts a node on the MODEL. `by`: it is held against."""
        exact = run(put(plain), **settings)
        largest = max(float(part.abs().max()) for part in parts_of(exact))
        told.texts.clear()
        stale = run(put(banded), **settings)
        found = {"warnings": list(told.texts), "stale": difference(exact, stale) / largest}
        found["warm"] = difference(exact, run(put(warm), **settings)) / largest
        found["native"] = difference(exact, run(put(by), **settings)) / largest
        return found | {"finite": all(bool(part.isfinite().all()) for part in (*parts_of(exact), *parts_of(stale)))}

    for sampler in ("euler", "dpmpp_sde"):
        results.case(sampler, partial(in_every_way, sampler=sampler))
    results.case("masks", partial(in_every_way, latent={"samples": picture, "noise_mask": NestedTensor(masks)}))
    guidance = partial(in_every_way, put=lambda model: APG.execute(model, 0.5, 4.0, -0.5).result[0])
    results.case("guidance of the whole latent", guidance)
    one_by_one = native.clone()
    one_by_one.set_model_unet_function_wrapper(entry_by_entry)
    results.case("batch 2", partial(in_every_way, by=one_by_one, latent={"samples": two}))
    results.case("cancelled", partial(cancelled, run, banded))
    results.case("one latent", partial(run, plain, picture.unbind()[0]))


def entry_by_entry(apply, call: dict) -> torch.Tensor:
    """The native model refuses a batch of several videos."""
    x, timestep, c = call["input"], call["timestep"], call["c"]

    def of(entry: int, value):
        return value[entry : entry + 1] if isinstance(value, torch.Tensor) and len(value) == len(x) else value

    calls = ({name: of(entry, value) for name, value in c.items()} for entry in range(len(x)))
    return torch.cat([apply(of(entry, x), of(entry, timestep), **each) for entry, each in enumerate(calls)])


def cancelled(run, model) -> dict:
    """Cancelled in its second step, by ComfyUI's own button. A step of this model is shorter than POLL_SECONDS."""
    steps = []

    class Previewer:
        def decode_latent_to_preview_image(self, _format, _x0):
            steps.append(len(steps))
            if len(steps) == 2:
                comfy.model_management.interrupt_current_processing()

    often = patch("parallel_backend.client.pipefusion.threads.POLL_SECONDS", 0.001)
    with patch.object(latent_preview, "get_previewer", lambda *_: Previewer()), often:
        try:
            run(model)
        except comfy.model_management.InterruptProcessingException:
            return {"steps": len(steps)}
        finally:
            comfy.model_management.interrupt_current_processing(False)
    return {"steps": -1}
