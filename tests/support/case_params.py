"""Cases of families as pytest's parameters: which are in the default tier, and which in the full one alone."""

from collections.abc import Container, Iterable

import pytest
from testing.cases import OF_EACH_FORM
from testing.cases.case import Case


def of_each_form(cases: Iterable[Case], quick: Container[str] = OF_EACH_FORM) -> list[pytest.param]:
    """As `one_of_each`, for what a family's form decides: other families are for the full tier too. `quick`: the families
    that are in the quick tier."""
    params = []
    for param in one_of_each(cases):
        family = param.values[0].family
        marks = [*param.marks, *([pytest.mark.slow] if family not in quick else [])]
        params.append(pytest.param(*param.values, id=param.id, marks=marks if family in OF_EACH_FORM else pytest.mark.full))
    return params


def one_of_each(cases: Iterable[Case]) -> list[pytest.param]:
    """The cases as parameters, for what a family decides and not its variants: of those of one family and one class of cases
    all but the first are for the full tier."""
    seen, params = set(), []
    for case in cases:
        kind = case.family, type(case)
        params.append(pytest.param(case, id=case.name, marks=pytest.mark.full if kind in seen else ()))
        if not case.full:
            seen.add(kind)
    return params
