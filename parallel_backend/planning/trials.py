"""Results of trials of ComfyUI's own class, as reasons against modes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from parallel_backend.core.degrees import WIDGETS, Degrees
from parallel_backend.core.own_class import OwnClass
from parallel_backend.own_class.plans.proof import NOT_TRIED, Proof


@dataclass(frozen=True, eq=False)
class Trials:
    """Trials of one call of the class `own`."""

    own: OwnClass
    proofs: Mapping[int, Proof | str]
    """Tensor degree -> its proof, or a text that says why there is no proof."""
    guesses: bool = False
    """Whether untried tensor degrees count as proven. They are then tried before they run."""

    def lacks(self, degrees: Degrees) -> str:
        """Return why the class cannot run with these degrees, naming the widget. Empty: it can."""
        found = self.proofs.get(degrees.tensor, self.proofs.get(1, NOT_TRIED) if self.guesses else NOT_TRIED)
        if isinstance(found, str):
            return _refused("tensor", degrees, found)
        reasons = {
            "pipe": found.stages,
            "batch": found.batch,
            "patch": found.bands if found.latent is None else "",
            "ulysses": found.sequence,
            "ring": found.sequence,
            "tensor": found.tensor if degrees.tensor in self.proofs else "",
        }
        lacking = (_refused(axis, degrees, why) for axis, why in reasons.items() if why and getattr(degrees, axis) > 1)
        return next(lacking, "")

    def with_tensor(self, degree: int, found: Proof | str) -> "Trials":
        """Return these trials, with the result of a trial for this tensor degree."""
        return replace(self, proofs={**self.proofs, degree: found})

    def class_for(self, degrees: Degrees) -> OwnClass:
        """Return the class with the proofs for these degrees, for which `lacks` must return nothing."""
        proof = self.proofs[degrees.tensor]
        assert isinstance(proof, Proof)
        return replace(self.own, blocks=proof.blocks, latent=proof.latent)


def _refused(axis: str, degrees: Degrees, why: str) -> str:
    return f"{WIDGETS[axis]} is {getattr(degrees, axis)}, which the trial of the class did not prove: {why}."
