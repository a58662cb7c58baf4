"""What other nodes put on a MODEL, or give a sampler, as ComfyUI's own and some packs' do. Run by serve.py."""

from boot import Results, Told, comfy, difference, ksampler, node, parallel, random_prompts, sequence, torch
from comfy.context_windows import IndexListContextHandler, get_matching_context_schedule, get_matching_fuse_method
from comfy_api.torch_helpers import set_torch_compile_wrapper

FILE, OTHER = "tiny.safetensors", "tiny-sd3.safetensors"


def in_tiles(model):
    """The MODEL as tiled upscalers have it: called for the upper rows, then for the lower ones, which overlap."""

    def by_tiles(apply_model, arguments):
        x, t, c = arguments["input"], arguments["timestep"], arguments["c"]
        upper, lower = (apply_model(part, t, **c) for part in (x[:, :, :10], x[:, :, 6:]))
        return torch.cat((upper[:, :, :8], lower[:, :, 2:]), 2)

    clone = model.clone()
    clone.set_model_unet_function_wrapper(by_tiles)
    return clone


def in_windows(model):
    """The MODEL with context windows of 8 rows, the last of which may be smaller."""
    clone = model.clone()
    schedule, fuse = get_matching_context_schedule("standard_static"), get_matching_fuse_method("pyramid")
    clone.model_options["context_handler"] = IndexListContextHandler(schedule, fuse, 8, 3, 1, False, 2)
    return clone


def main(results: Results) -> None:
    plain, both, square, told = parallel(FILE), random_prompts(9, 9), torch.zeros(1, 16, 16, 16), Told()
    expected = ksampler(plain, both, square)

    def compiled(patch) -> dict:
        told.texts.clear()
        model = plain.clone()
        patch(model)
        return {"difference": difference(expected, ksampler(model, both, square)), "told": list(told.texts)}

    def the_model(model) -> None:  # essentials, WaveSpeed, TeaCache
        model.add_object_patch("diffusion_model", torch.compile(model.get_model_object("diffusion_model")))

    results.case("compile, ComfyUI's", lambda: compiled(lambda model: set_torch_compile_wrapper(model, "inductor")))
    results.case("compile, an object patch", lambda: compiled(the_model))

    ways = {"tiles": in_tiles, "windows": in_windows}
    displaced = parallel(FILE, pipe=1, config=sequence(1, 1, "displaced", 2, 1), stage_split="even")
    banded = node("ApplyPipeFusion", plain, 3, 1, True)
    whole = {way: ksampler(change(plain), both, square, steps=4) for way, change in ways.items()}

    def parts(model, way: str) -> dict:
        """With a part of the latent at a time, against the plain MODEL."""
        told.texts.clear()
        found = ksampler(ways[way](model), both, square, steps=4)
        return {"difference": difference(whole[way], found), "told": list(told.texts)}

    results.case("parts differ from the whole", lambda: difference(whole["tiles"], whole["windows"]))
    results.case("tiles, bands", lambda: parts(banded, "tiles"))
    results.case("tiles, step cache", lambda: parts(node("ParallelStepCache", plain, 3.0, 0.0, 1.0), "tiles"))
    results.case("windows, displaced", lambda: parts(displaced, "windows"))
    results.case("tiles, split batch", lambda: parts(parallel(FILE, pipe=1, batch=2), "tiles"))

    def two_models(model) -> dict:
        """Dual Model CFG Guider with MODELs of other weights and degrees on the same ranks."""
        from comfy_extras.nodes_custom_sampler import DualModelGuider

        (guider,) = DualModelGuider.execute(model, both[0], 3.0, parallel(OTHER, pipe=1, config=sequence(2)), both[1]).args
        sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", 3)
        told.texts.clear()
        noise, sampler = torch.ones_like(square), comfy.samplers.sampler_object("euler")
        samples = guider.sample(noise, square, sampler, sigmas, seed=1, disable_pbar=True)
        return {"samples": samples, "told": list(told.texts)}

    def two_displaced() -> dict:
        exact, found = two_models(parallel(FILE, pipe=1, config=sequence(2))), two_models(displaced)
        return {"difference": difference(exact["samples"], found["samples"]), "told": found["told"]}

    results.case("two models", two_displaced)
