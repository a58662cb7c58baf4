"""Dual Model CFG Guider with a MODEL for each side, against ComfyUI's own for the same files. Run by serve.py."""

from boot import Results, comfy, difference, parallel, torch
from comfy_extras.nodes_custom_sampler import DualModelGuider
from families import detecting
from safetensors.torch import load_file, save_file
from small_models import detected, latent, prompts, write


def main(results: Results) -> None:
    name, other = "ideogram4", "without-text"
    with detecting(detected(name)):
        path = write(name)
    save_file({key: value * 1.1 for key, value in load_file(path).items()}, path.with_name(f"{other}.safetensors"))
    positive, _ = prompts(name)

    def sample(model, negative) -> torch.Tensor:
        """With a negative side without text."""
        (guider,) = DualModelGuider.execute(model, positive, 3.0, negative, None).args
        noise = torch.randn(latent(name).shape, generator=torch.Generator().manual_seed(1))
        sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", 3)
        sampler = comfy.samplers.sampler_object("euler")
        return guider.sample(noise, latent(name), sampler, sigmas, seed=1, disable_pbar=True)

    def native(file: str):
        return comfy.sd.load_diffusion_model(
            str(path.with_name(f"{file}.safetensors")), model_options={"dtype": torch.float32}
        )

    def ours(file: str):
        return parallel(f"{file}.safetensors", pipe=1, devices="cpu")

    with detecting(detected(name)):
        expected = sample(native(name), native(other))
        results.case("one of them on ranks", lambda: difference(expected, sample(ours(name), native(other))))
        results.case("both on ranks", lambda: difference(expected, sample(ours(name), ours(other))))
        results.case("one for both sides", lambda: difference(expected, sample(native(name), native(name))))
