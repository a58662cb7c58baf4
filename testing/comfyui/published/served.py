"""Published models by their shipped plans: what of a sampler's call they prove. Run by serve.py."""

import importlib
from itertools import product

from boot import Results
from make_plans import PACK, captured, own_calls
from published import PUBLISHED

from parallel_backend.families.own_class.block_order import block_lists
from parallel_backend.families.own_class.building import build

shipped_plans = importlib.import_module(f"{PACK}.model.shipped_plans")


def main(results: Results, names: list[str]) -> None:
    for name in names:
        results.case(name, lambda name=name: served(name))


def served(name: str) -> dict[str, object]:
    """How the plan was found for the call, by what is asked, and how many of the class's blocks it shares out."""
    own, call, sizes, times = captured(name, PUBLISHED[name])
    lists = block_lists(build(own))
    found: dict[str, object] = {"blocks": sum(map(len, lists.values()))}
    for sequence, bands, tensor in product((False, True), (False, True), (1, 2, 4)):
        asked = own_calls.asked(call, sizes, times, sequence, bands, tensor)
        proof, how = shipped_plans.shipped_proof(own, asked, lists)
        ways = f"{'sequence, ' * sequence}{'bands, ' * bands}tensor {tensor}"
        found[ways] = {"how": how, "shared": 0 if proof is None else len(proof.blocks)}
    return found
