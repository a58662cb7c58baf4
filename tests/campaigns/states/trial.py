"""So many examples of the state machine, from a seed."""

from collections.abc import Callable
from dataclasses import dataclass

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import FlakyStrategyDefinition
from hypothesis.stateful import run_state_machine_as_test

from .machine import States, World


@dataclass(frozen=True)
class Outcome:
    """`examples`: how many were run. `said`: the first line of what an example failed with. Empty: none did.
    `happened`: see World."""

    examples: int
    said: str
    happened: dict[str, int]


def trial(world: World, examples: int, steps: int, seed: int) -> Outcome:
    """Until the first that fails. `steps`: rules of an example at most."""
    world.happened.clear()
    make: Callable[[], States] = hypothesis.seed(seed)(lambda: States(world))
    said = ""
    try:
        run_state_machine_as_test(
            make,
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                phases=(Phase.generate,),
                database=None,
                deadline=None,
                print_blob=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
    except FlakyStrategyDefinition:  # nothing that was looked at
        raise
    except Exception as error:  # of any kind: what is looked at raises AssertionError, what is called may raise anything
        said = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return Outcome(world.happened["examples"], said, dict(world.happened))
