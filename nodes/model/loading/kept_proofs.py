"""Stores proofs on disk, so that a class is tried once on a machine, and not at each start of ComfyUI."""

import importlib.metadata
from collections.abc import Callable, Mapping
from pathlib import Path

from parallel_backend import own_class as own_classes
from parallel_backend.core.kept_file import digest, find_kept, keep
from parallel_backend.core.own_class import OwnClass
from parallel_backend.own_class.plans.proof import NOT_TRIED, Proof
from parallel_backend.wire.encoding import Encoding

from .class_code import class_code, code_digest

NAME = "proof"
PACKAGES = "torch", "comfy-kitchen", "einops"
"""Packages that classes use in addition to ComfyUI's code."""


def kept_proof(
    folder: Path,
    own: OwnClass,
    structure: str,
    prove: Callable[[], Proof],
    numbers: Mapping[str, float],
    sizes: object = None,
) -> Proof:
    """The proof for calls of this structure from its file in `folder`. Without a file, `prove` finds it, and it is stored.

    `numbers`: the call's numbers. A proof is valid only for them, or for all numbers if it says so. `sizes`: the call's, see
    is_of_sizes. A file is valid for one class with its arguments and code, the versions of PACKAGES, and the code of the
    trial.
    """
    encoding, trials = Encoding((Proof,)), Path(own_classes.__file__).parent
    code_of_trials = [(str(path.relative_to(trials)), path.read_bytes()) for path in sorted(trials.rglob("*.py"))]
    of_all: dict[str, object] = {
        "code": code_digest(class_code(own)),
        "trial": code_digest(code_of_trials),
        **{name: _version(name) for name in PACKAGES},
        "class": digest([own.kind, own.module, own.name, own.arguments, own.video, own.unet]),
        "structure": structure,
    }
    of_these = of_all | {"numbers": repr(sorted(numbers.items()))}
    of_sizes = of_these | {"sizes": repr(sizes)}
    for key in (of_all, of_these, of_sizes):
        known = find_kept(folder, key, NAME, lambda content: encoding.decode(content.encode())[0].message)
        if known is not None:
            return known
    proof = prove()
    key = of_sizes if is_of_sizes(proof) else of_all if proof.is_of_all(numbers) else of_these
    keep(folder, key, NAME, encoding.encode(proof)[0].decode())
    return proof


def is_of_sizes(proof: Proof) -> bool:
    """Whether the proof is valid only for calls of equal sizes, because it refuses something. A larger call, with more
    tokens, may prove more, for example after a call for a small area."""
    return bool(proof.blocks) and any(why not in ("", NOT_TRIED) for why in (proof.sequence, proof.bands, proof.tensor))


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
