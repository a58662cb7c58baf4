"""Published models by their shipped plans: what of a sampler's call they prove. Run by serve.py."""

import importlib
import sys
from unittest.mock import patch

from boot import PACK, Results

sys.path.append(str(PACK / "scripts" / "plans"))
from make_plans import NODES, captured, own_calls, proofs
from published import PUBLISHED

from parallel_backend.own_class.built.building import build
from parallel_backend.own_class.plans.block_order import block_lists

shipped_plans = importlib.import_module(f"{NODES}.model.loading.shipped_plans")


def main(results: Results, names: list[str]) -> None:
    for name in names:
        results.case(name, lambda name=name: served(name))


def served(name: str) -> dict[str, object]:
    """How many blocks a run by stages shares out without a trial, and of how many; how a plan is found, and how many blocks
    it shares out."""
    model, call, sizes = captured(name, PUBLISHED[name])
    stub = model.model.diffusion_model
    own, times = stub.setup.own_class, own_calls.times_of(model.model.model_sampling)
    lists = block_lists(build(own))
    with patch.object(proofs, "kept_proof", side_effect=AssertionError("it is tried")):
        proof = proofs.proven(stub, call, sizes)
    asked = own_calls.asked(call, sizes, times, sequence=False, bands=False, tensor=1)
    shipped, how = shipped_plans.shipped_proof(own, asked, lists)
    return {
        "blocks": sum(map(len, lists.values())),
        "run": len(proof.blocks),
        "how": how,
        "shared": 0 if shipped is None else len(shipped.blocks),
    }
