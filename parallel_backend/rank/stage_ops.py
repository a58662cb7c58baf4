"""Operations of a pipeline stage in each micro-step."""

from enum import Enum


class Op(Enum):
    RECEIVE = "receive"
    COMPUTE = "compute"
    SEND = "send"


def stage_ops(stage: int, stages: int) -> tuple[Op, ...]:
    """Operations of `stage` in each micro-step, in order."""
    ops = [Op.COMPUTE]
    if stage > 0:
        ops.insert(0, Op.RECEIVE)
    if stage < stages - 1:
        ops.append(Op.SEND)
    return tuple(ops)
