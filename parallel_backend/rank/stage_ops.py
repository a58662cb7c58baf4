"""What a pipeline stage does for each micro-step, as data that the engine executes."""

from enum import Enum


class Op(Enum):
    RECEIVE = "receive"
    COMPUTE = "compute"
    SEND = "send"


def stage_ops(stage: int, stages: int) -> tuple[Op, ...]:
    """What `stage` does for each micro-step, in order. The engine executes exactly these."""
    ops = [Op.COMPUTE]
    if stage > 0:
        ops.insert(0, Op.RECEIVE)
    if stage < stages - 1:
        ops.append(Op.SEND)
    return tuple(ops)
