"""Right steps pass `check_equivalence`, and silent faults are named with their cause."""

from __future__ import annotations

import pytest

import fddp
from fddp.testing import check_equivalence
from tests.testing.equivalence.steps import Case, faults, right


@pytest.mark.slow
@pytest.mark.parametrize("case", right(), ids=lambda case: case.name)
def test_right_steps_pass(case: Case) -> None:
    check_equivalence(case.step, case.state, case.batch, **case.options)


@pytest.mark.slow
@pytest.mark.parametrize("case", faults(), ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore:the buffer")
def test_faults_are_named_with_their_cause(case: Case) -> None:
    with pytest.raises(fddp.EquivalenceError) as raised:
        check_equivalence(case.step, case.state, case.batch, **case.options)
    assert case.cause in str(raised.value)
