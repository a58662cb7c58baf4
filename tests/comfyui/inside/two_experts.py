"""Wan 2.2's way to sample: a MODEL for high noise, another for low, each with a loader and a KSampler. Run by serve.py."""

from unittest.mock import patch

from boot import BASE, Results, comfy, difference, node, parallel, sequence, torch
from families import detecting, read

from parallel_backend.client.registry import registry
from parallel_backend.processes.pool import Pool
from parallel_backend.wire.loading import Load

STEPS, SWITCH = 4, 2


def main(results: Results, high: str, low: str) -> None:
    positive, negative, latent, settings = read(high)

    def prompt(first, second, seed: int = 1) -> torch.Tensor:
        """What both samplers give, one behind the other."""
        common = seed, STEPS, 1.0, "euler", "simple", positive, negative
        begun = node("KSamplerAdvanced", first, "enable", *common, {"samples": latent}, 0, SWITCH, "enable")
        return node("KSamplerAdvanced", second, "disable", *common, begun, SWITCH, 10000, "disable")["samples"]

    def native(name: str):
        path = BASE / "models" / "diffusion_models" / f"{name}.safetensors"
        return comfy.sd.load_diffusion_model(str(path), model_options={"dtype": torch.float32})

    def three_prompts(first, second) -> dict:
        """Of the same two MODELs: differences to ComfyUI's own, and how many models each prompt loads."""
        loads, found = [], []
        send = Pool.send

        def noting(pool: Pool, rank: int, message, *rest) -> None:
            if rank == 0 and isinstance(message, Load):
                loads[-1] += 1
            send(pool, rank, message, *rest)

        with patch.object(Pool, "send", noting):
            for reference in expected:
                loads.append(0)
                found.append(difference(reference, prompt(first, second)))
        pools = {id(each.model.pool) for each in registry()._models}
        registry().unload()
        return {"difference": max(found), "loads": loads, "pools": len(pools)}

    with detecting(settings["detected"]):
        both = native(high), native(low)
        expected = [prompt(*both)] * 3
        results.case("one for both", lambda: difference(expected[0], prompt(both[0], both[0])))
        first, second = (
            parallel(f"{name}.safetensors", pipe=1, config=sequence(ulysses=2), stage_split="even") for name in (high, low)
        )
        results.case("the same degrees", lambda: three_prompts(first, second))
        piped = node("ApplyPipeFusion", parallel(f"{low}.safetensors", stage_split="even"), 2, 1000, True)
        results.case("other degrees", lambda: three_prompts(first, piped))
        elsewhere = parallel(f"{low}.safetensors", devices="cpu:2,cpu:3", stage_split="even")
        results.case("other ranks", lambda: three_prompts(first, elsewhere))
