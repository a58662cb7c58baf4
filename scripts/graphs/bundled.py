"""Workflows of the bundled model, which need no file."""

from scripts.workflow_form import Graph, Group, Node

from .nodes import (
    CONDITIONING,
    apply_pipefusion_node,
    ksampler_node,
    latent_node,
    loader_node,
    note_group,
    pipefusion_sampler_node,
    report_group,
    sampling_inputs,
)


def _digits(text: str, which: str) -> Node:
    return Node("QuickstartPrompt", (320, 58), {"text": text}, (CONDITIONING,), f"{which} prompt")


def _digits_picture(samples: Node) -> Group:
    decode = Node("QuickstartDecode", (190, 26), {"samples": samples["LATENT"]}, (("IMAGE", "IMAGE"),))
    save = Node("SaveImage", (340, 370), {"images": decode["IMAGE"], "filename_prefix": "parallel-dit"}, ())
    return Group("Image", ((decode,), (save,)))


BUNDLED_NOTE = """\
Runs on any machine, with no file to download: the bundled model is tiny, so `devices` is `cpu,cpu`, two processes on \
the CPU that hold half of the model each.

- **Your own GPUs**: set `devices` to `auto` and `pipefusion_degree` to the number of GPUs. The product of all degrees \
is the number of devices.
- **Your own model**: open this pack's template for it.
- **Prompt**: up to four digits, `_` for an empty cell.
"""


def quickstart() -> Graph:
    """Bundled model, PipeFusion Sampler, and its report as text."""
    loader = loader_node("quickstart-digits (bundled)", pipefusion_degree=2, devices="cpu,cpu")
    positive, negative, latent = _digits("3 1 4 1", "Positive"), _digits("", "Negative"), latent_node(256, 256)
    inputs = sampling_inputs(loader["MODEL"], positive["CONDITIONING"], negative["CONDITIONING"], latent)
    sampler = pipefusion_sampler_node(inputs)
    text = BUNDLED_NOTE + (
        "- **`warmup_steps`**: as many as `steps` makes every step exact, to compare the images.\n"
        "- **`num_pipeline_patch`**: patches that the latent is cut into; 0 chooses.\n"
    )
    return Graph(
        (
            (Group("Model, on two processes", ((loader,),)), Group("Prompt and size", ((positive, negative, latent),))),
            (Group("Sampling", ((sampler,),)), note_group("What to turn", (360, 340), text)),
            (_digits_picture(sampler), report_group(sampler, 554, 240)),
        )
    )


def native_ksampler() -> Graph:
    """The same through Apply PipeFusion and ComfyUI's own KSampler."""
    loader = loader_node("quickstart-digits (bundled)", pipefusion_degree=2, devices="cpu,cpu")
    positive, negative, latent = _digits("3 1 4 1", "Positive"), _digits("", "Negative"), latent_node(256, 256)
    apply = apply_pipefusion_node(loader["MODEL"])
    inputs = sampling_inputs(apply["MODEL"], positive["CONDITIONING"], negative["CONDITIONING"], latent)
    sampler = ksampler_node(inputs)
    text = BUNDLED_NOTE + (
        "- **Apply PipeFusion** may be followed by any sampler, guider or scheduler of ComfyUI; bypassed, every step is "
        "exact.\n"
    )
    return Graph(
        (
            (Group("Model, on two processes", ((loader,),)), note_group("What to turn", (360, 300), text)),
            (Group("Pipeline", ((apply,),)), Group("Prompt and size", ((positive, negative, latent),))),
            (Group("ComfyUI's own sampler", ((sampler,),)),),
            (_digits_picture(sampler),),
        ),
        first=(loader, positive, negative, latent),
    )
