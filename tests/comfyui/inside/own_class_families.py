"""Files that families compute, by ComfyUI's own class on ranks in their place. Run by serve.py."""

from functools import partial

from boot import Results, by_own_class, difference, native_model, node, parallel, parts_of, sequence, sharing_small_lists
from families import detecting, read, sample

MODES = {
    "stages": {"pipe": 2},
    "split batch": {"pipe": 1, "batch": 2},
    "tensor": {"pipe": 1, "tensor": 2},
    "ulysses": {"pipe": 1, "config": sequence(ulysses=2)},
    "ring": {"pipe": 1, "config": sequence(ring=2)},
    "compiled stages": {"pipe": 2, "compile": True},
    "tensor and ring": {"pipe": 1, "tensor": 2, "devices": "cpu,cpu,cpu,cpu", "config": sequence(ring=2)},
}


def pipefusion(file: str, warmup_steps: int):
    return node("ApplyPipeFusion", parallel(file), 2, warmup_steps, True)


def displaced(file: str, warmup_steps: int):
    """Even patches: on a busy machine a family would cut them by the ranks' speeds, which its trial runs measure."""
    config = sequence(patch_mode="displaced", patch=2, patch_warmup_steps=warmup_steps)
    return parallel(file, pipe=1, config=config, stage_split="even")


def naive(file: str):
    return parallel(file, pipe=1, config=sequence(patch_mode="naive", patch=2), stage_split="even")


def main(results: Results, names: list[str]) -> None:
    loads = {"PipeFusion": pipefusion, "displaced patches": displaced}
    for name in names:
        with detecting(read(name)[-1]["detected"]), sharing_small_lists():
            expected = sample(native_model(f"{name}.safetensors"), name)

            def share(expected, found) -> float:
                """Of a nested latent the largest of the parts' shares."""
                pairs = zip(parts_of(expected), parts_of(found), strict=True)
                return max(difference(part, own) / float(part.abs().max()) for part, own in pairs)

            def compare(mode: str, name=name, expected=expected, share=share) -> dict:
                own = by_own_class(parallel, f"{name}.safetensors", **MODES[mode])
                return {"share": share(expected, sample(own, name))}

            def in_patches(load, warmup_steps: int, name=name, expected=expected, share=share) -> dict:
                """Beside the native model if all steps are exact, and beside the family if one is."""
                file = f"{name}.safetensors"
                found = sample(by_own_class(load, file, warmup_steps), name)
                if warmup_steps > 1:
                    return {"share": share(expected, found)}
                of_family = sample(load(file, warmup_steps), name)
                beside_native = {"own class": share(expected, found), "family": share(expected, of_family)}
                return {"share": share(of_family, found), "beside native": beside_native}

            def in_naive_patches(name=name, share=share) -> dict:
                file = f"{name}.safetensors"
                return {"share": share(sample(naive(file), name), sample(by_own_class(naive, file), name))}

            for mode in MODES:
                results.case(f"{name}, {mode}", partial(compare, mode))
            results.case(f"{name}, naive patches beside the family", in_naive_patches)
            for kind, load in loads.items():
                results.case(f"{name}, {kind} with all steps exact", partial(in_patches, load, 1000))
                results.case(f"{name}, {kind} beside the family", partial(in_patches, load, 1))
