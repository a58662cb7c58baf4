"""Proofs of trials on disk: read again for the same class, call and code, and for nothing else."""

import dataclasses
import importlib.metadata
from pathlib import Path

import pytest

from parallel_backend.core.own_class import OwnAttention, OwnBlock, OwnSlice
from parallel_backend.own_class.plans.proof import Proof
from tests.support.planted_comfyui import planted

BLOCK = OwnBlock("blocks.0", ("0", ""), False, (OwnSlice(1, 1, (0,), True),), (OwnAttention((0,), (), 4, 8),), ((0,), ()))
PROOF = Proof((BLOCK,), "", "why not: π", "")
SMALL, LARGE = (2, 16, 4, 4, 9), (2, 16, 64, 64, 9)

CODE = {
    "ldm/new/model.py": "import comfy.ops\nfrom . import blocks\nfrom comfy.ldm import common\n",
    "ldm/new/blocks.py": "from .deep.layers import f\n\n\ndef g():\n    from comfy import rmsnorm\n",
    "ldm/new/deep/__init__.py": "",
    "ldm/new/deep/layers.py": "import comfy.model_management\n\n\ndef f():\n    return comfy.helpers.h()\n",
    "ldm/common.py": "from ..ldm.new import blocks\n",
    "ops.py": "import comfy.sd\n",
    "rmsnorm.py": "",
    "helpers.py": "",
    "model_management.py": "",
    "sd.py": "",
    "ldm/other.py": "from .new.model import x\n",
}
"""File -> its code: imports of every form."""
NOT_OF_THE_CLASS = "model_management.py", "sd.py", "ldm/other.py"


@pytest.fixture
def kept(module, tmp_path):
    """`kept(own, structure)`: the proof, and whether it was found anew."""
    kept_proof = module("model.loading.kept_proofs").kept_proof

    def find(
        own, structure: str = "two entries", proof: Proof = PROOF, sizes: object = SMALL, **numbers: int
    ) -> tuple[Proof, bool]:
        found = []

        def prove() -> Proof:
            found.append(1)
            return proof

        return kept_proof(tmp_path / "proofs", own, structure, prove, numbers, sizes), bool(found)

    return find


@pytest.fixture
def own(tmp_path):
    """A class in `new.model`, with modules of its own, of others, and of none."""
    (tmp_path / "comfy" / "ldm" / "new" / "deep").mkdir(parents=True)
    for name, code in CODE.items():
        (tmp_path / "comfy" / name).write_text(code)
    return dataclasses.replace(planted("Right"), folder=str(tmp_path), module="comfy.ldm.new.model")


def test_a_proof_is_found_once(kept, own):
    assert kept(own) == (PROOF, True)
    assert kept(own) == (PROOF, False)
    assert kept(dataclasses.replace(own, blocks=(BLOCK,))) == (PROOF, False)


def test_another_call_class_or_code_is_tried_again(kept, own):
    kept(own)
    assert kept(own, "three entries")[1]
    assert kept(dataclasses.replace(own, arguments='{"blocks": 5}'))[1]


@pytest.mark.parametrize("name", CODE)
def test_a_proof_is_of_the_code_that_the_class_imports(kept, own, name):
    kept(own)
    path = Path(own.folder) / "comfy" / name
    path.write_text("x = 2\n" + CODE[name])
    assert kept(own)[1] != (name in NOT_OF_THE_CLASS)
    path.write_text(CODE[name])
    assert not kept(own)[1]


@pytest.mark.parametrize("package", ["torch", "comfy-kitchen", "einops"])
def test_another_version_of_a_package_is_tried_again(module, kept, own, monkeypatch, package):
    proofs = module("model.loading.kept_proofs")
    assert package in proofs.PACKAGES and len(proofs.PACKAGES) == 3
    kept(own)
    monkeypatch.setattr(proofs, "_version", lambda name: "99" if name == package else importlib.metadata.version(name))
    assert kept(own)[1]


@pytest.mark.parametrize("way", ["sequence", "bands", "tensor"])
def test_a_refusal_of_a_small_call_is_none_of_a_large_one(kept, own, way):
    refusal = dataclasses.replace(PROOF, **{way: "it lacks tokens"})
    assert kept(own, proof=refusal) == (refusal, True)
    assert kept(own, proof=refusal) == (refusal, False)
    assert kept(own, sizes=LARGE) == (PROOF, True)
    assert kept(own) == (PROOF, False)
