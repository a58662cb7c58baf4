"""What other nodes put on a MODEL, or give a sampler, as ComfyUI's own and some packs' do. Run by serve.py."""

import logging

from boot import Results, difference, ksampler, parallel, torch
from comfy_api.torch_helpers import set_torch_compile_wrapper
from parity import prompts

FILE = "tiny.safetensors"


class Told(logging.Handler):
    """Collects what the pack says."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger().addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if "Parallel DiT" in (text := record.getMessage()):
            self.texts.append(text)


def main(results: Results) -> None:
    plain, both, square, told = parallel(FILE), prompts(9, 9), torch.zeros(1, 16, 16, 16), Told()
    expected = ksampler(plain, both, square)

    def compiled(patch) -> dict:
        told.texts.clear()
        model = plain.clone()
        patch(model)
        return {"difference": difference(expected, ksampler(model, both, square)), "told": list(told.texts)}

    def every_block(model) -> None:  # KJNodes, RES4LYF
        blocks = model.get_model_object("diffusion_model").double_blocks
        names = [f"diffusion_model.double_blocks.{index}" for index, _ in enumerate(blocks)]
        assert len(blocks) == len(names) == 2
        for name in names:
            model.add_object_patch(name, torch.compile(model.get_model_object(name)))
        set_torch_compile_wrapper(model, "inductor", keys=names)

    def whole(model) -> None:  # essentials, WaveSpeed, TeaCache
        model.add_object_patch("diffusion_model", torch.compile(model.get_model_object("diffusion_model")))

    results.case("compile, ComfyUI's", lambda: compiled(lambda model: set_torch_compile_wrapper(model, "inductor")))
    results.case("compile, every block", lambda: compiled(every_block))
    results.case("compile, an object patch", lambda: compiled(whole))
