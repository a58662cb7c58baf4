"""The memory request of a run, from the sampler's inputs before the first model call."""

from parallel_backend.checkpoints.checkpoint import Checkpoint

from .memory_model import Request


def expected_request(
    checkpoint: Checkpoint, shape: tuple[int, ...], entries: int, prompt: int, kept: int = 0, bands: int = 1
) -> Request:
    """Return the memory request of a run. `shape`: of the latent, with as many axes as the model takes. `entries`: batch
    entries of a model call, images times prompts. `prompt`: tokens of the longest prompt. `kept`, `bands`: see Request.

    Reference images are not counted, because only a model call has their tokens. A companion latent is assumed to be as long
    as ComfyUI's empty latents have it.
    """
    built = checkpoint.built
    image_grid = built.patching.grid(shape)
    example = built.example(prompt)
    text = built.text_tokens(built.patching.companion_tokens(built.patching.usual(shape)), example)
    counted = built.counted(image_grid, text, example)
    return Request(
        grid=counted.grid,
        references=0,
        text=counted.text,
        streams=counted.streams,
        entries=entries,
        kept=kept,
        bands=bands,
        band_dim=built.patching.cut(built.patching.best_axis(image_grid)).band_dim,
    )
