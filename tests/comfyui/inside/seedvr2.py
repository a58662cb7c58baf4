"""SeedVR2 with its own node, which reads the file's two texts off the MODEL. Run by serve.py."""

from block_patches import load_extras
from boot import Results, difference, ksampler, native_model, node, outputs_of, parallel, sequence, torch
from families import detecting, read
from parallel_backend.families.seedvr2 import windows

GRIDS = [
    tuple(int(side) for side in sides)
    for sides in torch.randint(1, 140, (400, 3), generator=torch.Generator().manual_seed(1))
]


def cuts(grid: tuple[int, ...]) -> bool:
    """Whether ComfyUI cuts a video of this many tokens into the same windows."""
    from comfy.ldm.seedvr import model as native

    ways = native.make_720Pwindows_bysize, native.make_shifted_720Pwindows_bysize
    for spans, way in zip(windows(grid), ways, strict=True):
        found = {tuple((axis.start, axis.stop) for axis in window) for window in way(grid, (4, 3, 3))}
        edges = [[(span.start, span.stop) for span in axis] for axis in spans]
        if found != {(frames, rows, columns) for frames in edges[0] for rows in edges[1] for columns in edges[2]}:
            return False
    return True


def main(results: Results, name: str) -> None:
    load_extras("nodes_seedvr")
    _, _, latent, settings = read(name)
    given = torch.randn(1, *latent.shape[1:], generator=torch.Generator().manual_seed(2))
    file = f"{name}.safetensors"

    def sampled(model, video: torch.Tensor = given, **more) -> torch.Tensor:
        prompts = outputs_of("SeedVR2Conditioning", model, {"samples": video})
        return ksampler(model, prompts, latent, scheduler="simple", **more)

    results.case("other windows", lambda: [grid for grid in GRIDS if not cuts(grid)])
    with detecting(settings["detected"]):
        own = native_model(file)
        ours = parallel(file, pipe=1, config=sequence(ulysses=2))
        piped = node("ApplyPipeFusion", parallel(file), 2, 1000, True)

        def texts() -> float:
            """Largest difference of what the node reads off both."""
            pairs = zip(
                *(outputs_of("SeedVR2Conditioning", model, {"samples": given}) for model in (own, ours)), strict=True
            )
            return max(difference(a[0][0], b[0][0]) for a, b in pairs)

        results.case("texts", texts)
        expected = sampled(own, steps=3, cfg=2.0)
        for mode, model in (("ulysses", ours), ("pipefusion", piped)):
            results.case(mode, lambda model=model: difference(expected, sampled(model, steps=3, cfg=2.0)))
        positive, negative = outputs_of("SeedVR2Conditioning", ours, {"samples": given})
        bare = [[positive[0][0], {}]]
        results.case("no video", lambda: ksampler(ours, (bare, bare), latent, steps=1, cfg=1.0))
        other = torch.zeros(1, 16, latent.shape[2] + 1, *latent.shape[3:])
        results.case("another size", lambda: ksampler(ours, (positive, negative), other, steps=1, cfg=1.0))
