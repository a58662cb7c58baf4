"""Proofs of published models that ship with the pack. They are used before stored proofs, and before a trial."""

import logging
from collections.abc import Mapping, Sequence

from parallel_backend.core.kept_file import UNREADABLE
from parallel_backend.core.own_class import OwnClass
from parallel_backend.own_class.plans.plan import Asked, path_of, read_plans
from parallel_backend.own_class.plans.proof import Proof

from .class_code import class_code, code_digest, deciding_arguments

log = logging.getLogger(__name__)

SHIPPED = " by its shipped plan"
CHANGED = " without its shipped plan, which is for other code"


def shipped_proof(own: OwnClass, asked: Asked, lists: Mapping[str, Sequence[str]]) -> tuple[Proof | None, str]:
    """(the proof by a shipped plan, its source as text for the report). None: no plan proves everything that is asked.

    `lists`: the model's lists of blocks. Plans are valid for the class's modules below ROOT at the time when they were
    created.
    """
    if not path_of(own).is_file():  # the digest reads the class's modules
        return None, ""
    try:
        code = class_code(own, helpers=False)
        plans = read_plans(own, code_digest(code))
        if plans is None:
            return None, CHANGED
        arguments = deciding_arguments(own, code)
        plan = next((each for each in plans if each.serves(own.kind, arguments, asked)), None)
        return (None, "") if plan is None else (plan.whole(lists), SHIPPED)
    except UNREADABLE as error:
        log.warning("Parallel DiT: %s has no usable plans (%s); the class is tried", path_of(own), error)
        return None, ""
